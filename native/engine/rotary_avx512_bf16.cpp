// rotary_avx512_bf16.cpp: the kernel of rotary.h for AVX-512 with its conversion to bfloat16.
#if defined(__x86_64__)
#define PENSTOCK_KERNEL rotary_avx512_bf16
#define PENSTOCK_LANES 16
#include "rotary_impl.h"
#endif
