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
    constexpr u64 CHUNK = 1 << 15;  // elements: several times what it takes to wake a thread
    u64 each = CHUNK / ((problem.queries.count + 2 * problem.keys.count) * problem.size + 1) + 1;
    ThreadTeam::get().run(threads, (problem.tokens + each - 1) / each, [&](u64 chunk) {
        u64 first = chunk * each, last = first + each;
        rotary(problem, first, last < problem.tokens ? last : problem.tokens);
    });
}

}  // namespace penstock::engine
