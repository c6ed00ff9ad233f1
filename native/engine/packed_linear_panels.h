// packed_linear_panels.h: the loop over rows and panels of packed_linear.h, and what becomes of the sums.
//
// Included by one .cpp per instruction set after its `multiply`, a SumsKernel. PENSTOCK_KERNEL is the function's name.
// Calls only built-in functions.
#include "packed_linear.h"
#include "vector_math.h"

namespace penstock::engine {
namespace {

typedef float Outputs __attribute__((vector_size(4 * PackedLinear::PANEL)));
typedef u32 OutputBits __attribute__((vector_size(4 * PackedLinear::PANEL)));
typedef u16 Halves __attribute__((vector_size(2 * PackedLinear::PANEL)));

inline Outputs gated(Outputs gate, Outputs up) {
    Outputs x = -gate;
    x = x < -87.0f ? Outputs{} - 87.0f : x;
    x = x > 87.0f ? Outputs{} + 87.0f : x;
    Outputs silu = gate / (exponential<OutputBits>(x) + 1.0f);
    silu = gate < -87.0f ? gate * 0.0f : silu;  // the exponential stops growing there
    return silu * up;
}

inline void store(u16* out, Outputs numbers, u64 first, u64 outputs) {
    Halves halves = to_bfloat16<Halves, OutputBits>(numbers);
    u64 count = outputs - first < PackedLinear::PANEL ? outputs - first : PackedLinear::PANEL;
    if (count == PackedLinear::PANEL) {
        __builtin_memcpy(out + first, &halves, sizeof halves);
        return;
    }
    for (u64 lane = 0; lane < count; ++lane) out[first + lane] = halves[lane];
}

inline void finish(const PackedLinear& linear, const float* sums, u64 rows, u64 first, u64 panels, u16* out,
                   u64 out_stride) {
    auto sum_of = [&](u64 row, u64 panel) {
        Outputs sum, bias;
        __builtin_memcpy(&sum, sums + (row * panels + panel) * PackedLinear::PANEL, sizeof sum);
        if (linear.bias == nullptr) return sum;
        __builtin_memcpy(&bias, linear.bias + (first + panel) * PackedLinear::PANEL, sizeof bias);
        return sum + bias;
    };
    for (u64 row = 0; row < rows; ++row) {
        u16* to = out + row * out_stride;
        if (linear.is_gated) {
            for (u64 panel = 0; panel < panels; panel += 2)
                store(to, gated(sum_of(row, panel), sum_of(row, panel + 1)), (first + panel) / 2 * PackedLinear::PANEL,
                      linear.results());
        } else {
            for (u64 panel = 0; panel < panels; ++panel)
                store(to, sum_of(row, panel), (first + panel) * PackedLinear::PANEL, linear.results());
        }
    }
}

}  // namespace

#define PENSTOCK_JOIN(left, right) left##right
#define PENSTOCK_SUFFIXED(name, suffix) PENSTOCK_JOIN(name, suffix)
void PENSTOCK_SUFFIXED(PENSTOCK_KERNEL, _sums)(const Product& product, float* sums) { multiply(product, sums); }

void PENSTOCK_KERNEL(const PackedLinear& linear, const u16* tiles, u64 rows, u64 first, u64 last, u16* out,
                     u64 out_stride) {
    alignas(64) float sums[PackedLinear::MAX_ROWS * PackedLinear::MAX_PANELS * PackedLinear::PANEL];
    u64 input_tiles = linear.input_tiles();
    for (u64 row = 0; row < rows; row += PackedLinear::MAX_ROWS) {
        u64 count = rows - row < PackedLinear::MAX_ROWS ? rows - row : PackedLinear::MAX_ROWS;
        const u16* x = tiles + row / PackedLinear::TILE_ROWS * linear.panel_size();
        for (u64 panel = first; panel < last; panel += PackedLinear::MAX_PANELS) {
            u64 together = last - panel < PackedLinear::MAX_PANELS ? last - panel : PackedLinear::MAX_PANELS;
            const u16* weights = linear.weights + panel * linear.panel_size();
            multiply({x, input_tiles, count, weights, input_tiles, together, input_tiles, false}, sums);
            finish(linear, sums, count, panel, together, out + row * out_stride, out_stride);
        }
    }
}

}  // namespace penstock::engine
