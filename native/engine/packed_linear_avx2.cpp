// packed_linear_avx2.cpp: the kernel of packed_linear.h for AVX2 with FMA.
#if defined(__x86_64__)
#define PENSTOCK_KERNEL packed_linear_avx2
#define PENSTOCK_LANES 8
#include "packed_linear_impl.h"
#endif
