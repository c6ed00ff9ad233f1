// prefill_attention.cpp: which kernel of prefill_attention.h runs.
#include "prefill_attention.h"

#include "cpu_features.h"

namespace penstock::engine {

const PrefillKernel& prefill_kernel() {
#if defined(__x86_64__)
#if defined(PENSTOCK_COMPILES_BF16)
    if (has_avx512_bf16()) return prefill_attention_avx512_bf16;
#endif
    if (has_avx512()) return prefill_attention_avx512;
    if (has_avx2()) return prefill_attention_avx2;
#endif
    return prefill_attention_portable;
}

}  // namespace penstock::engine
