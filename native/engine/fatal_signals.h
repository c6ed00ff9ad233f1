// fatal_signals.h: leaves a record of the signal that ends this process, and of the process that sent the signal.
//
// A fault of the process itself and a signal of another process end it with one and the same status; siginfo_t differs.
// The handler stores number, code and sender of the first fatal signal in a word of shared memory, restores the handler
// that was there before, and lets the signal arrive again: faulthandler prints its traces, a core dump shows the fault.
//
// A process without a record may have died either way: by SIGKILL, by an overflow of a stack that has no alternate one,
// or after another library replaced the handlers.
#pragma once
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstring>

#include "atomic.h"

namespace penstock::engine {

// The signals that end a process by default and that no process of the tree handles. SIGTERM, SIGINT and SIGHUP reach
// whole sessions of processes, SIGPIPE is ignored by Python.
inline constexpr int FATAL_SIGNALS[] = {SIGSEGV, SIGBUS,  SIGILL,  SIGFPE,  SIGABRT,   SIGTRAP,
                                        SIGSYS,  SIGQUIT, SIGUSR1, SIGUSR2, SIGVTALRM, SIGALRM,
                                        SIGPROF, SIGPOLL, SIGXCPU, SIGXFSZ, SIGPWR,    SIGSTKFLT};
inline constexpr int NUM_SIGNALS = 65;
inline constexpr std::size_t SIGNAL_STACK_NBYTES = 64 << 10;

namespace fatal_signals {

inline Atomic<std::uint64_t>* record = nullptr;  // of the launcher and this process; nullptr: not installed
inline pid_t owner = 0;                          // a forked child has the handlers, and no record of its own
inline struct sigaction former[NUM_SIGNALS];

// number in bits 0 to 7, si_code in bits 8 to 31, the sender's pid in bits 32 to 63. A code above 0 is the kernel's.
inline std::uint64_t word_of(int number, int code, pid_t sender) {
    return std::uint64_t(std::uint32_t(sender)) << 32 | std::uint64_t(std::uint32_t(code) & 0xffffff) << 8 |
           std::uint64_t(number);
}

inline void handle(int number, siginfo_t* info, void*) {
    if (getpid() == owner) {
        std::uint64_t empty = 0;
        record->compare_exchange_strong(empty, word_of(number, info->si_code, info->si_pid), RELAXED);
    }
    sigaction(number, &former[number], nullptr);
    // Blocked until this handler returns. An instruction that faults would fault again by itself, a signal that was
    // sent would be lost.
    raise(number);
}

}  // namespace fatal_signals

// Installs the handlers, for the life of the process; a signal that is ignored stays so. `record` is an aligned word
// that stays mapped, and is 0. The calling thread gets an alternate stack if it has none.
inline void record_fatal_signals(Atomic<std::uint64_t>* record) {
    alignas(16) static unsigned char stack[SIGNAL_STACK_NBYTES];
    stack_t present{};
    if (sigaltstack(nullptr, &present) == 0 && (present.ss_flags & SS_DISABLE) != 0) {
        stack_t alternate{};
        alternate.ss_sp = stack;
        alternate.ss_size = sizeof stack;
        sigaltstack(&alternate, nullptr);
    }
    const bool is_first = fatal_signals::record == nullptr;
    fatal_signals::record = record;
    fatal_signals::owner = getpid();
    if (!is_first) return;  // the former handlers would be ours
    for (int number : FATAL_SIGNALS) {
        struct sigaction& former = fatal_signals::former[number];
        if (sigaction(number, nullptr, &former) != 0 || former.sa_handler == SIG_IGN) continue;
        struct sigaction ours{};
        ours.sa_sigaction = fatal_signals::handle;
        ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigemptyset(&ours.sa_mask);
        sigaction(number, &ours, nullptr);
    }
}

}  // namespace penstock::engine
