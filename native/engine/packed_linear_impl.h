// packed_linear_impl.h: the products of packed_linear.h without an instruction for bfloat16: numbers are widened to
// float32.
//
// Included by one .cpp per instruction set, which defines PENSTOCK_KERNEL, the function's name, and PENSTOCK_LANES, the
// floats in a vector register. Calls only built-in functions; paged_attention.h says why.
#include "packed_linear.h"

namespace penstock::engine {
namespace {

constexpr u64 LANES = PENSTOCK_LANES, VECTORS = PackedLinear::PANEL / LANES;
typedef float Floats __attribute__((vector_size(4 * PENSTOCK_LANES)));
typedef u32 Bits __attribute__((vector_size(4 * PENSTOCK_LANES)));

inline float low(u32 pair) { return __builtin_bit_cast(float, pair << 16); }
inline float high(u32 pair) { return __builtin_bit_cast(float, pair & 0xffff0000u); }

template <u64 ROWS>
inline void compute_rows(const u16* tiles, const u16* weights, u64 input_tiles, bool adds, float* sums,
                         u64 sums_stride) {
    Floats sum[ROWS][VECTORS] = {};
    if (adds)
        for (u64 row = 0; row < ROWS; ++row)
            for (u64 v = 0; v < VECTORS; ++v)
                __builtin_memcpy(&sum[row][v], sums + row * sums_stride + v * LANES, sizeof(Floats));
    for (u64 tile = 0; tile < input_tiles; ++tile) {
        const u16* x = tiles + tile * PackedLinear::TILE;
        const u16* w = weights + tile * PackedLinear::TILE;
        for (u64 pair = 0; pair < PackedLinear::TILE_INPUTS / 2; ++pair) {
            Floats even[VECTORS], odd[VECTORS];
            for (u64 v = 0; v < VECTORS; ++v) {
                Bits bits;
                __builtin_memcpy(&bits, w + pair * 2 * PackedLinear::PANEL + v * 2 * LANES, sizeof bits);
                even[v] = __builtin_bit_cast(Floats, bits << 16);
                odd[v] = __builtin_bit_cast(Floats, bits & 0xffff0000u);
            }
            for (u64 row = 0; row < ROWS; ++row) {
                u32 two;
                __builtin_memcpy(&two, x + row * PackedLinear::TILE_INPUTS + pair * 2, sizeof two);
                for (u64 v = 0; v < VECTORS; ++v) sum[row][v] = sum[row][v] + even[v] * low(two);
                for (u64 v = 0; v < VECTORS; ++v) sum[row][v] = sum[row][v] + odd[v] * high(two);
            }
        }
    }
    for (u64 row = 0; row < ROWS; ++row)
        for (u64 v = 0; v < VECTORS; ++v)
            __builtin_memcpy(sums + row * sums_stride + v * LANES, &sum[row][v], sizeof(Floats));
}

}  // namespace
}  // namespace penstock::engine

#include "packed_linear_fours.h"
#include "packed_linear_panels.h"
