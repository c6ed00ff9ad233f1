// token_choice_impl.h: the kernels of token_choice.h. Included by one .cpp per instruction set, which defines
// PENSTOCK_KERNEL, the function's name, and PENSTOCK_LANES, the floats in a vector register. Calls only built-in
// functions.
#include "softmax_impl.h"
#include "token_choice.h"

namespace penstock::engine {
namespace {

// The logits from `first` on. Lanes behind the row are -inf.
inline Floats load_logits(const float* logits, u64 first, u64 size) {
    if (size - first >= LANES) return Float32::load(logits + first);
    Floats part = Floats{} + NO_SCORE;
    for (u64 lane = 0; lane < size - first; ++lane) part[lane] = logits[first + lane];
    return part;
}

inline Indices lanes_of(u32 word) {
    Bits bits = {};
    for (u32 lane = 0; lane < LANES; ++lane) bits[lane] = 1u << lane;
    return ((Bits{} + word) & bits) != 0;
}

inline bool any(Indices lanes) {
    i32 all = 0;
    for (u64 lane = 0; lane < LANES; ++lane) all |= lanes[lane];
    return all != 0;
}

constexpr u64 PARTS = 4;  // vectors of which a loop takes care at once: a comparison waits for the one before it
constexpr u64 STRIDE = PARTS * LANES;

template <bool is_masked>
inline RowMaxima mask_row(float* logits, const u32* allowed, u64 size) {
    Floats all[PARTS], left[PARTS];
    for (u64 part = 0; part < PARTS; ++part) all[part] = left[part] = Floats{} + NO_SCORE;
    Indices nan = {};
    auto take = [&](u64 at, u64 part, Floats row) __attribute__((always_inline)) {
        nan |= row != row;
        all[part] = row > all[part] ? row : all[part];
        if (!is_masked) return;
        row = lanes_of(allowed[at / 32] >> at % 32) ? row : Floats{} + NO_SCORE;
        left[part] = row > left[part] ? row : left[part];
        store_part<Float32>(logits, at, size, row);
    };
    u64 at = 0;
    for (; at + STRIDE <= size; at += STRIDE)
        for (u64 part = 0; part < PARTS; ++part)
            take(at + part * LANES, part, Float32::load(logits + at + part * LANES));
    for (; at < size; at += LANES) take(at, 0, load_logits(logits, at, size));
    float greatest = NO_SCORE, greatest_left = NO_SCORE;
    for (u64 part = 0; part < PARTS; ++part) {
        float own = find_greatest(all[part]), own_left = find_greatest(left[part]);
        greatest = own > greatest ? own : greatest;
        greatest_left = own_left > greatest_left ? own_left : greatest_left;
    }
    return {greatest, is_masked ? greatest_left : greatest, any(nan)};
}

RowMaxima mask(float* logits, const u32* allowed, u64 size) {
    return allowed == nullptr ? mask_row<false>(logits, allowed, size) : mask_row<true>(logits, allowed, size);
}

u64 find(const float* logits, u64 size, float value) {
    u64 at = 0;
    for (; at + STRIDE <= size; at += STRIDE) {
        Indices equal = {};
        for (u64 part = 0; part < PARTS; ++part) equal |= Float32::load(logits + at + part * LANES) == value;
        if (any(equal)) break;
    }
    for (; at < size; ++at)
        if (logits[at] == value) return at;
    return size;
}

u64 gather(const float* logits, u64* next, u64 size, float least, float* out, u64 room) {
    u64 count = 0, at = *next;
    while (at < size && count + STRIDE <= room) {
        u64 end = at + STRIDE <= size ? at + STRIDE : size;
        if (end == at + STRIDE) {
            Indices greater = {};
            for (u64 part = 0; part < PARTS; ++part) greater |= Float32::load(logits + at + part * LANES) > least;
            if (!any(greater)) {
                at = end;
                continue;
            }
        }
        for (; at < end; ++at) {
            out[count] = logits[at];
            count += logits[at] > least;
        }
    }
    *next = at;
    return count;
}

float weigh(const float* logits, u64 size, const Weighing& how, float* weights) {
    Floats sums = {};
    for (u64 at = 0; at < size; at += LANES) {
        Floats row = load_logits(logits, at, size);
        Floats weight = power_of_two<Bits>((row - how.greatest) * how.scale);
        weight = row < how.least_logit ? Floats{} : weight;
        weight = weight < how.least_weight ? Floats{} : weight;
        sums += weight;
        if (weights != nullptr) store_part<Float32>(weights, at, size, weight);
    }
    return sum_lanes(sums);
}

constexpr TokenKernels KERNELS = {mask, find, gather, weigh};

}  // namespace

const TokenKernels& PENSTOCK_KERNEL() { return KERNELS; }

}  // namespace penstock::engine
