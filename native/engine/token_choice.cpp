// token_choice.cpp: which kernels of token_choice.h run, in how many threads, and how the tokens that `top_k` and
// `top_p` leave are found.
#include "token_choice.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "cpu_features.h"
#include "scratch.h"
#include "thread_team.h"

namespace penstock::engine {
namespace {

constexpr float LOWEST = -std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.44269504f;

const TokenKernels& kernels() {
#if defined(__x86_64__)
    if (has_avx512()) return token_choice_avx512();
    if (has_avx2()) return token_choice_avx2();
#endif
    return token_choice_portable();
}

// A row with a number as its greatest logit.
class Row {
   public:
    Row(const TokenChoices& of, u64 row, float greatest)
        : of_(of),
          row_(row),
          logits_(of.logits + static_cast<i64>(row) * of.stride),
          how_{greatest, LOG2_E / of.temperatures[row], LOWEST, of.min_ps[row]} {}

    i32 draw() {
        how_.least_logit = least_logit();
        constexpr u64 BLOCK = TokenKernels::BLOCK;
        u64 blocks = (size() + BLOCK - 1) / BLOCK;
        float* sums = scratch<Row, float>(blocks + BLOCK);
        double total = 0.0;
        for (u64 block = 0; block < blocks; ++block) total += sums[block] = weigh(block, nullptr);
        double rest = static_cast<double>(of_.draws[row_]) * total;
        u64 chosen = 0;
        for (u64 block = 0; block < blocks; ++block) {
            if (sums[block] == 0.0f) continue;
            chosen = block;  // the last one with a weight, if rounding leaves a rest
            if (rest < sums[block]) break;
            rest -= sums[block];
        }
        float* weights = sums + blocks;
        u64 tokens = std::min(BLOCK, size() - chosen * BLOCK), last = 0;
        weigh(chosen, weights);
        for (u64 token = 0; token < tokens; ++token) {
            if (weights[token] == 0.0f) continue;
            last = token;
            if (rest < weights[token]) break;
            rest -= weights[token];
        }
        return static_cast<i32>(chosen * BLOCK + last);
    }

   private:
    u64 size() const { return of_.vocabulary; }
    float weigh(u64 block, float* weights) const {
        constexpr u64 BLOCK = TokenKernels::BLOCK;
        u64 first = block * BLOCK;
        return kernels().weigh(logits_ + first, std::min(BLOCK, size() - first), how_, weights);
    }
    double sum(const float* logits, u64 count) const {  // of the weights of all
        Weighing all{how_.greatest, how_.scale, LOWEST, 0.0f};
        double total = 0.0;
        for (u64 at = 0; at < count; at += TokenKernels::BLOCK)
            total += kernels().weigh(logits + at, std::min(TokenKernels::BLOCK, count - at), all, nullptr);
        return total;
    }
    // The logit of the last token that top_k and top_p keep.
    float least_logit() const {
        u64 top_k = std::min(static_cast<u64>(of_.top_ks[row_]), size());
        float top_p = of_.top_ps[row_];
        if (top_k == size() && top_p >= 1.0f) return LOWEST;
        float* candidates = scratch<TokenKernels, float>(std::min(2 * top_k, size()) + 1024 + TokenKernels::GATHERED);
        u64 count = top_k < size() ? likeliest(top_k, candidates) : 0;
        if (top_p >= 1.0f) return *std::min_element(candidates, candidates + count);
        double total = top_k < size() ? sum(candidates, count) : sum(logits_, size());
        if (top_k == size()) {
            // All tokens below this weight together have less than 1 - top_p; a rounding error is less than the factor.
            double least = 0.99 * (1.0 - static_cast<double>(top_p)) * total / static_cast<double>(size());
            u64 next = 0;
            float logit = least > 0.0 ? how_.greatest + static_cast<float>(std::log2(least)) / how_.scale : LOWEST;
            count = kernels().gather(logits_, &next, size(), logit, candidates, size() + TokenKernels::GATHERED);
        }
        return last_of(candidates, count, top_p * total);
    }
    // Writes the `top_k` greatest logits to `candidates`, in any order. Fewer if no more are above -inf.
    u64 likeliest(u64 top_k, float* candidates) const {
        u64 room = std::min(2 * top_k, size()) + 1024 + TokenKernels::GATHERED, next = 0, count = 0;
        float least = LOWEST;
        while (true) {
            count += kernels().gather(logits_, &next, size(), least, candidates + count, room - count);
            if (count > top_k) {
                std::nth_element(candidates, candidates + top_k - 1, candidates + count, std::greater<>());
                count = top_k;
                least = candidates[top_k - 1];
            }
            if (next >= size()) return count;
        }
    }
    // The last of the greatest logits that are needed for a sum of weights. Sorts a part of `candidates`.
    float last_of(float* candidates, u64 count, double needed) const {
        u64 first = 0, end = count;
        while (end - first > 32) {
            u64 middle = first + (end - first) / 2;
            std::nth_element(candidates + first, candidates + middle, candidates + end, std::greater<>());
            double upper = sum(candidates + first, middle - first);
            if (upper < needed) {
                needed -= upper;
                first = middle;
            } else {
                end = middle;
            }
        }
        std::sort(candidates + first, candidates + end, std::greater<>());
        float last = candidates[first];
        for (; first < end && needed > 0.0; ++first) {
            last = candidates[first];
            needed -= sum(candidates + first, 1);
        }
        return last;
    }

    const TokenChoices& of_;
    u64 row_;
    const float* logits_;
    Weighing how_;
};

Choice choose(const TokenChoices& choices, u64 row) {
    float* logits = choices.logits + static_cast<i64>(row) * choices.stride;
    RowMaxima maxima = kernels().mask(logits, choices.allowed[row], choices.vocabulary);
    choices.ids[row] = 0;
    if (maxima.has_nan || !std::isfinite(maxima.all)) return Choice::no_number;
    if (!std::isfinite(maxima.allowed)) return Choice::none_allowed;
    choices.ids[row] = choices.temperatures[row] == 0.0f
                           ? static_cast<i32>(kernels().find(logits, choices.vocabulary, maxima.allowed))
                           : Row(choices, row, maxima.allowed).draw();
    return Choice::token;
}

}  // namespace

void choose_tokens(const TokenChoices& choices, u64 threads) {
    ThreadTeam::get().run_rows(threads, choices.rows, choices.vocabulary, [&](u64 first, u64 last) {
        for (u64 row = first; row < last; ++row) choices.results[row] = choose(choices, row);
    });
}

}  // namespace penstock::engine
