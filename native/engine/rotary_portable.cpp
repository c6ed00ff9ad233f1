// rotary_portable.cpp: the kernel of rotary.h for every processor.
#define PENSTOCK_KERNEL rotary_portable
#define PENSTOCK_LANES 4
#include "rotary_impl.h"
