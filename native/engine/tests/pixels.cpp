// pixels.cpp: each kernel of pixels.h that resizes, and patches, against one pixel after the other, with random shapes.
#include "pixels.h"

#include <algorithm>
#include <vector>

#include "cpu_features.h"
#include "tests/testing.h"

using namespace testing;
using namespace penstock::engine;

namespace {

std::vector<u8> random_bytes(Random& random, u64 count) {
    std::vector<u8> bytes(count);
    for (u8& byte : bytes) byte = static_cast<u8>(random.one_in(3) ? 255 * random.below(2) : random.below(256));
    return bytes;
}

void check_resize(Random& random) {
    Resize p{};
    p.is_along_width = random.one_in(2);
    p.count = 1 + random.below(3), p.height = 1 + random.below(30), p.width = 1 + random.below(30);
    p.size = 1 + random.below(40), p.shift = 1 + static_cast<u32>(random.below(22));
    u64 before = p.is_along_width ? p.width : p.height;
    p.taps = 1 + random.below(before);
    std::vector<i32> first(p.size);
    std::vector<i16> weights(p.size * p.taps);
    for (i32& pixel : first) pixel = static_cast<i32>(random.below(before - p.taps + 1));
    for (i16& weight : weights) weight = static_cast<i16>(static_cast<i64>(random.below(1 << 16)) - (1 << 15));
    std::vector<u8> frames = random_bytes(random, p.count * p.height * p.width * COLOURS);
    u64 height = p.is_along_width ? p.height : p.size, width = p.is_along_width ? p.size : p.width;
    std::vector<u8> expected, scratch(p.width * RESIZE_LANES);
    for (u64 frame = 0; frame < p.count; ++frame)
        for (u64 y = 0; y < height; ++y)
            for (u64 x = 0; x < width; ++x)
                for (u64 colour = 0; colour < COLOURS; ++colour) {
                    u64 at = p.is_along_width ? x : y;
                    i32 sum = 1 << (p.shift - 1);
                    for (u64 tap = 0; tap < p.taps; ++tap) {
                        u64 pixel = static_cast<u64>(first[at]) + tap;
                        u64 row = p.is_along_width ? y : pixel, column = p.is_along_width ? pixel : x;
                        u64 index = ((frame * p.height + row) * p.width + column) * COLOURS + colour;
                        sum += frames[index] * weights[at * p.taps + tap];
                    }
                    expected.push_back(static_cast<u8>(std::clamp(sum >> p.shift, 0, 255)));
                }
    p.frames = frames.data(), p.first = first.data(), p.weights = weights.data(), p.scratch = scratch.data();
    std::vector<ResizeKernel*> kernels{resize_portable};
#if defined(__x86_64__)
    if (has_avx2()) kernels.push_back(resize_avx2);
#endif
    for (ResizeKernel* kernel : kernels) {
        std::vector<u8> out(expected.size(), 0x77);
        p.out = out.data();
        kernel(p);
        REQUIRE(out == expected, "%llu x %llu to %llu", (unsigned long long)p.height, (unsigned long long)p.width,
                (unsigned long long)p.size);
    }
}

void check_patches(Random& random) {
    Patches p{};
    p.count = 1 + random.below(5), p.rows = 1 + random.below(3), p.columns = 1 + random.below(3);
    p.merge = 1 + random.below(3), p.group = 1 + random.below(3);
    p.patch_height = 1 + random.below(6), p.patch_width = 1 + random.below(6);
    u64 height = p.rows * p.merge * p.patch_height, width = p.columns * p.merge * p.patch_width;
    std::vector<u8> frames = random_bytes(random, p.count * height * width * COLOURS);
    std::vector<float> numbers(COLOURS * LEVELS);
    for (float& number : numbers) number = static_cast<float>(random.below(1 << 20));
    u64 groups = (p.count + p.group - 1) / p.group;
    std::vector<float> out(groups * p.group * height * width * COLOURS);
    p.frames = frames.data(), p.numbers = numbers.data(), p.out = out.data();
    write_patches(p);
    auto next = out.begin();
    for (u64 group = 0; group < groups; ++group)
        for (u64 row = 0; row < p.rows * p.merge; row += p.merge)
            for (u64 column = 0; column < p.columns * p.merge; column += p.merge)
                for (u64 i = 0; i < p.merge * p.merge; ++i)
                    for (u64 colour = 0; colour < COLOURS; ++colour)
                        for (u64 frame = group * p.group; frame < (group + 1) * p.group; ++frame)
                            for (u64 pixel = 0; pixel < p.patch_height * p.patch_width; ++pixel) {
                                u64 y = (row + i / p.merge) * p.patch_height + pixel / p.patch_width;
                                u64 x = (column + i % p.merge) * p.patch_width + pixel % p.patch_width;
                                u64 index = (std::min(frame, p.count - 1) * height + y) * width + x;
                                u8 level = frames[index * COLOURS + colour];
                                REQUIRE(*next++ == numbers[colour * LEVELS + level], "another number");
                            }
}

}  // namespace

int main(int argc, char** argv) {
    Arguments arguments(argc, argv);
    Random random(arguments.seed);
    std::printf("pixels: seed %llu\n", (unsigned long long)arguments.seed);
    for (u64 round = 0; round < (arguments.is_quick ? 100u : 1000u); ++round)
        check_resize(random), check_patches(random);
    return 0;
}
