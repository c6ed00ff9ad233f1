// packed_linear.cpp: each kernel of this processor against products in doubles, with random shapes; and that a row's
// bits depend neither on the number of rows nor on the division into chunks and threads.
#include "packed_linear.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "engine/tests/bfloat16.h"
#include "tests/testing.h"
#include "thread_team.h"

using namespace testing;
using namespace penstock::engine;

namespace {

constexpr u64 PANEL = PackedLinear::PANEL;

std::vector<u16> numbers(Random& random, u64 count) {
    std::vector<u16> out(count);
    for (u16& number : out) number = bits_of(static_cast<float>(random.below(2001)) / 1000.0f - 1.0f);
    return out;
}

double activated(const PackedLinear& linear, double gate) {
    if (!linear.is_gelu) return gate / (1.0 + std::exp(-gate));
    return gate / 2 * (1.0 + std::tanh(std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate)));
}

struct Case {
    PackedLinear linear{};
    u64 rows;
    std::vector<u16> x, w, weights, tiles;
    std::vector<float> bias;

    explicit Case(Random& random) {
        linear.inputs = 1 + random.below(200), linear.is_gated = random.one_in(3), linear.is_gelu = random.one_in(2);
        linear.outputs = linear.is_gated ? 32 * (1 + random.below(6)) : 1 + random.below(200);
        rows = 1 + random.below(random.one_in(3) ? 80 : 20);
        if (random.one_in(10))  // more inputs and rows than a kernel keeps in the caches
            linear.inputs += 500, rows += PackedLinear::MAX_ROWS, linear.outputs = 32 * (1 + random.below(2));
        x = numbers(random, rows * linear.inputs), w = numbers(random, linear.outputs * linear.inputs);
        weights.resize(linear.size());
        if (linear.is_gated) {
            u64 half = linear.outputs / 2;
            pack_weights(linear, weights.data(), w.data(), half, 0, 2);
            pack_weights(linear, weights.data(), w.data() + half * linear.inputs, half, 1, 2);
        } else {
            pack_weights(linear, weights.data(), w.data(), linear.outputs, 0, 1);
        }
        linear.weights = weights.data();
        if (!linear.is_gated && random.one_in(2)) {
            for (u64 output = 0; output < linear.panels() * PANEL; ++output)
                bias.push_back(static_cast<float>(random.below(100)) / 50.0f);
            linear.bias = bias.data();
        }
        pack(x);
    }

    void pack(const std::vector<u16>& of) {
        u64 row_tiles = PackedLinear::divide_up(rows, PackedLinear::TILE_ROWS);
        tiles.assign(row_tiles * linear.panel_size(), 0xffff);  // NaN wherever pack_rows writes nothing
        for (u64 tile = 0; tile < row_tiles; ++tile) {
            u64 first = tile * PackedLinear::TILE_ROWS;
            pack_rows(of.data() + first * linear.inputs, linear.inputs, std::min(rows - first, PackedLinear::TILE_ROWS),
                      linear.inputs, tiles.data() + tile * linear.panel_size());
        }
    }

    double sum(u64 row, u64 output) const {
        double out = bias.empty() ? 0.0 : double{bias[output]};
        for (u64 input = 0; input < linear.inputs; ++input)
            out +=
                double{float_of(x[row * linear.inputs + input])} * double{float_of(w[output * linear.inputs + input])};
        return out;
    }
    double expected(u64 row, u64 result) const {
        if (!linear.is_gated) return sum(row, result);
        return activated(linear, sum(row, result)) * sum(row, linear.outputs / 2 + result);
    }

    std::vector<u16> computed(LinearKernel* kernel, u64 chunk, u64 threads) const {
        std::vector<u16> out(rows * linear.results() + 1, 0x7777);
        u64 chunks = PackedLinear::divide_up(linear.panels(), chunk);
        ThreadTeam::get().run(threads, chunks, [&](u64 number) {
            u64 first = number * chunk, last = std::min(first + chunk, linear.panels());
            kernel(linear, tiles.data(), rows, first, last, out.data(), linear.results(), {});
        });
        REQUIRE(out.back() == 0x7777, "the kernel wrote beyond the last result");
        out.pop_back();
        return out;
    }
};

void check_against_doubles(Random& random) {
    Case drawn(random);
    for (u64 index = 0; index < linear_kernels().count; ++index) {
        LinearKernel* kernel = linear_kernels().kernels[index].kernel;
        std::vector<u16> out = drawn.computed(kernel, PackedLinear::MAX_PANELS, 1);
        for (u64 row = 0; row < drawn.rows; ++row)
            for (u64 result = 0; result < drawn.linear.results(); ++result) {
                double expected = drawn.expected(row, result);
                double actual = double{float_of(out[row * drawn.linear.results() + result])};
                REQUIRE(std::abs(actual - expected) <= 0.005 * (1.0 + std::abs(expected)), "%s: %g instead of %g",
                        linear_kernels().kernels[index].name, actual, expected);
            }
        REQUIRE(drawn.computed(kernel, 2 * (1 + random.below(8)), 1) == out, "chunks change bits");
        REQUIRE(drawn.computed(kernel, 2, 1 + random.below(4)) == out, "threads change bits");
    }
}

void check_rows_alone(Random& random) {
    Case drawn(random);
    std::vector<u16> all[5];
    for (u64 index = 0; index < linear_kernels().count; ++index)
        all[index] = drawn.computed(linear_kernels().kernels[index].kernel, 4, 1);
    u64 row = random.below(drawn.rows), width = drawn.linear.results();
    drawn.rows = 1;
    drawn.pack({drawn.x.begin() + static_cast<i64>(row * drawn.linear.inputs), drawn.x.end()});
    for (u64 index = 0; index < linear_kernels().count; ++index) {
        std::vector<u16> alone = drawn.computed(linear_kernels().kernels[index].kernel, 4, 1);
        REQUIRE(std::equal(alone.begin(), alone.end(), all[index].begin() + static_cast<i64>(row * width)),
                "%s: other rows change bits", linear_kernels().kernels[index].name);
    }
}

void check_extremes() {
    PackedLinear linear{};
    linear.inputs = 1, linear.outputs = 3;
    std::vector<u16> weights(linear.size()), tiles(linear.panel_size()), out(3);
    const u16 bits_of_one = bits_of(1.0f), w[3] = {bits_of_one, bits_of(-2.0f), 0};
    pack_weights(linear, weights.data(), w, 3, 0, 1);
    linear.weights = weights.data();
    for (float value : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN(), 3.0e38f}) {
        u16 x = bits_of(value);
        pack_rows(&x, 1, 1, 1, tiles.data());
        for (u64 index = 0; index < linear_kernels().count; ++index) {
            linear_kernels().kernels[index].kernel(linear, tiles.data(), 1, 0, 1, out.data(), 3, {});
            float expected = float_of(x), actual = float_of(out[0]);
            const char* name = linear_kernels().kernels[index].name;
            REQUIRE(std::isnan(expected) ? std::isnan(actual) : actual == expected, "%s: %g", name, double{actual});
        }
    }
}

// Each kernel in float32 against sums in doubles, and the bits of the last row alone.
void check_float32(Random& random) {
    PackedLinear linear{};
    linear.inputs = 1 + random.below(200), linear.dtype = DType::float32, linear.is_gated = random.one_in(3);
    linear.is_gelu = random.one_in(2);
    linear.outputs = linear.is_gated ? 32 * (1 + random.below(4)) : 1 + random.below(150);
    u64 rows = 1 + random.below(40), results = linear.results(), stride = results + random.below(3);
    auto draw = [&](u64 count) {
        std::vector<float> out(count);
        for (float& number : out) number = static_cast<float>(random.below(2001)) / 1000.0f - 1.0f;
        return out;
    };
    std::vector<float> x = draw(rows * linear.inputs), w = draw(linear.outputs * linear.inputs);
    std::vector<u16> weights(linear.size());
    u64 parts = linear.is_gated ? 2 : 1, outputs = linear.outputs / parts;
    for (u64 part = 0; part < parts; ++part) {
        std::vector<u16> halves(outputs * linear.halves());
        std::memcpy(halves.data(), w.data() + part * outputs * linear.inputs, halves.size() * sizeof(u16));
        pack_weights(linear, weights.data(), halves.data(), outputs, part, parts);
    }
    linear.weights = weights.data();
    auto sum = [&](u64 row, u64 output) {
        double out = 0.0;
        for (u64 i = 0; i < linear.inputs; ++i)
            out += double{x[row * linear.inputs + i]} * double{w[output * linear.inputs + i]};
        return out;
    };
    for (u64 index = 0; index < linear_kernels().count; ++index) {
        const char* name = linear_kernels().kernels[index].name;
        REQUIRE(choose_linear_kernel(name), "no kernel %s", name);
        std::vector<float> out(rows * stride + 1, 7.0f), alone(results);
        compute_linear(linear, x.data(), linear.inputs, rows, out.data(), stride, 1 + random.below(3));
        compute_linear(linear, x.data() + (rows - 1) * linear.inputs, linear.inputs, 1, alone.data(), results, 1);
        REQUIRE(std::equal(alone.begin(), alone.end(), out.begin() + static_cast<i64>((rows - 1) * stride)),
                "%s: other rows change bits", name);
        for (u64 row = 0; row < rows; ++row) {
            for (u64 result = 0; result < results; ++result) {
                double gate = sum(row, result), expected = gate;
                if (linear.is_gated) expected = activated(linear, gate) * sum(row, outputs + result);
                double actual = double{out[row * stride + result]};
                REQUIRE(std::abs(actual - expected) <= 1e-4 * (1.0 + std::abs(expected)), "%s: %g instead of %g", name,
                        actual, expected);
            }
            REQUIRE(stride == results || out[row * stride + results] == 7.0f, "%s wrote beyond a row", name);
        }
        REQUIRE(out.back() == 7.0f, "%s wrote beyond the last result", name);
    }
    choose_linear_kernel(linear_kernels().kernels[0].name);
}

// The float32 of -gate overflows in the exponential.
void check_gate_far_below_zero(bool is_gelu) {
    PackedLinear linear{};
    linear.is_gelu = is_gelu, linear.inputs = 1, linear.outputs = 2 * PANEL, linear.is_gated = true;
    std::vector<u16> weights(linear.size()), tiles(linear.panel_size()), out(PANEL);
    const std::vector<u16> w(PANEL, bits_of(1.0f));
    pack_weights(linear, weights.data(), w.data(), PANEL, 0, 2);
    pack_weights(linear, weights.data(), w.data(), PANEL, 1, 2);
    linear.weights = weights.data();
    for (float value : {-88.0f, -1.0e10f, -3.0e38f}) {
        u16 x = bits_of(value);
        pack_rows(&x, 1, 1, 1, tiles.data());
        for (u64 index = 0; index < linear_kernels().count; ++index) {
            linear_kernels().kernels[index].kernel(linear, tiles.data(), 1, 0, 2, out.data(), PANEL, {});
            REQUIRE(float_of(out[0]) == 0.0f, "%s: %g", linear_kernels().kernels[index].name, double{float_of(out[0])});
        }
    }
}

// A child has neither the helpers of its parent nor the thread that held a lock of the team.
void check_forked_child(Random& random) {
// TSan refuses threads in a child of a process with threads. A child inherits the locks of ASan's allocator that
// another thread holds at the fork, and waits for ever.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
    std::atomic<bool> is_over{false};
    std::thread computes([&] {
        while (!is_over.load()) ThreadTeam::get().run(2, 64, [](u64) {});
    });
    for (u64 round = 0; round < 50; ++round) {
        std::this_thread::sleep_for(std::chrono::microseconds(random.below(300)));
        pid_t child = ::fork();
        if (child == 0) {
            ::alarm(20);
            std::atomic<bool> has_met{false};
            std::thread::id caller = std::this_thread::get_id();
            ThreadTeam::get().run(2, 2, [&](u64) {
                if (std::this_thread::get_id() != caller) has_met.store(true);
                while (!has_met.load()) ::sched_yield();
            });
            ::_exit(0);
        }
        int status = 0;
        REQUIRE(child > 0 && ::waitpid(child, &status, 0) == child, "no child");
        REQUIRE(status == 0, "a forked child ended with status %d", status);
    }
    is_over.store(true);
    computes.join();
#else
    (void)random;
#endif
}

void check_team(Random& random) {
    for (u64 job = 0; job < 2000; ++job) {
        u64 chunks = 1 + random.below(50), threads = 1 + random.below(4);
        std::vector<std::atomic<u32>> computed(chunks);
        ThreadTeam::get().run(threads, chunks, [&](u64 chunk) { computed[chunk].fetch_add(1); });
        for (auto& times : computed) REQUIRE(times.load() == 1, "a chunk ran %u times", times.load());
        if (random.one_in(50)) std::this_thread::sleep_for(std::chrono::microseconds(random.below(400)));
    }
}

}  // namespace

int main(int argc, char** argv) {
    Arguments arguments(argc, argv);
    Random random(arguments.seed);
    std::printf("packed_linear: seed %llu\n", (unsigned long long)arguments.seed);
    for (u64 index = 0; index < linear_kernels().count; ++index)
        std::printf("%s\n", linear_kernels().kernels[index].name);
    for (u64 round = 0; round < (arguments.is_quick ? 40u : 400u); ++round) {
        check_against_doubles(random);
        check_rows_alone(random);
        check_float32(random);
    }
    check_extremes();
    for (bool is_gelu : {false, true}) check_gate_far_below_zero(is_gelu);
    check_team(random);
    check_forked_child(random);
    return 0;
}
