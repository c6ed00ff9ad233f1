// atomic.h: words that several threads or processes touch, and every order between them, by name.
//
// An operation states its order: RELAXED, or one half of a named order, as in
//     lane.committed.store(position, order::publish.release);      lane.committed.load(order::publish.acquire);
// Both halves carry the same name (tests/test_orders.py), docs/design/orders.md has a row for each name, and
// tests/model shows a failure for each missing half. RELAXED needs no partner: a counter, a hint, or a word that a lock
// or a named order makes visible.
#pragma once
#include <atomic>
#include <cstdint>

namespace penstock {

inline constexpr std::memory_order RELAXED = std::memory_order_relaxed;

namespace order {
struct Order {
    static constexpr std::memory_order acquire = std::memory_order_acquire;
    static constexpr std::memory_order release = std::memory_order_release;
    static constexpr std::memory_order acq_rel = std::memory_order_acq_rel;
    static constexpr std::memory_order seq_cst = std::memory_order_seq_cst;
};
// clang-format off
inline constexpr Order publish;     // a record is written before Lane.committed passes it
inline constexpr Order room;        // a record was read, or a view has written, before its room is given back
inline constexpr Order ready;       // a record is committed before its bit is set; cleared before the last look
inline constexpr Order bell;        // published before parked is read; parked is set before the last look (wait.h)
inline constexpr Order pend;        // a receiver is out before it looks for blocks; a block is live before mode is read
inline constexpr Order mode;        // where a cursor stands is written before its mode says counted
inline constexpr Order joining;     // the mode says joining before the request is seen
inline constexpr Order end;         // all that a sender or receiver did comes before its end's word says closed or dead
inline constexpr Order changes;     // an end's word has changed before Header.changes moves
inline constexpr Order lock;        // what a lock protects is written before it is unlocked
inline constexpr Order block;       // a block's fields are written before its state changes
inline constexpr Order returns;     // a block's state is `returned` before PoolHeader.returns moves
inline constexpr Order fills;       // a block's writer has committed it, or let it go, before StoreHeader.fills moves
inline constexpr Order granules;    // pages are claimed before their bit is set
inline constexpr Order tap;         // given back before it is overwritten; copied before the tap looks whether it was
inline constexpr Order trace;       // an event is written before its cursor passes it, and that before the next one
inline constexpr Order identity;    // a peer's state changes before what follows from it
inline constexpr Order epoch;       // a slot's identity is the next peer's before its epoch is
inline constexpr Order members;     // a peer's identity has changed before Header.peers_version moves
inline constexpr Order ledger;      // the hash of a KV block is written before its state says valid
inline constexpr Order bell_pipe;   // PeerSlot.bell_fd is written before bell_ino
inline constexpr Order watch_pipe;  // PeerSlot.watch_fd is written before watch_ino
inline constexpr Order ranks;       // numbers of a rank are there, and those before are read, before its row says so
// Within a process:
inline constexpr Order views;       // given up before views are counted; a view is dropped before it looks for that
inline constexpr Order mapping;     // a segment's writable mapping is there before its address is
inline constexpr Order watcher;     // the watcher's robust list is registered before Watcher.thread_ says so
inline constexpr Order robust;      // a node of the robust list is whole before it is linked; the kernel reads it
inline constexpr Order point;       // a point's name is written before it is armed
inline constexpr Order work;        // a job is written before its chunks can be claimed; a chunk is done before it counts
// clang-format on
}  // namespace order

inline void fence(std::memory_order order) { std::atomic_thread_fence(order); }

// std::atomic without its default, sequentially consistent, orders.
template <class T>
class Atomic {
   public:
    static_assert(std::atomic<T>::is_always_lock_free);
    Atomic() = default;
    constexpr Atomic(T value) : value_(value) {}
    T load(std::memory_order order) const { return value_.load(order); }
    void store(T value, std::memory_order order) { value_.store(value, order); }
    T exchange(T value, std::memory_order order) { return value_.exchange(value, order); }
    bool compare_exchange_strong(T& expected, T value, std::memory_order order) {
        return value_.compare_exchange_strong(expected, value, order);
    }
    bool compare_exchange_weak(T& expected, T value, std::memory_order order) {
        return value_.compare_exchange_weak(expected, value, order);
    }
    T fetch_add(T by, std::memory_order order) { return value_.fetch_add(by, order); }
    T fetch_sub(T by, std::memory_order order) { return value_.fetch_sub(by, order); }
    T fetch_or(T bits, std::memory_order order) { return value_.fetch_or(bits, order); }
    T fetch_and(T bits, std::memory_order order) { return value_.fetch_and(bits, order); }

   private:
    std::atomic<T> value_{};
};

// A number for people to read: nothing is decided by it, so all of it is relaxed.
class Counter {
   public:
    std::uint64_t value() const { return value_.load(RELAXED); }
    void set(std::uint64_t value) { value_.store(value, RELAXED); }
    // By one writer: a load and a store.
    void count(std::uint64_t by = 1) { set(value() + by); }
    void raise(std::uint64_t to) {
        if (to > value()) set(to);
    }
    // By several.
    void add(std::uint64_t by = 1) { value_.fetch_add(by, RELAXED); }
    void subtract(std::uint64_t by) { value_.fetch_sub(by, RELAXED); }

   private:
    Atomic<std::uint64_t> value_;
};

}  // namespace penstock
