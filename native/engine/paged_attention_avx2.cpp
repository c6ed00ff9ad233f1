// paged_attention_avx2.cpp: the kernel for x86-64 with AVX2 and FMA; CMakeLists.txt allows them for this file alone.
#if defined(__x86_64__)
#define PENSTOCK_KERNEL paged_attention_avx2
#define PENSTOCK_LANES 8
#include "paged_attention_impl.h"
#endif
