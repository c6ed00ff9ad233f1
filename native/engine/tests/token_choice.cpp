// token_choice.cpp: the kernels of token_choice.h against loops over single numbers, with rows that end anywhere.
#include "token_choice.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu_features.h"
#include "tests/testing.h"

using namespace testing;
using namespace penstock::engine;

namespace {

constexpr float INF = std::numeric_limits<float>::infinity();

float random_logit(Random& random) {
    if (random.one_in(50)) return -INF;
    return static_cast<float>(random.below(4001)) / 100.0f - 20.0f;
}

void check_mask(Random& random, const TokenKernels& kernels, std::vector<float> row) {
    bool has_nan = random.one_in(8), is_masked = random.one_in(2);
    if (has_nan) row[random.below(row.size())] = std::nanf("");
    std::vector<u32> bits((row.size() + 31) / 32);
    for (u32& word : bits) word = random.one_in(3) ? 0 : random.one_in(3) ? ~0u : static_cast<u32>(random.next());
    std::vector<float> expected = row;
    float all = -INF, allowed = -INF;
    for (u64 token = 0; token < row.size(); ++token) {
        bool may_come = !is_masked || (bits[token / 32] >> token % 32 & 1) != 0;
        if (row[token] > all) all = row[token];
        if (may_come && row[token] > allowed) allowed = row[token];
        if (!may_come) expected[token] = -INF;
    }
    RowMaxima maxima = kernels.mask(row.data(), is_masked ? bits.data() : nullptr, row.size());
    REQUIRE(maxima.has_nan == has_nan, "has_nan");
    REQUIRE(maxima.all == all && maxima.allowed == allowed, "maxima of a row of %zu", row.size());
    for (u64 token = 0; token < row.size(); ++token)
        REQUIRE(row[token] == expected[token] || (std::isnan(row[token]) && std::isnan(expected[token])),
                "logit %" PRIu64 " of %zu behind its mask", token, row.size());
}

void check_find(Random& random, const TokenKernels& kernels, const std::vector<float>& row) {
    float value = random.one_in(4) ? 1000.0f : row[random.below(row.size())];
    u64 expected = static_cast<u64>(std::find(row.begin(), row.end(), value) - row.begin());
    REQUIRE(kernels.find(row.data(), row.size(), value) == expected, "the first of equal logits of %zu", row.size());
}

void check_gather(Random& random, const TokenKernels& kernels, const std::vector<float>& row) {
    float least = random.one_in(4) ? -INF : random_logit(random);
    u64 room = TokenKernels::GATHERED + random.below(300), next = 0, calls = 0;
    std::vector<float> expected, gathered;
    for (float logit : row)
        if (logit > least) expected.push_back(logit);
    while (next < row.size()) {
        std::vector<float> out(room);
        u64 before = next, count = kernels.gather(row.data(), &next, row.size(), least, out.data(), room);
        REQUIRE(next > before && count <= room, "call %" PRIu64 " goes on", calls++);
        gathered.insert(gathered.end(), out.begin(), out.begin() + static_cast<i64>(count));
    }
    REQUIRE(gathered == expected, "%zu logits above %g of %zu", expected.size(), double{least}, row.size());
}

void check_weigh(Random& random, const TokenKernels& kernels, const std::vector<float>& row) {
    Weighing how{*std::max_element(row.begin(), row.end()), 0.01f + static_cast<float>(random.below(300)) / 100.0f,
                 random.one_in(2) ? -INF : random_logit(random), random.one_in(2) ? 0.0f : 0.25f};
    if (how.greatest == -INF) return;
    std::vector<float> weights(row.size());
    double expected_sum = 0;
    float sum = kernels.weigh(row.data(), row.size(), how, weights.data());
    for (u64 token = 0; token < row.size(); ++token) {
        double expected = std::exp2((double{row[token]} - double{how.greatest}) * double{how.scale});
        bool is_on_edge = std::abs(expected - double{how.least_weight}) < 1e-5;
        if (row[token] < how.least_logit || (expected < double{how.least_weight} && !is_on_edge)) expected = 0;
        if (is_on_edge) expected = double{weights[token]};
        REQUIRE(std::abs(double{weights[token]} - expected) <= 1e-5 * expected + 1e-37, "weight %" PRIu64, token);
        expected_sum += expected;
    }
    REQUIRE(std::abs(double{sum} - expected_sum) <= 1e-5 * expected_sum + 1e-37, "the sum of weights");
    REQUIRE(kernels.weigh(row.data(), row.size(), how, nullptr) == sum, "the sum without weights");
}

}  // namespace

int main(int argc, char** argv) {
    Arguments arguments(argc, argv);
    std::printf("token_choice: seed %llu\n", (unsigned long long)arguments.seed);
    std::vector<const TokenKernels*> all{&token_choice_portable()};
#if defined(__x86_64__)
    if (has_avx2()) all.push_back(&token_choice_avx2());
    if (has_avx512()) all.push_back(&token_choice_avx512());
#endif
    const u64 sizes[] = {1, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 1000, 1024, 1025, 5003};
    for (u64 round = 0; round < (arguments.is_quick ? 300u : 5000u); ++round) {
        Random random(arguments.seed + round);
        std::vector<float> row(random.of(sizes));
        for (float& logit : row) logit = random_logit(random);
        for (const TokenKernels* kernels : all) {
            check_mask(random, *kernels, row);
            check_find(random, *kernels, row);
            check_gather(random, *kernels, row);
            check_weigh(random, *kernels, row);
        }
    }
    return 0;
}
