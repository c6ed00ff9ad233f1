/* Two processes wake one another through futexes in shared memory: what a wake-up by the kernel costs at least.
 *
 * usage: futex COUNT [pin]    prints the round trip's p50, p99 and p99.9 in nanoseconds
 */
#include <linux/futex.h>
#include <sys/syscall.h>

#include "floor.h"

struct word {
    alignas(64) _Atomic uint32_t turn;
};

static void post(struct word *word, uint32_t turn) {
    atomic_store_explicit(&word->turn, turn, memory_order_release);
    syscall(SYS_futex, &word->turn, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static void await(struct word *word, uint32_t turn) {
    uint32_t seen;
    while ((seen = atomic_load_explicit(&word->turn, memory_order_acquire)) != turn)
        syscall(SYS_futex, &word->turn, FUTEX_WAIT, seen, NULL, NULL, 0);
}

int main(int argc, char **argv) {
    long count = argc > 1 ? atol(argv[1]) : 20000;
    struct word *there = shared(sizeof *there), *back = shared(sizeof *back);
    pid_t child = start(argc > 2);

    if (child == 0) {
        for (uint32_t turn = 1; turn <= (uint32_t)count; turn++) {
            await(there, turn);
            post(back, turn);
        }
        _exit(0);
    }
    int64_t *took = calloc((size_t)count, sizeof *took);
    for (uint32_t turn = 1; turn <= (uint32_t)count; turn++) {
        int64_t begin = now_ns();
        post(there, turn);
        await(back, turn);
        took[turn - 1] = now_ns() - begin;
    }
    return report(took, count, child);
}
