// paged_attention.cpp: each kernel against the same attention in doubles, one number after the other, with random
// shapes, windows, block tables, soft caps and sinks.
#include "paged_attention.h"

#include <algorithm>
#include <cmath>

#include "cpu_features.h"
#include "engine/tests/bfloat16.h"
#include "tests/testing.h"

using namespace testing;
using namespace penstock::engine;

namespace {

float number(Random& random) { return static_cast<float>(random.below(2001)) / 500.0f - 2.0f; }

struct Case {
    PagedAttention problem{};
    std::vector<float> queries, keys, values, sinks;
    std::vector<u16> bfloat16_queries, bfloat16_keys, bfloat16_values;
    std::vector<i32> block_tables;
    std::vector<i64> first_positions, seq_lens;
    u64 blocks;

    explicit Case(Random& random) {
        const u64 sizes[] = {1, 3, 8, 13, 16, 31, 32, 33, 40, 64, 80, 96, 128, 256};
        problem.num_seqs = 1 + random.below(4), problem.num_kv_heads = 1 + random.below(3);
        problem.num_heads = problem.num_kv_heads * (1 + random.below(9));
        problem.key_size = random.of(sizes),
        problem.value_size = random.one_in(3) ? random.of(sizes) : problem.key_size;
        problem.block_size = 1 + random.below(20), problem.table_width = 1 + random.below(20);
        problem.dtype = random.one_in(3) ? DType::bfloat16 : DType::float32;
        problem.scale = 0.3f, problem.softcap = random.one_in(3) ? 2.5f : 0.0f;
        blocks = problem.num_seqs * problem.table_width;
        for (u64 block = 0; block < blocks; ++block) block_tables.push_back(static_cast<i32>(block));
        for (u64 at = blocks; at > 1; --at) std::swap(block_tables[at - 1], block_tables[random.below(at)]);
        for (u64 seq = 0; seq < problem.num_seqs; ++seq) {
            seq_lens.push_back(static_cast<i64>(1 + random.below(problem.table_width * problem.block_size)));
            first_positions.push_back(
                random.one_in(2) ? 0 : static_cast<i64>(random.below(static_cast<u64>(seq_lens.back()))));
        }
        fill(random, queries, bfloat16_queries, problem.num_seqs * problem.num_heads * problem.key_size);
        fill(random, keys, bfloat16_keys, blocks * problem.block_size * problem.num_kv_heads * problem.key_size);
        fill(random, values, bfloat16_values, blocks * problem.block_size * problem.num_kv_heads * problem.value_size);
        bool is_bfloat16 = problem.dtype == DType::bfloat16;
        problem.queries = is_bfloat16 ? static_cast<void*>(bfloat16_queries.data()) : queries.data();
        problem.keys = is_bfloat16 ? static_cast<void*>(bfloat16_keys.data()) : keys.data();
        problem.values = is_bfloat16 ? static_cast<void*>(bfloat16_values.data()) : values.data();
        problem.query_head_stride = static_cast<i64>(problem.key_size);
        problem.query_seq_stride = static_cast<i64>(problem.num_heads * problem.key_size);
        problem.block_tables = block_tables.data(), problem.first_positions = first_positions.data(),
        problem.seq_lens = seq_lens.data();
        if (random.one_in(3)) {
            for (u64 head = 0; head < problem.num_heads; ++head) sinks.push_back(number(random));
            problem.sinks = sinks.data();
        }
    }
    static void fill(Random& random, std::vector<float>& out, std::vector<u16>& bits, u64 count) {
        for (u64 i = 0; i < count; ++i) {
            bits.push_back(bits_of(number(random)));
            out.push_back(float_of(bits.back()));  // so that both are the same numbers
        }
    }
    std::vector<double> attend(u64 seq, u64 head) const {
        std::vector<double> scores;
        u64 kv_head = head / problem.heads_per_kv_head();
        auto place = [&](i64 position) {
            u64 at = static_cast<u64>(position);
            return static_cast<u64>(block_tables[seq * problem.table_width + at / problem.block_size]) *
                       problem.block_size +
                   at % problem.block_size;
        };
        for (i64 position = first_positions[seq]; position < seq_lens[seq]; ++position) {
            double score = 0;
            for (u64 k = 0; k < problem.key_size; ++k)
                score += double{queries[(seq * problem.num_heads + head) * problem.key_size + k]} *
                         double{keys[(place(position) * problem.num_kv_heads + kv_head) * problem.key_size + k]};
            score *= double{problem.scale};
            scores.push_back(
                problem.softcap != 0.0f ? std::tanh(score / double{problem.softcap}) * double{problem.softcap} : score);
        }
        double max = *std::max_element(scores.begin(), scores.end()), weight = 0;
        if (!sinks.empty()) weight = std::exp(double{sinks[head]} - max);
        std::vector<double> sums(problem.value_size);
        for (u64 i = 0; i < scores.size(); ++i) {
            double share = std::exp(scores[i] - max);
            weight += share;
            u64 at = place(first_positions[seq] + static_cast<i64>(i)) * problem.num_kv_heads + kv_head;
            for (u64 k = 0; k < problem.value_size; ++k) sums[k] += share * double{values[at * problem.value_size + k]};
        }
        for (double& sum : sums) sum /= weight;
        return sums;
    }
};

using Kernel = void (*)(const PagedAttention&, u64, u64, float*);

void compare(const Case& test_case, const char* name, Kernel kernel) {
    PagedAttention problem = test_case.problem;
    u64 count = problem.num_seqs * problem.num_heads * problem.value_size,
        pairs = problem.num_seqs * problem.num_kv_heads;
    bool is_bfloat16 = problem.dtype == DType::bfloat16;
    std::vector<float> out(count), scratch(problem.scratch_size());
    std::vector<u16> bfloat16_out(count);
    problem.out = is_bfloat16 ? static_cast<void*>(bfloat16_out.data()) : out.data();
    for (u64 pair = pairs; pair-- > 0;) kernel(problem, pair, pair + 1, scratch.data());
    if (is_bfloat16) std::transform(bfloat16_out.begin(), bfloat16_out.end(), out.begin(), float_of);
    double tolerance = is_bfloat16 ? 2e-2 : 2e-5;
    for (u64 row = 0; row < problem.num_seqs * problem.num_heads; ++row) {
        u64 seq = row / problem.num_heads, head = row % problem.num_heads;
        std::vector<double> expected = test_case.attend(seq, head);
        for (u64 k = 0; k < problem.value_size; ++k) {
            double computed = double{out[row * problem.value_size + k]};
            REQUIRE(std::fabs(expected[k] - computed) <= tolerance, "%s: seq %llu head %llu: %g instead of %g", name,
                    (unsigned long long)seq, (unsigned long long)head, computed, expected[k]);
        }
    }
}

// NaN in the keys stays NaN in the result: the sampler fails such a request.
void require_nan_of_nan(const Case& test_case, const char* name, Kernel kernel) {
    if (test_case.problem.dtype != DType::float32) return;
    Case other = test_case;
    PagedAttention problem = other.problem;
    u64 count = problem.num_seqs * problem.num_heads * problem.value_size;
    std::vector<float> out(count), scratch(problem.scratch_size());
    std::fill(other.keys.begin(), other.keys.end(), NAN);
    problem.queries = other.queries.data(), problem.keys = other.keys.data(), problem.values = other.values.data();
    problem.block_tables = other.block_tables.data(), problem.first_positions = other.first_positions.data(),
    problem.seq_lens = other.seq_lens.data();
    problem.sinks = other.sinks.empty() ? nullptr : other.sinks.data();
    problem.out = out.data();
    kernel(problem, 0, problem.num_seqs * problem.num_kv_heads, scratch.data());
    for (float each : out) REQUIRE(std::isnan(each), "%s: %g, of keys that are NaN", name, double{each});
}

}  // namespace

int main(int argc, char** argv) {
    Arguments arguments(argc, argv);
    u64 rounds = arguments.is_quick ? 60 : 1500;
    std::printf("paged_attention: seed %llu\n", (unsigned long long)arguments.seed);
    for (u64 round = 0; round < rounds; ++round) {
        Random random(arguments.seed + round);
        Case test_case(random);
        compare(test_case, "portable", paged_attention_portable);
        require_nan_of_nan(test_case, "portable", paged_attention_portable);
#if defined(__x86_64__)
        if (has_avx2()) {
            compare(test_case, "AVX2", paged_attention_avx2);
            require_nan_of_nan(test_case, "AVX2", paged_attention_avx2);
        }
        if (has_avx512()) {
            compare(test_case, "AVX-512", paged_attention_avx512);
            require_nan_of_nan(test_case, "AVX-512", paged_attention_avx512);
        }
#endif
    }
    std::printf("paged_attention: %llu cases\n", (unsigned long long)rounds);
    return 0;
}
