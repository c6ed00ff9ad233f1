// attend_plain.cpp: for every processor that the compiler was told of.
#define PENSTOCK_ATTEND attend_plainly
#define PENSTOCK_LANES 4
#include "attend_rows.h"
