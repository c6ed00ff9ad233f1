// rms_norm_avx2.cpp: the kernel of rms_norm.h for AVX2 with FMA.
#if defined(__x86_64__)
#define PENSTOCK_KERNEL rms_norm_avx2
#define PENSTOCK_LANES 8
#include "rms_norm_impl.h"
#endif
