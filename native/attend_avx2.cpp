// attend_avx2.cpp: for x86-64 with AVX2 and FMA, which CMakeLists.txt says to the compiler for this file alone.
#if defined(__x86_64__)
#define PENSTOCK_ATTEND attend_with_avx2
#define PENSTOCK_LANES 8
#include "attend_rows.h"
#endif
