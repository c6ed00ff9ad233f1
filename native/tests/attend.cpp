// attend.cpp: attention over blocks, beside the same in doubles, one number after the other; on every kind of processor
// that this one can be.
#include "attend.h"

#include <algorithm>
#include <cmath>

#include "testing.h"

using namespace testing;

namespace {

float number(Random& random) { return static_cast<float>(random.below(2001)) / 500.0f - 2.0f; }
u16 bits_of(float value) {
    u32 bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<u16>(bits >> 16);
}
float float_of(u16 bits) {
    u32 wide = u32{bits} << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

struct Case {
    Attending asked{};
    std::vector<float> queries, keys, values, sinks;
    std::vector<u16> short_queries, short_keys, short_values;
    std::vector<i32> table;
    std::vector<i64> firsts, lengths;
    u64 blocks;

    explicit Case(Random& random) {
        const u64 sizes[] = {1, 3, 8, 13, 16, 32, 40, 64, 128};
        asked.rows = 1 + random.below(4), asked.groups = 1 + random.below(3);
        asked.heads = asked.groups * (1 + random.below(4));
        asked.key_size = random.of(sizes), asked.value_size = random.one_in(3) ? random.of(sizes) : asked.key_size;
        asked.block_size = 1 + random.below(20), asked.width = 1 + random.below(20);
        asked.number = random.one_in(3) ? Number::bfloat16 : Number::float32;
        asked.scale = 0.3f, asked.cap = random.one_in(3) ? 2.5f : 0.0f;
        blocks = asked.rows * asked.width;
        for (u64 block = 0; block < blocks; ++block) table.push_back(static_cast<i32>(block));
        for (u64 at = blocks; at > 1; --at) std::swap(table[at - 1], table[random.below(at)]);
        for (u64 row = 0; row < asked.rows; ++row) {
            lengths.push_back(static_cast<i64>(1 + random.below(asked.width * asked.block_size)));
            firsts.push_back(random.one_in(2) ? 0 : static_cast<i64>(random.below(static_cast<u64>(lengths.back()))));
        }
        fill(random, queries, short_queries, asked.rows * asked.heads * asked.key_size);
        fill(random, keys, short_keys, blocks * asked.block_size * asked.groups * asked.key_size);
        fill(random, values, short_values, blocks * asked.block_size * asked.groups * asked.value_size);
        bool is_short = asked.number == Number::bfloat16;
        asked.queries = is_short ? static_cast<void*>(short_queries.data()) : queries.data();
        asked.keys = is_short ? static_cast<void*>(short_keys.data()) : keys.data();
        asked.values = is_short ? static_cast<void*>(short_values.data()) : values.data();
        asked.query_head = static_cast<i64>(asked.key_size);
        asked.query_row = static_cast<i64>(asked.heads * asked.key_size);
        asked.table = table.data(), asked.firsts = firsts.data(), asked.lengths = lengths.data();
        if (random.one_in(3)) {
            for (u64 head = 0; head < asked.heads; ++head) sinks.push_back(number(random));
            asked.sinks = sinks.data();
        }
    }
    static void fill(Random& random, std::vector<float>& out, std::vector<u16>& bits, u64 count) {
        for (u64 i = 0; i < count; ++i) {
            bits.push_back(bits_of(number(random)));
            out.push_back(float_of(bits.back()));  // so that both are the same numbers
        }
    }
    double value(u64 row, u64 head, u64 which) const {
        std::vector<double> scores;
        u64 group = head / asked.shared();
        auto place = [&](i64 position) {
            u64 at = static_cast<u64>(position);
            return static_cast<u64>(table[row * asked.width + at / asked.block_size]) * asked.block_size +
                   at % asked.block_size;
        };
        for (i64 position = firsts[row]; position < lengths[row]; ++position) {
            double score = 0;
            for (u64 k = 0; k < asked.key_size; ++k)
                score += double{queries[(row * asked.heads + head) * asked.key_size + k]} *
                         double{keys[(place(position) * asked.groups + group) * asked.key_size + k]};
            score *= double{asked.scale};
            scores.push_back(asked.cap != 0.0f ? std::tanh(score / double{asked.cap}) * double{asked.cap} : score);
        }
        double most = *std::max_element(scores.begin(), scores.end()), weight = 0, sum = 0;
        if (!sinks.empty()) weight = std::exp(double{sinks[head]} - most);
        for (u64 i = 0; i < scores.size(); ++i) {
            double share = std::exp(scores[i] - most);
            weight += share;
            u64 at = place(firsts[row] + static_cast<i64>(i)) * asked.groups + group;
            sum += share * double{values[at * asked.value_size + which]};
        }
        return sum / weight;
    }
};

using Attend = void (*)(const Attending&, u64, u64, float*);

void compare(const Case& one, const char* name, Attend attend) {
    Attending asked = one.asked;
    u64 count = asked.rows * asked.heads * asked.value_size, pairs = asked.rows * asked.groups;
    bool is_short = asked.number == Number::bfloat16;
    std::vector<float> out(count), scratch(asked.scratch()), again(count);
    std::vector<u16> short_out(count);
    for (u64 parts : {u64{1}, u64{3}}) {
        asked.out = is_short ? static_cast<void*>(short_out.data()) : out.data();
        REQUIRE(first_pair(asked, 0, parts) == 0 && first_pair(asked, parts, parts) == pairs, "parts are all of it");
        for (u64 part = 0; part < parts; ++part)
            attend(asked, first_pair(asked, part, parts), first_pair(asked, part + 1, parts), scratch.data());
        if (is_short) std::transform(short_out.begin(), short_out.end(), out.begin(), float_of);
        if (parts == 1) again = out;
    }
    REQUIRE(again == out, "in parts, another outcome: %s", name);
    double most = is_short ? 2e-2 : 2e-5;
    for (u64 at = 0; at < count; ++at) {
        u64 row = at / (asked.heads * asked.value_size), head = at / asked.value_size % asked.heads;
        double wanted = one.value(row, head, at % asked.value_size);
        REQUIRE(std::fabs(wanted - double{out[at]}) <= most, "%s: row %llu head %llu: %g instead of %g", name,
                (unsigned long long)row, (unsigned long long)head, double{out[at]}, wanted);
    }
}

// What is no number stays none: a sampler that sees it fails the request.
void keeps_what_is_no_number(const Case& one, const char* name, Attend attend) {
    if (one.asked.number != Number::float32) return;
    Case other = one;
    Attending asked = other.asked;
    u64 count = asked.rows * asked.heads * asked.value_size;
    std::vector<float> out(count), scratch(asked.scratch());
    std::fill(other.keys.begin(), other.keys.end(), NAN);
    asked.queries = other.queries.data(), asked.keys = other.keys.data(), asked.values = other.values.data();
    asked.table = other.table.data(), asked.firsts = other.firsts.data(), asked.lengths = other.lengths.data();
    asked.sinks = other.sinks.empty() ? nullptr : other.sinks.data();
    asked.out = out.data();
    attend(asked, 0, asked.rows * asked.groups, scratch.data());
    for (float each : out) REQUIRE(std::isnan(each), "%s: %g, of keys that are no numbers", name, double{each});
}

}  // namespace

int main(int argc, char** argv) {
    Arguments arguments(argc, argv);
    u64 rounds = arguments.is_quick ? 60 : 1500;
    std::printf("attend: seed %llu\n", (unsigned long long)arguments.seed);
    for (u64 round = 0; round < rounds; ++round) {
        Random random(arguments.seed + round);
        Case one(random);
        compare(one, "plain", attend_plainly);
        keeps_what_is_no_number(one, "plain", attend_plainly);
#if defined(__x86_64__)
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
            compare(one, "AVX2", attend_with_avx2);
            keeps_what_is_no_number(one, "AVX2", attend_with_avx2);
        }
#endif
    }
    std::printf("attend: %llu cases\n", (unsigned long long)rounds);
    return 0;
}
