// wait.h: the only code that sleeps. A bell is an eventcount: a waiter sets its bit in `parked`, looks for work once
// more, then sleeps on `rings`, which a ringer increments when `parked` has bits. So no wake-up is lost, whichever side
// is delayed (tests/model/test_bell.py explores it).
//
//   waiter                                            ringer
//   seen = rings             seq_cst                  publish            release
//   parked |= bit            seq_cst (order bell)     fence              seq_cst (order bell)
//   ready? -> no sleep                                parked == 0? -> none to wake
//   futex_wait(rings, seen)                           rings += 1; futex_wake
//
// If the ringer does not see the bit, its fence came first, and the waiter's second look sees what was published.
// If it does, rings has moved since `seen` was read, and the kernel refuses to sleep, or wakes.
// Bits are cleared by the waiter alone, so a ringer that stops anywhere leaves the bit for the next one to see. (In a
// pool's bell waiters share bits: there the ringer clears all bits and wakes all waiters; if it is stopped between the
// two, they sleep until their next look-up.)
#pragma once
#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "clock.h"
#include "layout.h"
#include "points.h"
#include "spinner.h"

namespace penstock {

// std::atomic::wait uses the private futex, which does not work between processes.
inline int futex(Shared<u32>* word, int operation, u32 value, const timespec* timeout, u32 mask) {
    long got = ::syscall(SYS_futex, reinterpret_cast<u32*>(word), operation, value, timeout, nullptr, mask);
    return got < 0 ? -errno : static_cast<int>(got);
}
inline constexpr u32 ANY = FUTEX_BITSET_MATCH_ANY;
inline int futex_wait(Shared<u32>* word, u32 expected, u64 deadline, u32 mask = ANY) {
    timespec at{static_cast<time_t>(deadline / 1'000'000'000), static_cast<long>(deadline % 1'000'000'000)};
    return futex(word, FUTEX_WAIT_BITSET, expected, deadline == NEVER ? nullptr : &at, mask);
}
inline int futex_wake(Shared<u32>* word, int waiters, u32 mask = ANY) {
    return futex(word, FUTEX_WAKE_BITSET, static_cast<u32>(waiters), nullptr, mask);
}
// 64 waiters, 32 bits in the kernel: two may share one, and then may be woken for each other.
inline u32 fold(u64 bits) { return static_cast<u32>(bits) | static_cast<u32>(bits >> 32); }

// What a thread lets go of while it sleeps for a lock: the interpreter, if it has it. Set by the bindings; null:
// nothing.
struct Interpreter {
    void* (*release)() = nullptr;
    void (*retake)(void* released) = nullptr;
};
inline Interpreter interpreter;
inline int futex_wait_for_lock(Shared<u32>* word, u32 expected, u64 deadline) {
    void* released = interpreter.release == nullptr ? nullptr : interpreter.release();
    int got = futex_wait(word, expected, deadline);
    if (released != nullptr) interpreter.retake(released);
    return got;
}

// ── ringing ────────────────────────────────────────────────────────────────────────────────────────────────────────
inline constexpr int HAND_ON_WAKES = 2;  // a ringer wakes so many; the woken wake the rest. Two, so that one that
                                         // is stopped between waking and handing on does not keep the others

// Called after something was published. Returns the bits of waiters in event loops, and counts the wakes. The caller
// wakes waiters in event loops through their pipes (Attachment::wake_async knows how).
inline u64 ring(Bell& bell, Counter* wakes = nullptr, int most = HAND_ON_WAKES) {
    fence(order::bell.seq_cst);  // published before parked is read
    u64 parked = bell.parked.load(RELAXED);
    u64 in_loop = bell.parked_async.load(RELAXED);
    if (__builtin_expect((parked | in_loop) == 0, 1)) return 0;
    bell.rings.fetch_add(1, order::bell.seq_cst);
    if (parked != 0) {
        int woken = futex_wake(&bell.rings, most, fold(parked));
        if (wakes != nullptr && woken > 0) wakes->count(static_cast<u64>(woken));
    }
    return in_loop;
}

// For what concerns all (an end closed, a peer died): wake all, whether their bit is seen or not.
inline u64 ring_all(Bell& bell) {
    bell.rings.fetch_add(1, order::bell.seq_cst);
    futex_wake(&bell.rings, INT_MAX);
    fence(order::bell.seq_cst);  // as in ring()
    return bell.parked_async.load(RELAXED);
}

// interrupted: a signal came, or may have come just before we slept (futex has no signal mask to close that gap): the
// caller looks, and calls again. First after 80 ms, so that a KeyboardInterrupt that came as the wait began is seen
// within 100 ms; then ever more rarely, down to once in 0.96 s, so that a long wait costs nothing: nor is a
// wake-up that the kernel refused lost for longer. (Twelve looks a second in each of two processes were 0.0015 of a
// core.)
enum class Woken { ready, deadline, interrupted };
inline constexpr u64 LOOK_UP_NS = 80'000'000;
inline constexpr u64 MAX_LOOK_UP_NS = 960'000'000;

// Sleeps until ready(), the deadline, or a signal. The caller has let go of every lock of the interpreter. With
// clears = false the bit is left to the ringer, which takes all bits and wakes all: for waiters that share bits.
// hand_on(others) is called when a ringer woke us and others were parked: it wakes one that needs it, and counts.
template <bool clears = true, class Ready, class HandOn>
Woken wait(Bell& bell, u64 bit, u64 deadline, Spinner& spinner, Waits& waits, const Shared<u32>* cpu, Ready&& ready,
           HandOn&& hand_on) {
    u64 entered = now_ns(), began = waits.since_ns.load(RELAXED);
    bool is_resumed = began != 0 && began <= entered;  // after an interruption: the same wait, which has spun already
    u64 started = is_resumed ? began : entered;
    if (!is_resumed) waits.since_ns.store(started, RELAXED);
    // The next look-up: 80 ms after the wait began, then ever later, for what came in between has long been seen.
    u64 look_up = entered + std::clamp(entered - started, LOOK_UP_NS, MAX_LOOK_UP_NS);
    u64 until = std::min(deadline, look_up);
    auto finish = [&](Woken why) {
        u64 waited = now_ns() - started;
        if (why != Woken::interrupted) waits.since_ns.store(0, RELAXED);
        waits.longest_ns.raise(waited);
        return why;
    };
    if (!is_resumed && spinner.spin(started, cpu, ready)) {
        waits.spins.count();
        return finish(Woken::ready);
    }
    for (;;) {
        u32 rings = bell.rings.load(order::bell.seq_cst);  // first: a ringer that takes our bit moves rings after
        bell.parked.fetch_or(bit, order::bell.seq_cst);    // before the second look
        fence(order::bell.seq_cst);
        PENSTOCK_POINT("wait.parked");
        int got = 0;
        bool is_ready = ready();
        if (!is_ready) {
            if (!is_resumed) waits.parks.count();
            got = futex_wait(&bell.rings, rings, until, fold(bit));
            PENSTOCK_POINT("wait.woken");
        }
        u64 others = clears ? bell.parked.fetch_and(~bit, order::bell.seq_cst) & ~bit : 0;
        if (others != 0 && got == 0 && !is_ready) hand_on(others);
        if (is_ready || ready()) {
            u64 now = now_ns();
            spinner.learn(now - started);
            return finish(Woken::ready);
        }
        if (got == -EINTR) return finish(Woken::interrupted);
        u64 now = now_ns();
        if (now < deadline && now < until) continue;
        if (now < deadline) return finish(Woken::interrupted);
        if (now >= deadline) {
            spinner.learn(now - started);
            return finish(Woken::deadline);
        }
    }
}

template <bool clears = true, class Ready>
Woken wait(Bell& bell, u64 bit, u64 deadline, Spinner& spinner, Waits& waits, const Shared<u32>* cpu, Ready&& ready) {
    return wait<clears>(bell, bit, deadline, spinner, waits, cpu, ready, [](u64) {});
}

}  // namespace penstock
