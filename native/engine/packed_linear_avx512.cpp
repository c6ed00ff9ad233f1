// packed_linear_avx512.cpp: the kernel of packed_linear.h for AVX-512 without bfloat16.
#if defined(__x86_64__)
#define PENSTOCK_KERNEL packed_linear_avx512
#define PENSTOCK_LANES 16
#include "packed_linear_impl.h"
#endif
