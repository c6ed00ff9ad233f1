// prefill_attention_avx2.cpp: the kernel of prefill_attention.h for AVX2 with FMA.
#if defined(__x86_64__)
#define PENSTOCK_KERNEL prefill_attention_avx2
#define PENSTOCK_LANES 8
#include "prefill_attention_impl.h"
#endif
