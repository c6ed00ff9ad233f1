// clock.h: time, processors, and who this process is. No state that is shared with others.
#pragma once
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "layout.h"

namespace penstock {

inline u64 now_ns() {
    timespec now{};
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<u64>(now.tv_sec) * 1'000'000'000ull + static_cast<u64>(now.tv_nsec);
}

inline constexpr u64 NEVER = ~0ull;

inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");  // yield is a no-op on most cores; isb waits about as long as x86's pause
#endif
}

inline u32 current_cpu() { return static_cast<u32>(::sched_getcpu()); }

// Clock ticks since boot at which a process started, 0 if there is none. Field 22 of /proc/PID/stat, counted from
// behind the last ')' because a name may hold anything. state receives field 3 ('Z' zombie, 'T' stopped).
// status: field 52, the wait status of a zombie.
inline u64 start_ticks(int pid, char* state = nullptr, u64* status = nullptr) {
    char path[40];
    std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = ::open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    char text[1024];
    ssize_t n = ::read(fd, text, sizeof text - 1);
    ::close(fd);
    if (n <= 0) return 0;
    text[n] = 0;
    char* at = std::strrchr(text, ')');
    if (at == nullptr || at[1] == 0) return 0;
    at += 2;
    if (state != nullptr) *state = *at;
    for (int field = 3; field < 22; ++field) {
        at = std::strchr(at, ' ');
        if (at == nullptr) return 0;
        ++at;
    }
    u64 start = std::strtoull(at, nullptr, 10);
    if (status != nullptr) {
        char* last = std::strrchr(at, ' ');
        *status = last == nullptr ? 0 : std::strtoull(last + 1, nullptr, 10);
    }
    return start;
}

// ── identity: state:4 | pid:22 | start:38 ──
inline constexpr u64 START_MASK = (1ull << 38) - 1;
inline u64 make_identity(PeerState state, int pid, u64 start) {
    return static_cast<u64>(state) << 60 | static_cast<u64>(pid & 0x3fffff) << 38 | (start & START_MASK);
}
inline PeerState state_of(u64 identity) { return static_cast<PeerState>(identity >> 60); }
inline int pid_of(u64 identity) { return static_cast<int>(identity >> 38 & 0x3fffff); }
inline u64 start_of(u64 identity) { return identity & START_MASK; }
inline u64 with_state(u64 identity, PeerState state) {
    return (identity & ~(0xfull << 60)) | static_cast<u64>(state) << 60;
}

// ── an end's word: state:8 | slot:8 | peer epoch:24 | end epoch:24 ──
struct End {
    EndState state;
    u32 slot;
    u32 peer_epoch;
    u32 epoch;
};
inline constexpr u32 EPOCH_MASK = 0xffffff;
inline u64 make_word(End end) {
    return static_cast<u64>(end.state) << 56 | static_cast<u64>(end.slot & 0xff) << 48 |
           static_cast<u64>(end.peer_epoch & EPOCH_MASK) << 24 | (end.epoch & EPOCH_MASK);
}
inline End end_of(u64 word) {
    return {static_cast<EndState>(word >> 56), static_cast<u32>(word >> 48 & 0xff),
            static_cast<u32>(word >> 24 & EPOCH_MASK), static_cast<u32>(word & EPOCH_MASK)};
}

// After fork() the child has the parent's mappings and none of its rights: every object remembers the generation it was
// made in, and in another one it does nothing.
struct Process {
    std::atomic<u64> forks{0};
    std::atomic<int> pid{0};
    std::atomic<u64> start{0};
};
inline Process* process() {
    static Process* self = [] {
        auto* made = new Process;
        made->pid = ::getpid();
        made->start = start_ticks(made->pid);
        return made;
    }();
    static int registered = ::pthread_atfork(nullptr, nullptr, [] {
        process()->forks.fetch_add(1);
        process()->pid = ::getpid();
        process()->start = start_ticks(::getpid());
    });
    (void)registered;
    return self;
}
inline u64 fork_generation() { return process()->forks.load(std::memory_order_relaxed); }
inline u64 own_identity() { return make_identity(PeerState::live, process()->pid, process()->start); }

}  // namespace penstock
