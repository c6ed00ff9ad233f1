// softmax_impl.h: the parts of a softmax that runs over tiles of scores. Included by kernels that are compiled once per
// instruction set, after the file that defines PENSTOCK_LANES, the floats in a vector register.
#pragma once
#include "vector_elements.h"

namespace penstock::engine {
namespace {

constexpr float NO_SCORE = -__builtin_inff();

inline Floats load(const float* at) {
    Floats out;
    __builtin_memcpy(&out, at, sizeof out);
    return out;
}
inline void store(float* at, Floats vector) { __builtin_memcpy(at, &vector, sizeof vector); }

inline Floats exp_nonpositive(Floats x) { return exponential<Bits>(x < -87.0f ? Floats{} - 87.0f : x); }
inline float exp_nonpositive(float x) { return exp_nonpositive(Floats{} + x)[0]; }

// Replaces scores by tanh(score * scale / softcap) * softcap. `size` is a multiple of LANES.
inline void cap_scores(float* scores, u64 size, float scale, float softcap) {
    for (u64 i = 0; i < size; i += LANES)
        store(scores + i, hyperbolic_tangent<Bits>(load(scores + i) * (scale / softcap)) * softcap);
}

inline float sum_lanes(Floats vector) {
    float sum = 0.0f;
    for (u64 lane = 0; lane < LANES; ++lane) sum += vector[lane];
    return sum;
}

#if defined(__clang__)
#define PENSTOCK_SHUFFLE(left, right, ...) __builtin_shufflevector(left, right, __VA_ARGS__)
#else
#define PENSTOCK_SHUFFLE(left, right, ...) __builtin_shuffle(left, right, Bits{__VA_ARGS__})
#endif

// The greatest number of a vector: compares with halves, quarters, … in each other's place.
inline float find_greatest(Floats numbers) {
    auto compare = [&](Floats moved) { numbers = moved > numbers ? moved : numbers; };
#if PENSTOCK_LANES == 16
    compare(PENSTOCK_SHUFFLE(numbers, numbers, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    compare(PENSTOCK_SHUFFLE(numbers, numbers, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    compare(PENSTOCK_SHUFFLE(numbers, numbers, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    compare(PENSTOCK_SHUFFLE(numbers, numbers, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#elif PENSTOCK_LANES == 8
    compare(PENSTOCK_SHUFFLE(numbers, numbers, 4, 5, 6, 7, 0, 1, 2, 3));
    compare(PENSTOCK_SHUFFLE(numbers, numbers, 2, 3, 0, 1, 6, 7, 4, 5));
    compare(PENSTOCK_SHUFFLE(numbers, numbers, 1, 0, 3, 2, 5, 4, 7, 6));
#else
    compare(PENSTOCK_SHUFFLE(numbers, numbers, 2, 3, 0, 1));
    compare(PENSTOCK_SHUFFLE(numbers, numbers, 1, 0, 3, 2));
#endif
    return numbers[0];
}

// The greatest of these scores and `max`.
inline float find_max(const float* scores, u64 count, float max) {
    u64 i = 0;
    if (count >= LANES) {
        Floats greatest = load(scores);
        for (i = LANES; i + LANES <= count; i += LANES) {
            Floats next = load(scores + i);
            greatest = next > greatest ? next : greatest;
        }
        float next = find_greatest(greatest);
        max = next > max ? next : max;
    }
    for (; i < count; ++i) max = scores[i] > max ? scores[i] : max;
    return max;
}

// Replaces each score by exp(score - max), and returns the sum of these.
inline float exponentiate(float* scores, u64 count, float max) {
    Floats sums = {};
    u64 i = 0;
    for (; i + LANES <= count; i += LANES) {
        Floats weights = exp_nonpositive(load(scores + i) - max);
        store(scores + i, weights);
        sums += weights;
    }
    float sum = sum_lanes(sums);
    for (; i < count; ++i) sum += scores[i] = exp_nonpositive(scores[i] - max);
    return sum;
}

}  // namespace
}  // namespace penstock::engine
