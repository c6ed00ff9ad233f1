// resize_portable.cpp: the kernel of resize_impl.h for every processor.
#define PENSTOCK_KERNEL resize_portable
#define PENSTOCK_LANES 4
#include "resize_impl.h"
