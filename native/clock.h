// clock.h: time, processors, and how identities and ends are packed into words. No state that is shared with others.
#pragma once
#include <sched.h>
#include <time.h>

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

}  // namespace penstock
