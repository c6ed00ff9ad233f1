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
inline void compute_block(const u16* tiles, const u16* weights, u64 input_tiles, float* sums, u64 stride) {
    __m512 sum[ROWS][PANELS];
    for (u64 row = 0; row < ROWS; ++row)
        for (u64 panel = 0; panel < PANELS; ++panel) sum[row][panel] = _mm512_setzero_ps();
    for (u64 tile = 0; tile < input_tiles; ++tile) {
        const u16* x = tiles + tile * PackedLinear::TILE;
        const u16* w = weights + tile * PackedLinear::TILE;
        for (u64 pair = 0; pair < PAIRS; ++pair) {
            __m512bh weight[PANELS];
            for (u64 panel = 0; panel < PANELS; ++panel) {
                const u16* at = w + panel * input_tiles * PackedLinear::TILE + pair * 2 * PackedLinear::PANEL;
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
inline void compute_rows(const u16* tiles, u64 rows, const u16* weights, u64 input_tiles, float* sums, u64 stride) {
    switch (rows) {
        case 1: return compute_block<1, PANELS>(tiles, weights, input_tiles, sums, stride);
        case 2: return compute_block<2, PANELS>(tiles, weights, input_tiles, sums, stride);
        case 3: return compute_block<3, PANELS>(tiles, weights, input_tiles, sums, stride);
        case 4: return compute_block<4, PANELS>(tiles, weights, input_tiles, sums, stride);
        case 5: return compute_block<5, PANELS>(tiles, weights, input_tiles, sums, stride);
        case 6: return compute_block<6, PANELS>(tiles, weights, input_tiles, sums, stride);
        case 7: return compute_block<7, PANELS>(tiles, weights, input_tiles, sums, stride);
        default: return compute_block<8, PANELS>(tiles, weights, input_tiles, sums, stride);
    }
}

inline void multiply(const u16* tiles, u64 rows, const u16* weights, u64 panels, u64 input_tiles, float* sums) {
    u64 stride = panels * PackedLinear::PANEL, panel_size = input_tiles * PackedLinear::TILE;
    for (u64 panel = 0; panel < panels;) {
        u64 together = panels - panel >= 2 ? 2 : 1;
        const u16* w = weights + panel * panel_size;
        for (u64 row = 0; row < rows; row += 8) {
            const u16* x = tiles + row / PackedLinear::TILE_ROWS * panel_size +
                           row % PackedLinear::TILE_ROWS * PackedLinear::TILE_INPUTS;
            float* out = sums + row * stride + panel * PackedLinear::PANEL;
            u64 count = rows - row < 8 ? rows - row : 8;
            if (together == 2)
                compute_rows<2>(x, count, w, input_tiles, out, stride);
            else
                compute_rows<1>(x, count, w, input_tiles, out, stride);
        }
        panel += together;
    }
}

}  // namespace
}  // namespace penstock::engine

#define PENSTOCK_KERNEL packed_linear_avx512_bf16
#include "packed_linear_panels.h"
#endif
