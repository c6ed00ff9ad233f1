// prefill_attention.cpp: each kernel, with the products of each linear kernel, against the same attention in doubles,
// with random shapes, windows, block tables, soft caps and sinks.
#include "prefill_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu_features.h"
#include "engine/tests/bfloat16.h"
#include "tests/testing.h"

using namespace testing;
using namespace penstock::engine;

namespace {

std::vector<u16> numbers(Random& random, u64 count) {
    std::vector<u16> out(count);
    for (u16& number : out) number = bits_of(static_cast<float>(random.below(2001)) / 500.0f - 2.0f);
    return out;
}

struct Case {
    PrefillAttention problem{};
    std::vector<u16> queries, keys, values;
    std::vector<float> sinks;
    std::vector<i32> blocks;

    explicit Case(Random& random) {
        const u64 sizes[] = {1, 7, 16, 40, 64, 128};
        problem.num_kv_heads = 1 + random.below(2), problem.num_heads = problem.num_kv_heads * (1 + random.below(4));
        problem.key_size = random.of(sizes),
        problem.value_size = random.one_in(3) ? random.of(sizes) : problem.key_size;
        problem.tokens = 1 + random.below(60), problem.block_size = 1 + random.below(20);
        problem.seq_len = problem.tokens + (random.one_in(3) ? 0 : random.below(300));
        problem.window = random.one_in(2) ? 0 : 1 + random.below(random.one_in(2) ? 12 : 200);
        problem.scale = 0.3f, problem.softcap = random.one_in(3) ? 2.5f : 0.0f;
        u64 count = PackedLinear::divide_up(problem.seq_len, problem.block_size), cached = count * problem.block_size;
        for (u64 block = 0; block < count; ++block) blocks.push_back(static_cast<i32>(block));
        for (u64 at = count; at > 1; --at) std::swap(blocks[at - 1], blocks[random.below(at)]);
        queries = numbers(random, problem.tokens * problem.num_heads * problem.key_size);
        keys = numbers(random, cached * problem.num_kv_heads * problem.key_size);
        values = numbers(random, cached * problem.num_kv_heads * problem.value_size);
        for (u64 position = problem.seq_len; position < cached; ++position) {  // of another request
            u16 nan = bits_of(std::numeric_limits<float>::quiet_NaN());
            std::fill_n(keys.data() + row(position, 0) * problem.key_size, problem.num_kv_heads * problem.key_size,
                        nan);
            std::fill_n(values.data() + row(position, 0) * problem.value_size,
                        problem.num_kv_heads * problem.value_size, nan);
        }
        if (random.one_in(3)) {
            for (u64 head = 0; head < problem.num_heads; ++head)
                sinks.push_back(static_cast<float>(random.below(100)) / 25.0f - 2.0f);
            problem.sinks = sinks.data();
        }
        problem.queries = queries.data(), problem.keys = keys.data(), problem.values = values.data();
        problem.query_head_stride = static_cast<i64>(problem.key_size);
        problem.query_token_stride = static_cast<i64>(problem.num_heads * problem.key_size);
        problem.blocks = blocks.data();
    }

    u64 row(u64 position, u64 kv_head) const {
        u64 block = static_cast<u64>(blocks[position / problem.block_size]);
        return (block * problem.block_size + position % problem.block_size) * problem.num_kv_heads + kv_head;
    }
    std::vector<double> expected(u64 token, u64 head) const {
        u64 position = problem.seq_len - problem.tokens + token, kv_head = head / problem.heads_per_kv_head();
        u64 first = problem.window != 0 && position + 1 > problem.window ? position + 1 - problem.window : 0;
        std::vector<double> scores, sums(problem.value_size);
        for (u64 at = first; at <= position; ++at) {
            double score = 0;
            for (u64 k = 0; k < problem.key_size; ++k)
                score += double{float_of(queries[(token * problem.num_heads + head) * problem.key_size + k])} *
                         double{float_of(keys[row(at, kv_head) * problem.key_size + k])};
            score *= double{problem.scale};
            if (problem.softcap != 0.0f) score = std::tanh(score / double{problem.softcap}) * double{problem.softcap};
            scores.push_back(score);
        }
        double max = *std::max_element(scores.begin(), scores.end()), total = 0;
        if (!sinks.empty()) total = std::exp(double{sinks[head]} - max);
        for (u64 at = first; at <= position; ++at) {
            double weight = std::exp(scores[at - first] - max);
            total += weight;
            for (u64 k = 0; k < problem.value_size; ++k)
                sums[k] += weight * double{float_of(values[row(at, kv_head) * problem.value_size + k])};
        }
        for (double& sum : sums) sum /= total;
        return sums;
    }
    std::vector<u16> computed(const PrefillKernel& kernel, SumsKernel* multiply) {
        std::vector<u16> out(problem.tokens * problem.num_heads * problem.value_size + 1, 0x7777);
        problem.out = out.data();
        std::vector<u16> packed(problem.tiles() * problem.tile_nelements());
        std::vector<float> scratch(problem.scratch_size());
        for (u64 kv_head = 0; kv_head < problem.num_kv_heads; ++kv_head) {
            for (u64 tile = 0; tile < problem.tiles(); ++tile)
                kernel.pack(problem, kv_head, tile, packed.data() + tile * problem.tile_nelements());
            for (u64 group = 0; group < problem.groups(); ++group)
                kernel.attend(problem, kv_head, group, packed.data(), multiply, scratch.data());
        }
        REQUIRE(out.back() == 0x7777, "the kernel wrote beyond the last number");
        out.pop_back();
        return out;
    }
};

std::vector<const PrefillKernel*> kernels() {
    std::vector<const PrefillKernel*> out{&prefill_attention_portable};
#if defined(__x86_64__)
    if (has_avx2()) out.push_back(&prefill_attention_avx2);
    if (has_avx512()) out.push_back(&prefill_attention_avx512);
#endif
    if (std::find(out.begin(), out.end(), &prefill_kernel()) == out.end()) out.push_back(&prefill_kernel());
    return out;
}

void check(Random& random) {
    Case drawn(random);
    const PrefillAttention& p = drawn.problem;
    std::vector<double> expected;
    for (u64 token = 0; token < p.tokens; ++token)
        for (u64 head = 0; head < p.num_heads; ++head)
            for (double number : drawn.expected(token, head)) expected.push_back(number);
    for (const PrefillKernel* kernel : kernels())
        for (u64 index = 0; index < linear_kernels().count; ++index) {
            const NamedKernel& linear = linear_kernels().kernels[index];
            std::vector<u16> out = drawn.computed(*kernel, linear.sums);
            for (u64 at = 0; at < out.size(); ++at) {
                double actual = double{float_of(out[at])};
                REQUIRE(std::abs(actual - expected[at]) <= 0.02, "%s: number %llu is %g instead of %g", linear.name,
                        (unsigned long long)at, actual, expected[at]);
            }
        }
}

}  // namespace

int main(int argc, char** argv) {
    Arguments arguments(argc, argv);
    Random random(arguments.seed);
    std::printf("prefill_attention: seed %llu\n", (unsigned long long)arguments.seed);
    for (u64 round = 0; round < (arguments.is_quick ? 20u : 200u); ++round) check(random);
    return 0;
}
