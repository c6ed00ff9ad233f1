// token_choice_avx512.cpp: the kernels of token_choice.h for AVX-512.
#if defined(__x86_64__)
#define PENSTOCK_KERNEL token_choice_avx512
#define PENSTOCK_LANES 16
#include "token_choice_impl.h"
#endif
