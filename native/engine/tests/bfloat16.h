// bfloat16.h: the bits of bfloat16 as numbers, for tests; bits_of cuts the lower half off.
#pragma once
#include <cstring>

#include "paged_attention.h"

namespace testing {

using namespace penstock::engine;

inline u16 bits_of(float value) {
    u32 bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<u16>(bits >> 16);
}
inline float float_of(u16 bits) {
    u32 wide = u32{bits} << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

}  // namespace testing
