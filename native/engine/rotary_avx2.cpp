// rotary_avx2.cpp: the kernel of rotary.h for AVX2 with FMA.
#if defined(__x86_64__)
#define PENSTOCK_KERNEL rotary_avx2
#define PENSTOCK_LANES 8
#include "rotary_impl.h"
#endif
