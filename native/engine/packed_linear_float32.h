// packed_linear_float32.h: the products of packed_linear.h in float32.
//
// Included by one .cpp per instruction set, which may define PENSTOCK_LANES, the floats in a vector register. Calls
// only built-in functions.
#include "packed_linear.h"

#if !defined(PENSTOCK_LANES)
#if defined(__AVX512F__)
#define PENSTOCK_LANES 16
#else
#define PENSTOCK_LANES 4
#endif
#endif

namespace penstock::engine {
namespace {

typedef float Numbers __attribute__((vector_size(4 * PENSTOCK_LANES)));

constexpr u64 FLOAT_ROWS = PENSTOCK_LANES == 16 ? 8 : 4;    // of which sums stay in registers,
constexpr u64 FLOAT_PANELS = PENSTOCK_LANES == 16 ? 2 : 1;  // with so many panels
constexpr u64 FLOATS_AHEAD = 1024;                          // of a panel, which are fetched before they are needed

template <u64 ROWS, u64 PANELS>
inline void compute_float32(const Product& p, u64 row, u64 panel, float* sums) {
    constexpr u64 VECTORS = PackedLinear::PANEL / PENSTOCK_LANES, INPUTS = PackedLinear::TILE_INPUTS / 2;
    u64 stride = p.panels * PackedLinear::PANEL, panel_size = p.weight_stride * PackedLinear::TILE / 2;
    const float* x = reinterpret_cast<const float*>(p.inputs_of(row));
    const float* w = reinterpret_cast<const float*>(p.weights_of(panel));
    Numbers sum[ROWS][PANELS * VECTORS] = {};
    for (u64 tile = 0; tile < p.input_tiles; ++tile, x += PackedLinear::TILE / 2)
        for (u64 input = 0; input < INPUTS; ++input, w += PackedLinear::PANEL) {
            Numbers weight[PANELS * VECTORS];
            for (u64 each = 0; each < PANELS; ++each) {
                __builtin_prefetch(w + each * panel_size + FLOATS_AHEAD);
                for (u64 v = 0; v < VECTORS; ++v)
                    __builtin_memcpy(&weight[each * VECTORS + v], w + each * panel_size + v * PENSTOCK_LANES,
                                     sizeof(Numbers));
            }
            for (u64 each = 0; each < ROWS; ++each)
                for (u64 v = 0; v < PANELS * VECTORS; ++v) sum[each][v] += weight[v] * x[each * INPUTS + input];
        }
    for (u64 each = 0; each < ROWS; ++each)
        for (u64 v = 0; v < PANELS * VECTORS; ++v)
            __builtin_memcpy(sums + (row + each) * stride + panel * PackedLinear::PANEL + v * PENSTOCK_LANES,
                             &sum[each][v], sizeof(Numbers));
}

template <u64 PANELS>
inline void compute_float32_rows(const Product& p, u64 row, u64 panel, float* sums) {
    u64 count = p.rows - row;
    if constexpr (FLOAT_ROWS == 8) {
        if (count >= 8) return compute_float32<8, PANELS>(p, row, panel, sums);
        if (count == 7) return compute_float32<7, PANELS>(p, row, panel, sums);
        if (count == 6) return compute_float32<6, PANELS>(p, row, panel, sums);
        if (count == 5) return compute_float32<5, PANELS>(p, row, panel, sums);
    }
    if (count >= 4) return compute_float32<4, PANELS>(p, row, panel, sums);
    if (count == 3) return compute_float32<3, PANELS>(p, row, panel, sums);
    if (count == 2) return compute_float32<2, PANELS>(p, row, panel, sums);
    compute_float32<1, PANELS>(p, row, panel, sums);
}

// As `multiply`. Overwrites the sums.
inline void multiply_float32(const Product& p, float* sums) {
    for (u64 panel = 0; panel < p.panels; panel += FLOAT_PANELS)
        for (u64 row = 0; row < p.rows; row += FLOAT_ROWS) {
            if (p.panels - panel >= FLOAT_PANELS)
                compute_float32_rows<FLOAT_PANELS>(p, row, panel, sums);
            else
                compute_float32_rows<1>(p, row, panel, sums);
        }
}

}  // namespace
}  // namespace penstock::engine
