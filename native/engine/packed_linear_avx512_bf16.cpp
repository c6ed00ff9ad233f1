// packed_linear_avx512_bf16.cpp: the kernel of packed_linear.h by vdpbf16ps. Calls only intrinsics; paged_attention.h
// says why.
#if defined(__x86_64__)
#include <immintrin.h>

#include "packed_linear.h"

namespace penstock::engine {
namespace {

constexpr u64 PAIRS = PackedLinear::TILE_INPUTS / 2;
constexpr u64 AHEAD = 4096;  // bytes: a panel's part that is fetched before it is needed

// ROWS * PANELS sums stay in registers, at most 24.
template <u64 ROWS, u64 PANELS>
inline void compute_block(const Product& p, const u16* tiles, const u16* weights, float* sums) {
    u64 stride = p.panels * PackedLinear::PANEL;
    __m512 sum[ROWS][PANELS];
    for (u64 row = 0; row < ROWS; ++row)
        for (u64 panel = 0; panel < PANELS; ++panel)
            sum[row][panel] =
                p.adds ? _mm512_loadu_ps(sums + row * stride + panel * PackedLinear::PANEL) : _mm512_setzero_ps();
    for (u64 tile = 0; tile < p.input_tiles; ++tile) {
        const u16* x = tiles + tile * PackedLinear::TILE;
        const u16* w = weights + tile * PackedLinear::TILE;
        for (u64 pair = 0; pair < PAIRS; ++pair) {
            __m512bh weight[PANELS];
            for (u64 panel = 0; panel < PANELS; ++panel) {
                const u16* at = w + panel * p.weight_stride * PackedLinear::TILE + pair * 2 * PackedLinear::PANEL;
                _mm_prefetch(reinterpret_cast<const char*>(at) + AHEAD, _MM_HINT_T0);
                weight[panel] = (__m512bh)_mm512_loadu_si512(at);
            }
            for (u64 row = 0; row < ROWS; ++row) {
                int two;
                __builtin_memcpy(&two, x + row * PackedLinear::TILE_INPUTS + pair * 2, sizeof two);
                __m512bh both = (__m512bh)_mm512_set1_epi32(two);
                for (u64 panel = 0; panel < PANELS; ++panel)
                    sum[row][panel] = _mm512_dpbf16_ps(sum[row][panel], weight[panel], both);
            }
        }
    }
    for (u64 row = 0; row < ROWS; ++row)
        for (u64 panel = 0; panel < PANELS; ++panel)
            _mm512_storeu_ps(sums + row * stride + panel * PackedLinear::PANEL, sum[row][panel]);
}

template <u64 PANELS>
inline void compute_rows(const Product& p, u64 rows, const u16* tiles, const u16* weights, float* sums) {
    switch (rows) {
        case 1: return compute_block<1, PANELS>(p, tiles, weights, sums);
        case 2: return compute_block<2, PANELS>(p, tiles, weights, sums);
        case 3: return compute_block<3, PANELS>(p, tiles, weights, sums);
        case 4: return compute_block<4, PANELS>(p, tiles, weights, sums);
        case 5: return compute_block<5, PANELS>(p, tiles, weights, sums);
        case 6: return compute_block<6, PANELS>(p, tiles, weights, sums);
        case 7: return compute_block<7, PANELS>(p, tiles, weights, sums);
        default: return compute_block<8, PANELS>(p, tiles, weights, sums);
    }
}

inline void multiply(const Product& p, float* sums) {
    u64 stride = p.panels * PackedLinear::PANEL;
    for (u64 panel = 0; panel < p.panels; panel += 2) {
        for (u64 row = 0; row < p.rows; row += 8) {
            float* out = sums + row * stride + panel * PackedLinear::PANEL;
            u64 count = p.rows - row < 8 ? p.rows - row : 8;
            if (p.panels - panel >= 2)
                compute_rows<2>(p, count, p.inputs_of(row), p.weights_of(panel), out);
            else
                compute_rows<1>(p, count, p.inputs_of(row), p.weights_of(panel), out);
        }
    }
}

}  // namespace
}  // namespace penstock::engine

#define PENSTOCK_KERNEL packed_linear_avx512_bf16
#include "packed_linear_panels.h"
#endif
