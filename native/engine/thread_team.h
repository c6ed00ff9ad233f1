// thread_team.h: threads that compute the chunks of one product together.
//
// A step has a few hundred products of 0.1 to 1 ms with short pauses between them. So a helper spins for SPIN_NS after
// its last chunk before it sleeps. Chunks are claimed one by one: a helper that gets no processor claims none, and the
// calling thread waits only for chunks that a helper has claimed.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "atomic.h"
#include "paged_attention.h"

namespace penstock::engine {

class ThreadTeam {
   public:
    static ThreadTeam& get() { return *current(); }

    // Calls work(chunk) for each chunk below `chunks`, in `threads` threads, this one included. Blocks until all are
    // done. The process ends if `work` throws.
    template <class Work>
    void run(u64 threads, u64 chunks, const Work& work) {
        if (threads <= 1 || chunks <= 1) {
            for (u64 chunk = 0; chunk < chunks; ++chunk) work(chunk);
            return;
        }
        auto call = [](const void* of, u64 chunk) noexcept { (*static_cast<const Work*>(of))(chunk); };
        Job job{call, &work, chunks, threads - 1, {}};
        run(job);
    }

    // Calls work(first, last) for all rows, in chunks of about 2^15 elements: several times what it takes to wake a
    // thread.
    template <class Work>
    void run_rows(u64 threads, u64 rows, u64 row_size, const Work& work) {
        u64 each = (1 << 15) / (row_size + 1) + 1;
        run(threads, (rows + each - 1) / each, [&](u64 chunk) {
            u64 first = chunk * each, last = first + each;
            work(first, last < rows ? last : rows);
        });
    }

   private:
    static constexpr u64 SPIN_NS = 100'000;
    static constexpr u64 YIELD_SPINS = 128;  // pauses between two offers of the processor to other threads: about 5 us

    struct Job {
        void (*call)(const void* work, u64 chunk) noexcept;
        const void* work;
        u64 chunks, helpers;
        Atomic<u64> done;
    };

    // Never destroyed: its threads may run until the process ends. A forked child has no helpers, and perhaps a locked
    // mutex, so the child has a new team.
    static ThreadTeam*& current() {
        static ThreadTeam* team = [] {
            if (::pthread_atfork(nullptr, nullptr, [] { current() = new ThreadTeam; }) != 0) throw std::bad_alloc();
            return new ThreadTeam;
        }();
        return team;
    }

    // Starts threads until `helpers` run. If the system refuses a thread, the caller computes its share.
    void start(u64 helpers) {
        sigset_t all, before;
        sigfillset(&all);
        ::pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of Python
        try {
            for (; started_ < helpers; ++started_) std::thread(&ThreadTeam::help, this, started_).detach();
        } catch (const std::exception&) {}
        ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void run(Job& job) {
        std::lock_guard alone(one_job_);
        if (started_ < job.helpers) start(job.helpers);
        job_.store(&job, RELAXED);
        helpers_.store(job.helpers, RELAXED);
        claims_.store(++number_ << 32 | job.chunks, order::work.release);
        // A helper that misses this job for want of an order sleeps through it, and this thread computes its share.
        if (asleep_.load(RELAXED) != 0) {
            std::lock_guard lock(sleeping_);
            ++wakes_;
            woken_.notify_all();
        }
        while (claim()) {}
        for (u64 spins = 1; job.done.load(order::work.acquire) != job.chunks; ++spins) rest(spins);
    }

    // Computes one chunk; false: none is left.
    bool claim() {
        u64 claims = claims_.load(order::work.acquire);
        while (left(claims) != 0) {
            if (!claims_.compare_exchange_weak(claims, claims - 1, order::work.acq_rel)) continue;
            Job* job = job_.load(RELAXED);  // the claim keeps this job from ending
            job->call(job->work, job->chunks - left(claims));
            job->done.fetch_add(1, order::work.release);
            return true;
        }
        return false;
    }

    void help(u64 helper) {
        for (;;) {
            u64 began = now_ns();
            for (u64 spins = 1; spins % YIELD_SPINS != 0 || now_ns() - began < SPIN_NS; ++spins) {
                while (helper < helpers_.load(RELAXED) && claim()) began = now_ns();
                rest(spins);
            }
            std::unique_lock lock(sleeping_);
            asleep_.fetch_add(1, RELAXED);
            u64 wakes = wakes_;
            bool has_work = left(claims_.load(RELAXED)) != 0 && helper < helpers_.load(RELAXED);
            if (!has_work) woken_.wait(lock, [&] { return wakes_ != wakes; });
            asleep_.fetch_sub(1, RELAXED);
        }
    }

    static u64 left(u64 claims) { return claims & 0xffffffff; }

    static u64 now_ns() {
        timespec now{};
        ::clock_gettime(CLOCK_MONOTONIC, &now);
        return static_cast<u64>(now.tv_sec) * 1'000'000'000 + static_cast<u64>(now.tv_nsec);
    }

    // One round of a waiting thread. The thread that it waits for may need this processor.
    static void rest(u64 spins) {
        if (spins % YIELD_SPINS == 0) ::sched_yield();
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("isb");
#endif
    }

    std::mutex one_job_;
    u64 started_ = 0, number_ = 0;  // threads that help; jobs so far
    Atomic<Job*> job_{nullptr};
    Atomic<u64> helpers_{0};             // of this job: the threads below it
    alignas(64) Atomic<u64> claims_{0};  // number of the job, and how many chunks are left
    alignas(64) Atomic<u64> asleep_{0};
    std::mutex sleeping_;
    std::condition_variable woken_;
    u64 wakes_ = 0;  // under sleeping_
};

}  // namespace penstock::engine
