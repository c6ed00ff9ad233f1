// token_choice_avx2.cpp: the kernels of token_choice.h for AVX2 with FMA.
#if defined(__x86_64__)
#define PENSTOCK_KERNEL token_choice_avx2
#define PENSTOCK_LANES 8
#include "token_choice_impl.h"
#endif
