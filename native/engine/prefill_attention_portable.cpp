// prefill_attention_portable.cpp: the kernel of prefill_attention.h for every processor.
#define PENSTOCK_KERNEL prefill_attention_portable
#define PENSTOCK_LANES 4
#include "prefill_attention_impl.h"
