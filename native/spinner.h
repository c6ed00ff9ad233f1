// spinner.h: how long a waiter spins before it sleeps, and whether processors are free for that. Leaves to wait.h what
// it waits for.
#pragma once
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "clock.h"
#include "control_group.h"
#include "layout.h"

namespace penstock {

enum class Latency : u32 { eco = 0, automatic = 1, spin = 2 };

inline constexpr u64 SPIN_NS_AUTO = 300'000;     // longer waits are for a device, and a wake-up is little beside them
inline constexpr u64 SPIN_NS_QUOTA = 50'000;     // where the processor time of the control group is limited
inline constexpr u64 SPIN_NS_MIN = 5'000;        // a window begins to open with this
inline constexpr u64 SPIN_NS_MOST = 10'000'000;  // latency="spin": then look whether a signal or a death is waiting
inline constexpr u64 WAKE_NS = 100'000;     // what a sleep of no length may cost: a shorter wait than window + this
                                            // would have been spun through
inline constexpr u64 YIELD_NS = 5'000;      // between two yields of a spinner
inline constexpr u64 ASIDE_NS = 1'000'000;  // a thread that takes the processor for longer computes; for less, it
                                            // had something short to do, and a spin may go on
inline constexpr u64 HOLD_NS = 20'000'000;  // no spin for so long after such a thread was met …
inline constexpr u64 MAX_HOLD_NS = 1'280'000'000;                // … twice as long each time, up to this
inline constexpr u64 SHORTAGE_NS = 20'000'000;                   // how long a reading of /proc/loadavg is believed
inline constexpr u64 SPIN_SHARE = 16;                            // spins that fail may take 1/16 of the time …
inline constexpr u64 SPIN_CREDIT_NS = 100'000'000 / SPIN_SHARE;  // … and what is left of that in 100 ms

// The processors that this process may use.
class Processors {
   public:
    static Processors& get() {
        static Processors* processors = new Processors;
        return *processors;
    }
    // The longest window of a waiter. 0 with one processor: the other side cannot run meanwhile. A control group with a
    // quota pays for spins out of it, and is stopped for tens of milliseconds when it is spent.
    u64 max_spin_ns() const { return max_spin_ns_; }
    const char* spin_limit() const { return spin_limit_; }  // what limits it, in words; null: nothing

    // Are more threads runnable than there are processors? One number for the whole machine, a few microseconds to
    // read, so at most once in SHORTAGE_NS. Unreadable: no.
    bool are_short(u64 at) {
        u64 last = read_ns_.load(RELAXED);
        if (at - last < SHORTAGE_NS) return short_.load(RELAXED);
        if (!read_ns_.compare_exchange_strong(last, at, RELAXED)) return short_.load(RELAXED);
        char text[128];
        ssize_t n = fd_ < 0 ? -1 : ::pread(fd_, text, sizeof text - 1, 0);
        if (n <= 0) return false;
        text[n] = 0;
        char* field = text;
        for (int i = 0; i < 3 && field != nullptr; ++i) field = std::strchr(field + 1, ' ');
        bool is_short = field != nullptr && std::atol(field + 1) > count_;
        short_.store(is_short, RELAXED);
        return is_short;
    }

   private:
    Processors() {
        cpu_set_t set;
        CPU_ZERO(&set);
        bool has_others = ::sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 1;
        spin_limit_ = has_others ? cpu_quota() : "there is one processor";
        if (has_others) max_spin_ns_ = spin_limit_ == nullptr ? SPIN_NS_AUTO : SPIN_NS_QUOTA;
        fd_ = ::open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
    }
    long count_ = ::sysconf(_SC_NPROCESSORS_ONLN);
    int fd_ = -1;
    u64 max_spin_ns_ = 0;
    const char* spin_limit_ = nullptr;
    Atomic<u64> read_ns_{0};
    Atomic<bool> short_{false};
};

// One waiter's memory of whether spinning paid, in the manner of halt-polling: the window opens when a wait that slept
// would have fitted into it, and closes when it would not. Times are given, so that a test may have its own.
class SpinWindow {
   public:
    explicit SpinWindow(u64 max_ns) : max_ns_(max_ns) {}
    u64 ns() const { return ns_; }

    // How long the wait that begins now may spin. are_short(now) is asked when a hold has passed.
    template <class AreShort>
    u64 at(u64 now, AreShort&& are_short) {
        if (ns_ == 0 || now < held_until_) return 0;
        if (held_until_ != 0 && are_short(now)) {
            held_until_ = now + SHORTAGE_NS;
            return 0;
        }
        held_until_ = 0;
        credit_ns_ = std::min(SPIN_CREDIT_NS, credit_ns_ + (now - credited_ns_) / SPIN_SHARE);
        credited_ns_ = now;
        return credit_ns_ < ns_ ? 0 : ns_;
    }
    void fail(u64 spun_ns) { credit_ns_ -= std::min(credit_ns_, spun_ns); }
    // The length of a wait that slept, and the part of it before it did.
    void learn(u64 waited_ns, u64 spun_ns) {
        if (waited_ns <= max_ns_ + WAKE_NS && spun_ns < max_ns_) {
            ns_ = std::min(max_ns_, std::max(SPIN_NS_MIN, 2 * ns_));
        } else {
            ns_ = ns_ < SPIN_NS_MIN ? 0 : ns_ / 4;
        }
    }
    // A thread that computes wants the processor on which we spun.
    void hold(u64 now) {
        bool is_again = hold_ns_ != 0 && now - held_at_ < 4 * hold_ns_;
        hold_ns_ = is_again ? std::min(MAX_HOLD_NS, 2 * hold_ns_) : HOLD_NS;
        held_at_ = now;
        held_until_ = now + hold_ns_;
        ns_ = 0;
    }

   private:
    u64 max_ns_;
    u64 ns_ = 0;
    u64 credit_ns_ = 0, credited_ns_ = 0;
    u64 hold_ns_ = 0, held_at_ = 0, held_until_ = 0;
};

// Spins for one waiter. It yields the processor every few microseconds: to a thread that has something short to do, as
// the others of a broadcast have, at no loss; and where a thread computes, to find that out. With latency="spin" it
// does not: that processor is the waiter's own.
class Spinner {
   public:
    explicit Spinner(Latency latency = Latency::automatic)
        : latency_(latency), window_(latency == Latency::automatic ? Processors::get().max_spin_ns() : 0) {}

    // Spins until ready() or the window closes. cpu: where the process that we wait for last ran; it may need that
    // processor to answer.
    template <class Ready>
    bool spin(u64 started, const Shared<u32>* cpu, Ready&& ready) {
        spun_ns_ = 0;
        const u64 window_ns = open(started);
        if (window_ns == 0) return false;
        u64 now = started, yielded = started;
        bool is_in_the_way = false;
        while (!is_in_the_way && now - started < window_ns) {
            if (cpu != nullptr && cpu->load(RELAXED) == current_cpu()) break;
            for (int i = 0; i < 16; ++i) {
                if (ready()) return true;
                pause_cpu();
            }
            u64 before = now;
            now = now_ns();
            if (latency_ == Latency::spin) continue;
            if (now - yielded >= YIELD_NS && now - started < window_ns) {
                ::sched_yield();
                yielded = now = now_ns();
            }
            is_in_the_way = now - before > ASIDE_NS;
            if (is_in_the_way) window_.hold(now);
            if (ready()) return true;
        }
        spun_ns_ = now - started;
        window_.fail(std::min(spun_ns_, window_ns));
        return false;
    }

    // Learns from a wait that had to sleep.
    void learn(u64 waited_ns) {
        if (latency_ == Latency::automatic) window_.learn(waited_ns, spun_ns_);
    }

   private:
    u64 open(u64 now) {
        if (latency_ == Latency::eco) return 0;
        if (latency_ == Latency::spin) return SPIN_NS_MOST;
        return window_.at(now, [](u64 at) { return Processors::get().are_short(at); });
    }
    Latency latency_;
    SpinWindow window_;
    u64 spun_ns_ = 0;
};

}  // namespace penstock
