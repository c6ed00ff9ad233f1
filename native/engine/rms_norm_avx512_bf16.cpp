// rms_norm_avx512_bf16.cpp: the kernel of rms_norm.h for AVX-512 with its conversion to bfloat16.
#if defined(__x86_64__)
#define PENSTOCK_KERNEL rms_norm_avx512_bf16
#define PENSTOCK_LANES 16
#include "rms_norm_impl.h"
#endif
