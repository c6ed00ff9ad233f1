// resize_avx2.cpp: the kernel of resize_impl.h for AVX2 with FMA.
#if defined(__x86_64__)
#define PENSTOCK_KERNEL resize_avx2
#define PENSTOCK_LANES 8
#include "resize_impl.h"
#endif
