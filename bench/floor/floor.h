/* What the floor programs share: memory of two processes, a clock, quantiles. */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static inline void pause_cpu(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000000000LL + at.tv_nsec;
}

static inline void *shared(size_t nbytes) {
    void *memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    return memory;
}

/* Forks; with `is_pinned` the two processes sit on the first two CPUs this one may use. Returns as fork does. */
static inline pid_t start(int is_pinned) {
    cpu_set_t allowed, one;
    int cpus[2] = {0, 0}, found = 0;
    sched_getaffinity(0, sizeof allowed, &allowed);
    for (int cpu = 0; cpu < CPU_SETSIZE && found < 2; cpu++)
        if (CPU_ISSET(cpu, &allowed)) cpus[found++] = cpu;
    pid_t child = fork();
    if (child == 0) prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (is_pinned) {
        CPU_ZERO(&one);
        CPU_SET(cpus[child == 0], &one);
        sched_setaffinity(0, sizeof one, &one);
    }
    return child;
}

static inline int compare_int64(const void *a, const void *b) {
    int64_t left = *(const int64_t *)a, right = *(const int64_t *)b;
    return (left > right) - (left < right);
}

/* Drops the first tenth (warm-up), prints p50, p99 and p99.9, waits for the other process. */
static inline int report(int64_t *took, long count, pid_t child) {
    waitpid(child, NULL, 0);
    long kept = count - count / 10;
    int64_t *ordered = took + count / 10;
    qsort(ordered, (size_t)kept, sizeof *ordered, compare_int64);
    printf("%lld %lld %lld\n", (long long)ordered[kept / 2], (long long)ordered[kept * 99 / 100],
           (long long)ordered[kept * 999 / 1000]);
    return 0;
}
