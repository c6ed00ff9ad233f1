// packed_linear_panels.h: the loop over rows and panels of packed_linear.h, and what becomes of the sums.
//
// Included by one .cpp per instruction set after its `multiply`, a SumsKernel for bfloat16. PENSTOCK_KERNEL is the
// function's name. Calls only built-in functions.
#include "packed_linear.h"
#include "packed_linear_float32.h"
#include "vector_math.h"

namespace penstock::engine {
namespace {

typedef float Outputs __attribute__((vector_size(4 * PackedLinear::PANEL)));
typedef u32 OutputBits __attribute__((vector_size(4 * PackedLinear::PANEL)));
typedef u16 Halves __attribute__((vector_size(2 * PackedLinear::PANEL)));

// SiLU is x / (1 + exp(-x)). GELU with tanh, 0.5 x (1 + tanh(y)) with y = sqrt(2 / pi) (x + 0.044715 x^3), is
// x / (1 + exp(-2 y)).
inline Outputs gated(Outputs gate, Outputs up, bool is_gelu) {
    Outputs power = is_gelu ? gate * (gate * gate * -0.0713548163f - 1.59576912f) : -gate;
    Outputs x = power < -87.0f ? Outputs{} - 87.0f : power;
    x = x > 87.0f ? Outputs{} + 87.0f : x;
    Outputs active = gate / (exponential<OutputBits>(x) + 1.0f);
    active = power > 87.0f ? gate * 0.0f : active;  // the exponential stops growing there
    return active * up;
}

template <class Element, class Vector>
inline void store(void* out, Vector numbers, u64 first, u64 outputs) {
    Element* to = static_cast<Element*>(out) + first;
    u64 count = outputs - first < PackedLinear::PANEL ? outputs - first : PackedLinear::PANEL;
    if (count == PackedLinear::PANEL) {
        __builtin_memcpy(to, &numbers, sizeof numbers);
        return;
    }
    for (u64 lane = 0; lane < count; ++lane) to[lane] = numbers[lane];
}

inline void store(const PackedLinear& linear, void* out, Outputs numbers, u64 first) {
    if (linear.dtype == DType::float32)
        store<float>(out, numbers, first, linear.results());
    else
        store<u16>(out, to_bfloat16<Halves, OutputBits>(numbers), first, linear.results());
}

// Returns the numbers of a panel; behind the last output: zeros.
template <class Element, class Vector>
inline Vector load(const void* row, u64 first, u64 outputs) {
    const Element* from = static_cast<const Element*>(row) + first;
    Vector numbers{};
    if (outputs - first >= PackedLinear::PANEL) {
        __builtin_memcpy(&numbers, from, sizeof numbers);
        return numbers;
    }
    for (u64 lane = 0; lane < outputs - first; ++lane) numbers[lane] = from[lane];
    return numbers;
}

inline Outputs load(const PackedLinear& linear, const Addend& addend, u64 row, u64 first) {
    const void* numbers = addend.from_row(linear, row).numbers;
    if (linear.dtype == DType::float32) return load<float, Outputs>(numbers, first, linear.outputs);
    auto halves = load<u16, Halves>(numbers, first, linear.outputs);
    return __builtin_bit_cast(Outputs, __builtin_convertvector(halves, OutputBits) << 16);
}

inline void finish(const PackedLinear& linear, const float* sums, u64 rows, u64 first, u64 panels, void* out,
                   u64 out_stride, const Addend& addend) {
    auto sum_of = [&](u64 row, u64 panel) {
        Outputs sum, bias;
        __builtin_memcpy(&sum, sums + (row * panels + panel) * PackedLinear::PANEL, sizeof sum);
        if (addend.numbers != nullptr) sum += load(linear, addend, row, (first + panel) * PackedLinear::PANEL);
        if (linear.bias == nullptr) return sum;
        __builtin_memcpy(&bias, linear.bias + (first + panel) * PackedLinear::PANEL, sizeof bias);
        return sum + bias;
    };
    for (u64 row = 0; row < rows; ++row) {
        void* to = static_cast<u16*>(out) + row * out_stride * linear.width();
        if (linear.is_gated) {
            for (u64 panel = 0; panel < panels; panel += 2)
                store(linear, to, gated(sum_of(row, panel), sum_of(row, panel + 1), linear.is_gelu),
                      (first + panel) / 2 * PackedLinear::PANEL);
        } else {
            for (u64 panel = 0; panel < panels; ++panel)
                store(linear, to, sum_of(row, panel), (first + panel) * PackedLinear::PANEL);
        }
    }
}

}  // namespace

#define PENSTOCK_JOIN(left, right) left##right
#define PENSTOCK_SUFFIXED(name, suffix) PENSTOCK_JOIN(name, suffix)
void PENSTOCK_SUFFIXED(PENSTOCK_KERNEL, _sums)(const Product& product, float* sums) { multiply(product, sums); }

void PENSTOCK_KERNEL(const PackedLinear& linear, const u16* tiles, u64 rows, u64 first, u64 last, void* out,
                     u64 out_stride, const Addend& addend) {
    alignas(64) float sums[PackedLinear::MAX_ROWS * PackedLinear::MAX_PANELS * PackedLinear::PANEL];
    u64 input_tiles = linear.input_tiles();
    for (u64 row = 0; row < rows; row += PackedLinear::MAX_ROWS) {
        u64 count = rows - row < PackedLinear::MAX_ROWS ? rows - row : PackedLinear::MAX_ROWS;
        const u16* x = tiles + row / PackedLinear::TILE_ROWS * linear.panel_size();
        u16* to = static_cast<u16*>(out) + row * out_stride * linear.width();
        for (u64 panel = first; panel < last; panel += PackedLinear::MAX_PANELS) {
            u64 together = last - panel < PackedLinear::MAX_PANELS ? last - panel : PackedLinear::MAX_PANELS;
            const u16* weights = linear.weights + panel * linear.panel_size();
            Product product{x, input_tiles, count, weights, input_tiles, together, input_tiles, false};
            linear.dtype == DType::float32 ? multiply_float32(product, sums) : multiply(product, sums);
            finish(linear, sums, count, panel, together, to, out_stride, addend.from_row(linear, row));
        }
    }
}

}  // namespace penstock::engine
