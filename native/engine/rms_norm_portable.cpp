// rms_norm_portable.cpp: the kernel of rms_norm.h for every processor.
#define PENSTOCK_KERNEL rms_norm_portable
#define PENSTOCK_LANES 4
#include "rms_norm_impl.h"
