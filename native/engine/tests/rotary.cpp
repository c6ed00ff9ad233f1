// rotary.cpp: each kernel of rotary.h against norms and rotations in doubles, with random shapes and strides.
#include "rotary.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "cpu_features.h"
#include "engine/tests/bfloat16.h"
#include "tests/testing.h"

using namespace testing;
using namespace penstock::engine;

namespace {

// Random numbers that bfloat16 has exactly, in both dtypes.
struct Numbers {
    std::vector<float> floats;
    std::vector<u16> bits;
    Numbers(Random& random, u64 count) {
        for (u64 i = 0; i < count; ++i) {
            bits.push_back(bits_of(static_cast<float>(random.below(2001)) / 500.0f - 2.0f));
            floats.push_back(float_of(bits.back()));
        }
    }
    const void* of(DType dtype) const {
        return dtype == DType::float32 ? static_cast<const void*>(floats.data()) : bits.data();
    }
};

double number_at(const std::vector<u8>& memory, DType dtype, u64 index) {
    if (dtype == DType::bfloat16) {
        u16 bits;
        std::memcpy(&bits, memory.data() + index * sizeof bits, sizeof bits);
        return double{float_of(bits)};
    }
    float number;
    std::memcpy(&number, memory.data() + index * sizeof number, sizeof number);
    return double{number};
}

std::vector<double> rotated(const Rotary& p, const Numbers& numbers, const Rotary::Heads& heads, const Numbers& norm,
                            const Numbers& cos, const Numbers& sin, u64 token, u64 head) {
    std::vector<double> x, out;
    double squares = 0;
    for (u64 i = 0; i < p.size; ++i)
        x.push_back(double{numbers.floats[token * static_cast<u64>(heads.stride) + head * p.size + i]});
    for (double number : x) squares += number * number;
    if (heads.norm != nullptr)
        for (u64 i = 0; i < p.size; ++i)
            x[i] *= (double{norm.floats[i]} + (p.adds_one ? 1.0 : 0.0)) /
                    std::sqrt(squares / static_cast<double>(p.size) + double{p.epsilon});
    for (u64 i = 0; i < p.size; ++i) {
        double other = i < p.size / 2 ? -x[i + p.size / 2] : x[i - p.size / 2];
        out.push_back(x[i] * double{cos.floats[token * p.size + i]} + other * double{sin.floats[token * p.size + i]});
    }
    return out;
}

void check(Random& random) {
    const u64 sizes[] = {2, 6, 16, 40, 64, 128, 512}, places = 20;
    Rotary p{};
    p.dtype = random.one_in(2) ? DType::bfloat16 : DType::float32, p.size = random.of(sizes);
    p.tokens = 1 + random.below(8), p.value_size = 1 + random.below(70);
    p.epsilon = 1e-6f, p.adds_one = random.one_in(2);
    u64 kv_heads = 1 + random.below(3), heads = kv_heads * (1 + random.below(3)), spare = random.below(5);
    u64 strides[] = {heads * p.size + spare, kv_heads * p.size + spare, kv_heads * p.value_size + spare};
    Numbers queries(random, p.tokens * strides[0]), keys(random, p.tokens * strides[1]);
    Numbers values(random, p.tokens * strides[2]), cos(random, p.tokens * p.size), sin(random, p.tokens * p.size);
    Numbers query_norm(random, p.size), key_norm(random, p.size);
    bool has_norms = random.one_in(2);
    p.queries = {queries.of(p.dtype), static_cast<i64>(strides[0]), has_norms ? query_norm.of(p.dtype) : nullptr,
                 heads};
    p.keys = {keys.of(p.dtype), static_cast<i64>(strides[1]), has_norms ? key_norm.of(p.dtype) : nullptr, kv_heads};
    p.values = {values.of(p.dtype), static_cast<i64>(strides[2]), nullptr, kv_heads};
    p.cos = cos.of(p.dtype), p.sin = sin.of(p.dtype);
    std::vector<i64> where;
    for (u64 token = 0; token < p.tokens; ++token) where.push_back(static_cast<i64>((token * 7 + 3) % places));
    p.places = where.data();
    u64 nbytes = p.dtype == DType::float32 ? 4 : 2;
    std::vector<RotaryKernel*> kernels{rotary_portable};
#if defined(__x86_64__)
    if (has_avx2()) kernels.push_back(rotary_avx2);
#if defined(PENSTOCK_COMPILES_BF16)
    if (has_avx512_bf16()) kernels.push_back(rotary_avx512_bf16);
#endif
#endif
    for (RotaryKernel* kernel : kernels) {
        std::vector<u8> out(p.tokens * heads * p.size * nbytes), cached_keys(places * kv_heads * p.size * nbytes, 0x77);
        std::vector<u8> cached_values(places * kv_heads * p.value_size * nbytes, 0x77);
        p.out = out.data(), p.cached_keys = cached_keys.data(), p.cached_values = cached_values.data();
        kernel(p, 0, p.tokens);
        auto compare = [&](double actual, double expected) {
            double limit = p.dtype == DType::float32 ? 1e-5 : 0.02;
            REQUIRE(std::abs(actual - expected) <= limit * (4.0 + std::abs(expected)), "%g instead of %g", actual,
                    expected);
        };
        for (u64 token = 0; token < p.tokens; ++token) {
            u64 place = static_cast<u64>(where[token]);
            for (u64 head = 0; head < heads; ++head) {
                std::vector<double> expected = rotated(p, queries, p.queries, query_norm, cos, sin, token, head);
                for (u64 i = 0; i < p.size; ++i)
                    compare(number_at(out, p.dtype, (token * heads + head) * p.size + i), expected[i]);
            }
            for (u64 head = 0; head < kv_heads; ++head) {
                std::vector<double> expected = rotated(p, keys, p.keys, key_norm, cos, sin, token, head);
                for (u64 i = 0; i < p.size; ++i)
                    compare(number_at(cached_keys, p.dtype, (place * kv_heads + head) * p.size + i), expected[i]);
            }
            for (u64 i = 0; i < kv_heads * p.value_size; ++i)
                REQUIRE(number_at(cached_values, p.dtype, place * kv_heads * p.value_size + i) ==
                            double{values.floats[token * strides[2] + i]},
                        "a value changed");
        }
        u64 untouched = 2;  // a place of no token
        for (i64 place : where) REQUIRE(static_cast<u64>(place) != untouched, "the test is wrong");
        for (u64 i = 0; i < kv_heads * p.size * nbytes; ++i)
            REQUIRE(cached_keys[untouched * kv_heads * p.size * nbytes + i] == 0x77,
                    "the kernel wrote to another place");
    }
}

}  // namespace

int main(int argc, char** argv) {
    Arguments arguments(argc, argv);
    Random random(arguments.seed);
    std::printf("rotary: seed %llu\n", (unsigned long long)arguments.seed);
    for (u64 round = 0; round < (arguments.is_quick ? 100u : 1000u); ++round) check(random);
    return 0;
}
