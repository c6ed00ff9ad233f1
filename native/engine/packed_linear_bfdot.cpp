// packed_linear_bfdot.cpp: the kernel of packed_linear.h by bfdot of aarch64. Calls only intrinsics; paged_attention.h
// says why.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "packed_linear.h"

namespace penstock::engine {
namespace {

template <u64 ROWS>
inline void compute_rows(const u16* tiles, const u16* weights, u64 input_tiles, bool adds, float* sums, u64 stride) {
    float32x4_t sum[ROWS][4];
    for (u64 row = 0; row < ROWS; ++row)
        for (u64 part = 0; part < 4; ++part)
            sum[row][part] = adds ? vld1q_f32(sums + row * stride + part * 4) : vdupq_n_f32(0.0f);
    for (u64 tile = 0; tile < input_tiles; ++tile) {
        const u16* x = tiles + tile * PackedLinear::TILE;
        const u16* w = weights + tile * PackedLinear::TILE;
        for (u64 pair = 0; pair < PackedLinear::TILE_INPUTS / 2; ++pair) {
            bfloat16x8_t weight[4];
            for (u64 part = 0; part < 4; ++part)
                weight[part] = vreinterpretq_bf16_u16(vld1q_u16(w + pair * 2 * PackedLinear::PANEL + part * 8));
            for (u64 row = 0; row < ROWS; ++row) {
                u32 two;
                __builtin_memcpy(&two, x + row * PackedLinear::TILE_INPUTS + pair * 2, sizeof two);
                bfloat16x8_t both = vreinterpretq_bf16_u32(vdupq_n_u32(two));
                for (u64 part = 0; part < 4; ++part) sum[row][part] = vbfdotq_f32(sum[row][part], weight[part], both);
            }
        }
    }
    for (u64 row = 0; row < ROWS; ++row)
        for (u64 part = 0; part < 4; ++part) vst1q_f32(sums + row * stride + part * 4, sum[row][part]);
}

}  // namespace
}  // namespace penstock::engine

#define PENSTOCK_KERNEL packed_linear_bfdot
#include "packed_linear_fours.h"
#include "packed_linear_panels.h"
#endif
