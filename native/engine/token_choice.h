// token_choice.h: the choice of a token from each row of logits, on CPUs: masks of grammars, temperature, top_k, top_p
// and min_p.
//
// The kernels are compiled once per instruction set; paged_attention.h says what that forbids. What sorts is in
// token_choice.cpp, which is compiled for every processor.
#pragma once
#include "paged_attention.h"

namespace penstock::engine {

// What is known of a row after one pass. NaN is in no maximum.
struct RowMaxima {
    float all, allowed;
    bool has_nan;
};

// How the logits of a row become weights: 1 for the likeliest token, 0 below one of the limits.
struct Weighing {
    float greatest, scale;  // a weight is 2^((logit - greatest) * scale)
    float least_logit, least_weight;
};

struct TokenKernels {
    static constexpr u64 BLOCK = 1024;       // tokens of which a draw knows the sum before it looks at each
    static constexpr u64 GATHERED = 4 * 16;  // `gather` looks at so many logits at once, or fewer

    // Returns the maxima of a row. Logits without a set bit become -inf. `allowed`: nullptr: all may come.
    RowMaxima (*mask)(float* logits, const u32* allowed, u64 size);
    // Returns the first token with a logit of this value, or `size`.
    u64 (*find)(const float* logits, u64 size, float value);
    // Writes logits from `*next` on that are greater than `least` to `out`, until there may be no room.
    // Returns how many, and moves `*next`.
    u64 (*gather)(const float* logits, u64* next, u64 size, float least, float* out, u64 room);
    // Returns the sum of the weights. `weights`: room for each weight, or nullptr.
    float (*weigh)(const float* logits, u64 size, const Weighing& how, float* weights);
};

using TokenKernelsOf = const TokenKernels&();
TokenKernelsOf token_choice_portable;
#if defined(__x86_64__)
TokenKernelsOf token_choice_avx2;
TokenKernelsOf token_choice_avx512;
#endif

enum class Choice : u8 { token = 0, no_number = 1, none_allowed = 2 };

// Columns have an entry for each row.
struct TokenChoices {
    float* logits;
    i64 stride;  // in elements
    u64 rows, vocabulary;
    const float* temperatures;  // 0: the likeliest token
    const i64* top_ks;
    const float *top_ps, *min_ps, *draws;  // draws: of [0, 1)
    const u32* const* allowed;             // bits; nullptr: all tokens may come
    i32* ids;                              // 0 where no token is chosen
    Choice* results;
};

void choose_tokens(const TokenChoices& choices, u64 threads);

}  // namespace penstock::engine
