// rotary.cpp: which kernel of rotary.h runs, and in how many threads.
#include "rotary.h"

#include "cpu_features.h"
#include "thread_team.h"

namespace penstock::engine {

void rotary(const Rotary& problem, u64 first, u64 last) {
#if defined(__x86_64__)
#if defined(PENSTOCK_COMPILES_BF16)
    if (has_avx512_bf16()) return rotary_avx512_bf16(problem, first, last);
#endif
    if (has_avx2()) return rotary_avx2(problem, first, last);
#endif
    rotary_portable(problem, first, last);
}

void compute_rotary(const Rotary& problem, u64 threads) {
    u64 row_size = (problem.queries.count + 2 * problem.keys.count) * problem.size;
    ThreadTeam::get().run_rows(threads, problem.tokens, row_size,
                               [&](u64 first, u64 last) { rotary(problem, first, last); });
}

}  // namespace penstock::engine
