// paged_attention_avx512.cpp: the kernel of paged_attention.h for AVX-512.
#if defined(__x86_64__)
#define PENSTOCK_KERNEL paged_attention_avx512
#define PENSTOCK_LANES 16
#include "paged_attention_impl.h"
#endif
