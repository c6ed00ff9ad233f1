// paged_attention_portable.cpp: the kernel for every processor of the architecture that is compiled for.
#define PENSTOCK_KERNEL paged_attention_portable
#define PENSTOCK_LANES 4
#include "paged_attention_impl.h"
