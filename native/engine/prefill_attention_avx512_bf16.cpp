// prefill_attention_avx512_bf16.cpp: the kernel of prefill_attention.h for AVX-512 with its conversion to
// bfloat16.
#if defined(__x86_64__)
#define PENSTOCK_KERNEL prefill_attention_avx512_bf16
#define PENSTOCK_LANES 16
#include "prefill_attention_impl.h"
#endif
