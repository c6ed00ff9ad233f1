/* Two processes pass one cache line to and fro, both spinning: what any transport between two cores costs at least.
 *
 * usage: cacheline COUNT [pin]    prints the round trip's p50, p99 and p99.9 in nanoseconds
 */
#include "floor.h"

struct line {
    alignas(64) _Atomic uint64_t turn;
};

int main(int argc, char **argv) {
    long count = argc > 1 ? atol(argv[1]) : 100000;
    struct line *there = shared(sizeof *there), *back = shared(sizeof *back);
    pid_t child = start(argc > 2);

    if (child == 0) {
        for (uint64_t turn = 1; turn <= (uint64_t)count; turn++) {
            while (atomic_load_explicit(&there->turn, memory_order_acquire) != turn) pause_cpu();
            atomic_store_explicit(&back->turn, turn, memory_order_release);
        }
        _exit(0);
    }
    int64_t *took = calloc((size_t)count, sizeof *took);
    for (uint64_t turn = 1; turn <= (uint64_t)count; turn++) {
        int64_t begin = now_ns();
        atomic_store_explicit(&there->turn, turn, memory_order_release);
        while (atomic_load_explicit(&back->turn, memory_order_acquire) != turn) pause_cpu();
        took[turn - 1] = now_ns() - begin;
    }
    return report(took, count, child);
}
