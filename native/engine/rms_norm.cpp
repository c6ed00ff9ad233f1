// rms_norm.cpp: which kernel of rms_norm.h runs, and in how many threads.
#include "rms_norm.h"

#include "cpu_features.h"
#include "thread_team.h"

namespace penstock::engine {

void rms_norm(const RmsNorm& norm, u64 first, u64 last) {
#if defined(__x86_64__)
#if defined(PENSTOCK_COMPILES_BF16)
    if (has_avx512_bf16()) return rms_norm_avx512_bf16(norm, first, last);
#endif
    if (has_avx2()) return rms_norm_avx2(norm, first, last);
#endif
    rms_norm_portable(norm, first, last);
}

void compute_norm(const RmsNorm& norm, u64 threads) {
    ThreadTeam::get().run_rows(threads, norm.rows, norm.size,
                               [&](u64 first, u64 last) { rms_norm(norm, first, last); });
}

}  // namespace penstock::engine
