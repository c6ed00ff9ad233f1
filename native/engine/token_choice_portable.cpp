// token_choice_portable.cpp: the kernels of token_choice.h for every processor.
#define PENSTOCK_KERNEL token_choice_portable
#define PENSTOCK_LANES 4
#include "token_choice_impl.h"
