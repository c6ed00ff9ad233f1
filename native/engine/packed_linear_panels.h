// packed_linear_panels.h: the loop over rows and panels of packed_linear.h, and what becomes of the sums.
//
// Included by one .cpp per instruction set after its `multiply`, which computes sums[row * panels * 16 + output] of up
// to MAX_ROWS rows and MAX_PANELS panels. PENSTOCK_KERNEL is the function's name. Calls only built-in functions.
#include "packed_linear.h"

namespace penstock::engine {
namespace {

typedef float Outputs __attribute__((vector_size(4 * PackedLinear::PANEL)));
typedef u32 OutputBits __attribute__((vector_size(4 * PackedLinear::PANEL)));
typedef u16 Halves __attribute__((vector_size(2 * PackedLinear::PANEL)));

// e^x within 2 units in the last place, for |x| <= 87: the constants are those of paged_attention_impl.h.
inline Outputs exponential(Outputs x) {
    constexpr float ROUNDER = 12582912.0f;
    x = x < -87.0f ? Outputs{} - 87.0f : x;
    x = x > 87.0f ? Outputs{} + 87.0f : x;
    Outputs n = x * 1.44269504f + ROUNDER;
    Outputs power_of_two = __builtin_bit_cast(Outputs, (__builtin_bit_cast(OutputBits, n) + 127) << 23);
    n -= ROUNDER;
    Outputs r = x - n * 0.693359375f - n * -2.12194440e-4f;
    Outputs sum = r * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * r + 8.3334519073e-3f;
    sum = sum * r + 4.1665795894e-2f;
    sum = sum * r + 1.6666665459e-1f;
    sum = sum * r + 5.0000001201e-1f;
    return (sum * r * r + r + 1.0f) * power_of_two;
}

inline Outputs gated(Outputs gate, Outputs up) {
    Outputs silu = gate / (exponential(-gate) + 1.0f);
    silu = gate < -87.0f ? gate * 0.0f : silu;  // the exponential stops growing there
    return silu * up;
}

// To the nearest bfloat16, ties to even; NaN stays NaN.
inline Halves rounded(Outputs numbers) {
    OutputBits bits = __builtin_bit_cast(OutputBits, numbers);
    OutputBits nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    OutputBits quiet = bits >> 16 | 0x40;
    return __builtin_convertvector((bits & 0x7fffffff) > 0x7f800000 ? quiet : nearest, Halves);
}

inline void store(u16* out, Outputs numbers, u64 first, u64 outputs) {
    Halves halves = rounded(numbers);
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

void PENSTOCK_KERNEL(const PackedLinear& linear, const u16* tiles, u64 rows, u64 first, u64 last, u16* out,
                     u64 out_stride) {
    alignas(64) float sums[PackedLinear::MAX_ROWS * PackedLinear::MAX_PANELS * PackedLinear::PANEL];
    for (u64 row = 0; row < rows; row += PackedLinear::MAX_ROWS) {
        u64 count = rows - row < PackedLinear::MAX_ROWS ? rows - row : PackedLinear::MAX_ROWS;
        const u16* x = tiles + row / PackedLinear::TILE_ROWS * linear.panel_size();
        for (u64 panel = first; panel < last; panel += PackedLinear::MAX_PANELS) {
            u64 together = last - panel < PackedLinear::MAX_PANELS ? last - panel : PackedLinear::MAX_PANELS;
            multiply(x, count, linear.weights + panel * linear.panel_size(), together, linear.input_tiles(), sums);
            finish(linear, sums, count, panel, together, out + row * out_stride, out_stride);
        }
    }
}

}  // namespace penstock::engine
