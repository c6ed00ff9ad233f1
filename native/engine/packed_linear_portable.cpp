// packed_linear_portable.cpp: the kernel of packed_linear.h for every processor.
#define PENSTOCK_KERNEL packed_linear_portable
#define PENSTOCK_LANES 4
#include "packed_linear_impl.h"
