// prefill_attention.cpp: which kernel of prefill_attention.h runs.
#include "prefill_attention.h"

namespace penstock::engine {

const PrefillKernel& prefill_kernel() {
#if defined(__x86_64__)
    static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    static const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                                   __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                                   __builtin_cpu_supports("avx512vl");
    if (has_avx512) return prefill_attention_avx512;
    if (has_avx2) return prefill_attention_avx2;
#endif
    return prefill_attention_portable;
}

}  // namespace penstock::engine
