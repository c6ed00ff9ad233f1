// points.h: named places at which a test may kill, stop or delay this process. One relaxed load when nothing is armed.
#pragma once
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "atomic.h"

namespace penstock::points {

enum class Action : int { none = 0, kill = 1, stop = 2, delay = 3 };

struct Armed {
    Atomic<int> action{0};
    Atomic<int> countdown{0};  // fires when it reaches zero
    Atomic<int> delay_us{0};
    char name[48]{};
};
inline Armed armed;

// The places, in one table, so that a test can visit each of them.
inline constexpr const char* NAMES[] = {
    "join.claimed",   "receiver.claimed", "leave.begun",    "reap.begun",     "reap.half",        "pool.locked",
    "pool.live",      "pool.inserted",    "pool.claiming",  "block.locked",   "share.half",       "open.half",
    "release.last",   "send.begun",       "send.spilled",   "send.pending",   "send.written",     "send.committed",
    "send.rung",      "receive.found",    "receive.opened", "receive.copied", "receive.released", "wait.parked",
    "wait.woken",     "ready.set",        "reap.marked",    "close.begun",    "close.kept",       "abort.begun",
    "store.locked",   "store.taken",      "store.keyed",    "store.filled",   "store.committed",  "store.opened",
    "store.unlinked", "store.half",       "store.chosen",   "fail.written",
};

inline void hit(const char* name) {
    if (std::strcmp(name, armed.name) != 0) return;
    if (armed.countdown.fetch_sub(1, RELAXED) != 1) return;
    switch (static_cast<Action>(armed.action.load(order::point.acquire))) {
        case Action::kill: ::kill(::getpid(), SIGKILL); break;
        case Action::stop: ::kill(::getpid(), SIGSTOP); break;
        case Action::delay: {
            int delay_us = armed.delay_us.load(RELAXED);
            timespec pause{delay_us / 1'000'000, (delay_us % 1'000'000) * 1000L};
            ::nanosleep(&pause, nullptr);
            break;
        }
        case Action::none: break;
    }
}

inline bool arm(const char* name, Action action, int countdown, int delay_us) {
    for (const char* known : NAMES) {
        if (std::strcmp(known, name) != 0) continue;
        armed.action.store(0, RELAXED);
        std::strncpy(armed.name, name, sizeof armed.name - 1);
        armed.countdown.store(countdown, RELAXED);
        armed.delay_us.store(delay_us, RELAXED);
        armed.action.store(static_cast<int>(action), order::point.release);
        return true;
    }
    return false;
}

}  // namespace penstock::points

#if defined(PENSTOCK_POINTS) && PENSTOCK_POINTS
#define PENSTOCK_POINT(name)                                                                      \
    do {                                                                                          \
        if (__builtin_expect(::penstock::points::armed.action.load(::penstock::RELAXED) != 0, 0)) \
            ::penstock::points::hit(name);                                                        \
    } while (0)
#else
#define PENSTOCK_POINT(name) ((void)0)
#endif
