// thread_team.h: threads that compute the chunks of one product together.
//
// A step has a few hundred products of 0.1 to 1 ms with short pauses between them. So a helper spins for SPIN_NS after
// its last chunk before it sleeps. Chunks are claimed one by one: a helper that gets no processor claims none, and the
// calling thread waits only for chunks that a helper has claimed.
#pragma once
#include <sched.h>
#include <time.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "atomic.h"
#include "paged_attention.h"

namespace penstock::engine {

class ThreadTeam {
   public:
    static ThreadTeam& get() {
        static ThreadTeam* team = new ThreadTeam;  // never destroyed: its threads may run until the process ends
        return *team;
    }

    // Calls work(chunk) for each chunk below `chunks`, in `threads` threads, this one included. Blocks until all are
    // done.
    template <class Work>
    void run(u64 threads, u64 chunks, const Work& work) {
        if (threads <= 1 || chunks <= 1) {
            for (u64 chunk = 0; chunk < chunks; ++chunk) work(chunk);
            return;
        }
        Job job{
            [](const void* of, u64 chunk) { (*static_cast<const Work*>(of))(chunk); }, &work, chunks, threads - 1, {}};
        run(job);
    }

   private:
    static constexpr u64 SPIN_NS = 100'000;
    static constexpr u64 YIELD_SPINS = 128;  // pauses between two offers of the processor to other threads: about 5 us

    struct Job {
        void (*call)(const void* work, u64 chunk);
        const void* work;
        u64 chunks, helpers;
        Atomic<u64> done;
    };

    void run(Job& job) {
        std::lock_guard alone(one_job_);
        while (started_ < job.helpers) std::thread(&ThreadTeam::help, this, started_++).detach();
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
