// layout.h: every byte that processes share, drawn once. Nothing here waits, maps or allocates.
//
// clang-format off
//   a segment (one anonymous file)
//   0        4096      ...                                          data_offset                 trace    total
//   ┌────────┬─────────┬────────────┬────────┬─────────┬───────────┬─────────┬──────────────────┬────────┐
//   │ Header │ Peers   │ PoolHeader │ Blocks │ Channel │ Lanes     │ rings   │ pool bytes       │ events │
//   │        │ × peers │ + entries  │ + rows │ Header  │ Receivers │ × lanes │ (lent out as     │ × ends │
//   │        │         │            │ Store  │         │           │         │ blocks)          │        │
//   │        │         │            │        │         │ Cursors,  │         │                  │        │
//   │        │         │            │        │         │ schema    │         │                  │        │
//   └────────┴─────────┴────────────┴────────┴─────────┴───────────┴─────────┴──────────────────┴────────┘
//   └─ control: read and written by all ───────────────────────────┘└─ data: written by senders ┘└─ of a channel:
//                                                                      and takers, mapped          written by its
//                                                                      read-only by others         ends while traced
// clang-format on
//
// MUST: a reader of a number copies it once, checks the copy, and uses the copy (no double fetch).
// MUST: a field has one writer, or is changed by compare-and-swap, or under the lock that its comment names.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "atomic.h"

namespace penstock {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i32 = std::int32_t;
using i64 = std::int64_t;

inline constexpr u64 MAGIC = 0x4b434f54534e4550;  // "PENSTOCK", little endian
inline constexpr u32 LAYOUT_VERSION = 7;
inline constexpr u64 PAGE = 4096;
inline constexpr u32 MAX_PEERS = 128;
inline constexpr u32 MAX_LANES = 64;      // one bit each in a u64
inline constexpr u32 MAX_RECEIVERS = 64;  // one bit each in a u64
inline constexpr u32 MAX_BLOCKS = 1u << 16;
inline constexpr u64 MAX_NBYTES = 1ull << 44;  // 16 TiB: keeps every sum of two sizes far from overflow
inline constexpr u64 LINE = 64;
inline constexpr u32 NAME_NBYTES = 32;
inline constexpr u64 MAX_SCHEMA_NBYTES = 1 << 20;
inline constexpr u64 TRACE_EVENTS = 2048;  // in the ring of each end
inline constexpr u32 GRANULES = 32768;     // a pool that grows claims its pages in at most so many pieces

template <class T>
using Shared = Atomic<T>;
static_assert(sizeof(Shared<u32>) == 4 && sizeof(Shared<u64>) == 8 && sizeof(Counter) == 8);

enum class SegmentKind : u32 { raw = 1, pool = 2, channel = 3 };
// How many ends a channel has. A receiver of an inbox finds the lanes that have records by ChannelHeader.ready.
// Receivers of the other styles read the one lane there is.
enum class ChannelStyle : u32 { none = 0, ring = 1, broadcast = 2, inbox = 3 };

// What a segment is made of. Written once before anybody else can see the segment; every attacher copies it, checks the
// copy (Geometry in segment.h) and computes all offsets from that, so nothing written here later can move a pointer.
struct Shape {
    u32 kind;
    u32 max_peers;
    u32 max_blocks;
    u32 has_grants;
    u32 lanes;
    u32 receivers;
    u32 latency;         // Latency in wait.h
    u32 receiver_death;  // 0: a send that finds a dead receiver raises once; 1: goes on without it
    u32 sender_death;    // the same for a receiver that finds a dead sender (inbox)
    u32 style;           // ChannelStyle; none: not a channel
    u32 buckets;         // of a pool that keeps blocks by key, a power of two; 0: it does not
    u32 elsewhere;       // of a pool: 1: its bytes are not in this file, and are none of ours; only their holders are
    u64 page;            // what data is aligned to: 4096, or the huge page
    u64 lane_nbytes;     // a power of two
    u64 inline_limit;    // longer records go to the pool
    u64 pool_nbytes;
    u64 granule_nbytes;  // 0: the pool was claimed at creation
    u64 raw_nbytes;
    u64 schema_nbytes;  // of what a channel's messages are said to be (0: plain bytes), or where a pool's bytes lie
};
static_assert(sizeof(Shape) == 104);

struct Header {
    u64 magic;
    u32 version;
    u32 fingerprint;     // of the sizes of all structs below
    u64 nonce;           // random: a ticket or ref of another segment does not fit
    u64 pid_namespace;   // in which the peers' pids mean something
    u64 time_namespace;  // in which their clocks and start times do
    u64 created_ns;
    u64 numa_node_plus_one;
    Shape shape;
    char name[NAME_NBYTES];
    alignas(LINE) Shared<u32> peers_version;  // moved by every join, leave and reap
    Shared<u32> changes;                      // moved whenever an end of the channel comes, goes or dies
    Shared<u64>
        traced_until;  // ends write events before this time (ns); raised by tracers, 0 by an end that is past it
};
static_assert(sizeof(Header) <= PAGE);

// ── peers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
// identity is one word, so that a slot is claimed, and its owner named, in one step: a peer that dies right after the
// claim can be found. state:4 | pid:22 | start:38 (clock ticks since boot, from /proc/PID/stat: tells a reused pid
// apart).
enum class PeerState : u32 { free = 0, live = 1, dying = 2, dead = 3, left = 4 };

struct alignas(LINE) PeerSlot {
    Shared<u64> identity;   // claimed by CAS from free, dead or left; live -> dying -> dead by any reaper
    Shared<u32> epoch;      // counts the peers that have had this slot
    Shared<u32> how;        // 0 unknown, else 1 + wait status
    Shared<u64> joined_ns;  // these six: written by the owner
    Shared<u64> bell_ino;   // of the pipe below; 0: none
    Shared<u32> bell_fd;    // write end of the pipe that wakes the owner's event loop, in the owner's table
    Shared<u32> thread;     // of the owner, when it joined (for stack dumps by outsiders)
    char name[NAME_NBYTES];
    Shared<u64> reaped_ns;  // when reaping began; 0: it has not. These four: written by the reaper, before dead
    Counter reaped_blocks;
    Counter reaped_nbytes;
    Counter reaps;          // peers that the owner has reaped
    Shared<u64> watch_ino;  // of the pipe by which the owner's watcher learns that a peer joined; written by the owner
    Shared<u32> watcher;    // robust futex: thread of the owner's watcher, FUTEX_WAITERS; the kernel sets OWNER_DIED
    Shared<u32> watch_fd;   // write end of that pipe, in the owner's table
    Shared<u64> take_since_ns;  // waiting for memory since; 0: not; written by the owner
};
static_assert(sizeof(PeerSlot) == 128);
static_assert(offsetof(PeerSlot, watcher) % 8 == 0);  // so that the node that belongs to it is aligned

// The nodes of a robust list lie in private memory before the control part, so far from their words: the kernel follows
// nothing that another process can write.
inline constexpr u64 ROBUST_DISTANCE = 64 << 10;
static_assert(PAGE + MAX_PEERS * sizeof(PeerSlot) <= ROBUST_DISTANCE);

// ── bell: where all waiting is done (wait.h) ─────────────────────────────────────────────────────────────────────────
struct alignas(LINE) Bell {
    Shared<u32> rings;  // the futex word; moved by ringers
    u32 unused;
    Shared<u64> parked;         // a bit per waiter asleep in the futex; set and cleared by the waiter (and its reaper)
    Shared<u64> parked_async;   // a bit per waiter asleep in an event loop; likewise
    Shared<u64> wake_position;  // a waiter for room: the position from which waking it is worth while (a hint)
};
static_assert(sizeof(Bell) == 64);

// ── pool ───────────────────────────────────────────────────────────────────────────────────────────────────────────
// The truth about memory is the set of blocks in state live, with their extents, and their rows of counts.
// entries[] (which extents are taken, in the order of their offsets) is derived, and rebuilt when a holder of the
// pool's lock died. A word of a lock: 0, or owner slot + 1 (bits 0-7) | waiters (8) | tag of the owner's epoch (9-31).
enum class BlockState : u32 { free = 0, live = 1, returned = 2 };
enum class StoreState : u32 { none = 0, filling = 1, ready = 2 };  // see store.h
inline constexpr u32 KEY_WORDS = 4;                                // 32 bytes: what a cryptographic hash gives

struct Entry {
    u64 offset;
    u64 extent;
    u32 block;
    u32 unused;
};

struct alignas(LINE) PoolHeader {
    Shared<u32> lock;  // LOCK pool: entries, entry_count, next_block, block states free -> live and returned -> free
    Shared<u32> entry_count;
    Shared<u32> next_block;             // where the search for a free block number begins
    Shared<u32> swept_returns;          // value of returns when entries was last swept
    alignas(LINE) Shared<u32> returns;  // moved by each peer that gives the last lease of a block back
    Shared<u32> unused;
    Shared<u64> claimed_nbytes;
    alignas(LINE) Bell memory;  // takers that wait for a block to come back; a bit per peer, modulo 64, see Pool::take
    alignas(LINE) Counter takes;  // counters
    Counter taken_nbytes_total;
    Counter exhaustions;
    Counter recoveries;
    Counter stale_refs;
    Shared<u64> granules[GRANULES / 64];  // a bit per granule: set while its pages are claimed
};

struct alignas(LINE) Block {
    Shared<u32> lock;   // LOCK block: state live -> returned, rows, grant_units, pending
    Shared<u32> state;  // BlockState
    Shared<u32> generation;
    Shared<u32> grant_units;  // sum of the grant rows; derived, recomputed when a holder of the lock died
    Shared<u64> offset;       // in the pool's bytes; these three: written by the taker while the block is free
    Shared<u64> extent;
    Shared<u64> nbytes;
    Shared<u64> pending;           // channel: receivers that have not yet opened the record lying here
    Shared<u64> pending_position;  // ... its position in that lane: at or after committed means: never published
    Shared<u32> pending_lane;
    Shared<u32> taker;
    Shared<u64> taken_ns;
    Shared<u32> store_state;  // StoreState: LOCK store, and LOCK block where it becomes none; looked at without: a hint
    Shared<u32> next;         // LOCK store: block + 1 of the next in this chain; derived
    Shared<u64> key[KEY_WORDS];  // LOCK store; written while it is not kept
    Shared<u64> used_ns;         // LOCK store: these two
    Shared<u32> hits;
    // a row follows: u32 held[max_peers]. After all blocks, if has_grants, for each: u16 grants[from][to], of
    // max_peers; apart, for they are 2 KiB of 32 peers, seldom looked at, and a look at every block would cross
    // a page each.
};
static_assert(sizeof(Block) == 128);

struct StoreHeader {
    alignas(LINE) Shared<u32> lock;   // LOCK store: keys, states, chains
    alignas(LINE) Shared<u32> fills;  // moved whenever a block that was being written is written, or is given up
    alignas(LINE) Bell filled;        // peers that wait for that; a bit per peer, modulo 64
    alignas(LINE) Counter hits;       // counters
    Counter misses;
    Counter puts;
    Counter evictions;
    Counter evicted_nbytes;
    Counter fills_awaited;
    Counter abandoned;
    // buckets follow: u32, block + 1 of the first in each chain; derived
};
static_assert(sizeof(StoreHeader) == 4 * LINE);

// ── channel ────────────────────────────────────────────────────────────────────────────────────────────────────────
// A lane is the byte ring of one sender; every receiver has a cursor in it. ring: 1 lane, 1 receiver.
// broadcast: 1 lane, N receivers. inbox: N lanes, 1 receiver. An end's word: state:8 | slot:8 |
// epoch of the peer in that slot:24 | epoch of the end:24.
// dead: marked by a reaper, after its peer is dying. failed: by its owner, and its peer may live: another may have
// taken the end before the owner leaves, so a reaper cleans up after it only while it has a keeper.
enum class EndState : u32 { expected = 0, live = 1, closed = 2, dead = 3, failed = 4 };
inline bool has_died(EndState state) { return state == EndState::dead || state == EndState::failed; }
enum class CursorMode : u32 { out = 0, counted = 1, joining = 2 };

// The ring of a lane, positions growing to the right (they never wrap; the index is position modulo lane_nbytes):
//
//     released (slowest receiver)          read position (of one receiver)         committed
//   ────────┬────────────────────────────────┬─────────────────────────────────────────┬──────────── free ───
//           │ read, perhaps still leased     │ committed, not yet read                 │ being written
//
// MUST: committed - released <= lane_nbytes for every counted cursor; a record never crosses the end of the ring.
struct Record {
    u64 position;  // its own: a record that is not where it says is not a record
    u64 committed_ns;
    u64 sequence;
    u32 length;
    u16 kind;   // RecordKind
    u16 epoch;  // low bits of the sender's epoch: a new sender's first record is told apart
};
static_assert(sizeof(Record) == 32);
inline constexpr u64 RECORD_ALIGN = 32;
enum class RecordKind : u16 { bytes = 1, spilled = 2, skip = 3 };

struct SpilledRef {  // what a spilled record carries instead of its bytes
    u32 block;
    u32 generation;
    u64 offset;
    u64 nbytes;
};

struct alignas(LINE) Waits {  // counters of one end; written by that end only
    Counter records;
    Counter nbytes;
    Counter spins;  // waits that ended while spinning
    Counter parks;  // waits that slept
    Counter wakes;  // wake-ups given to others
    Counter longest_ns;
    Shared<u64> since_ns;     // waiting since; 0: not waiting
    Counter furthest_nbytes;  // sender: most bytes in flight; receiver: most bytes behind
};
static_assert(sizeof(Waits) == 64);

// Why an end failed: an exception of its user. Written by its owner before the end's word says dead. The epoch is
// written before and after the text, so a reader of another end's text sees that.
inline constexpr u32 FAILURE_NBYTES = 200;
struct Failure {
    Shared<u32> epoch;  // of the end that failed; 0: none yet, or the text is being written
    Shared<u32> nbytes;
    Shared<u64> text[FAILURE_NBYTES / sizeof(u64)];
};

struct alignas(LINE) Lane {
    Shared<u64> committed;           // moved by the sender only; all before it may be read
    Shared<u32> cpu;                 // where the sender was when it last committed: do not spin on its own core
    Shared<u32> waits_for_memory;    // the sender's wait (waits.since_ns) is for the pool, not for room in the ring
    Shared<u64> sequence;            // records committed
    Shared<u64> last_ns;             // when
    Shared<u64> keeper;              // word of a sender that closed while a view could still write here; 0: none
    Shared<u64> kept_position;       // position of that room: nothing is written over it while there is a keeper
    alignas(LINE) Shared<u64> word;  // the sender: EndState, slot, epoch
    Shared<u64> joining;             // receivers that wait to be counted; set by them, cleared by the sender
    Counter spills;
    Counter exhaustions;
    Counter refused;          // WouldBlock and Timeout given to the sender
    Shared<u64> ended;        // the word of the sender before this one; ordered by publish and by changes
    alignas(LINE) Bell room;  // where the sender waits: bit 0
    Waits waits;
    Failure failure;  // of the sender
};
static_assert(sizeof(Lane) == 512);

struct alignas(LINE) ReceiverSlot {
    Shared<u64> word;    // the receiver: EndState, slot, epoch
    Shared<u64> ended;   // the word of the receiver before this one; ordered by changes
    Shared<u64> keeper;  // word of a receiver that failed and has yet to give its records back; 0: none
    alignas(LINE) Waits waits;
    Failure failure;  // of the receiver
};
static_assert(sizeof(ReceiverSlot) == 384);

struct alignas(LINE) Cursor {  // one receiver in one lane
    Shared<u64> released;      // moved by the receiver; all before it may be overwritten
    Shared<u32> mode;  // CursorMode:2 | epoch of the receiver:24 (so that a slow reaper cannot mean its successor)
    Shared<u32> unused;
    Shared<u64> sequence;  // records read
    Shared<u64> read;  // position of the next record to read: a receiver that hands wake-ups on sees which are behind
};
static_assert(sizeof(Cursor) == 64);

struct alignas(LINE) ChannelHeader {
    alignas(LINE) Bell bell;          // where receivers wait: a bit per receiver
    alignas(LINE) Shared<u64> ready;  // inbox: lanes that may have something to read
};

// ── trace ──────────────────────────────────────────────────────────────────────────────────────────────────────────
// What an end has done, in a ring of its own: those of the lanes' senders first, then those of the receivers. A cursor
// for each end comes first. No page of this part is claimed before a tracer does so.
enum class TraceKind : u8 { opened = 1, closed = 2, sent = 3, taken = 4, waited = 5 };
inline constexpr u8 WAIT_SLEPT = 1, WAIT_TIMED_OUT = 2, WAIT_FOR_MEMORY = 4;  // TraceEvent.how
inline constexpr u8 NO_INDEX = 0xff;

struct TraceEvent {
    u64 since_ns;  // sent, taken: when the record was committed; waited: when the wait began
    u64 ns;        // when it was over: sent: when the wake-ups had been given
    u64 number;    // sent, taken: of the record in its lane; opened: the pid
    u32 nbytes;    // of the record; 4 GiB - 1 and more are that
    TraceKind kind;
    u8 how;    // sent: processes woken, up to 255; waited: WAIT_...
    u8 index;  // taken: the lane; waited: of a sender: the receiver in its way, or NO_INDEX
    u8 unused;
};
static_assert(sizeof(TraceEvent) == 32);
inline constexpr u64 TRACE_WORDS = sizeof(TraceEvent) / sizeof(u64);

struct alignas(LINE) TraceCursor {
    Shared<u64> written;  // events so far
};

inline constexpr u32 layout_fingerprint() {
    u32 h = 2166136261u;
    const u64 sizes[] = {LAYOUT_VERSION,
                         sizeof(Header),
                         sizeof(Shape),
                         sizeof(PeerSlot),
                         sizeof(Bell),
                         sizeof(Entry),
                         sizeof(PoolHeader),
                         sizeof(Block),
                         sizeof(StoreHeader),
                         sizeof(Record),
                         sizeof(SpilledRef),
                         sizeof(Waits),
                         sizeof(Lane),
                         sizeof(ReceiverSlot),
                         sizeof(Cursor),
                         sizeof(ChannelHeader),
                         sizeof(TraceEvent),
                         sizeof(TraceCursor),
                         TRACE_EVENTS,
                         offsetof(Header, shape),
                         offsetof(Header, peers_version),
                         offsetof(Header, traced_until),
                         offsetof(Lane, word),
                         offsetof(PoolHeader, granules)};
    for (u64 s : sizes) h = (h ^ static_cast<u32>(s)) * 16777619u;
    return h;
}

inline u64 round_up(u64 n, u64 to) { return (n + to - 1) / to * to; }

}  // namespace penstock
