// pixels.cpp: which kernel of pixels.h resizes, and the writing of patches, which looks numbers up.
#include "pixels.h"

#include <vector>

#include "cpu_features.h"

namespace penstock::engine {

void compute_resize(Resize problem) {
    std::vector<u8> scratch(problem.is_along_width ? problem.width * RESIZE_LANES : 0);
    problem.scratch = scratch.data();
#if defined(__x86_64__)
    if (has_avx2()) return resize_avx2(problem);
#endif
    resize_portable(problem);
}

namespace {

// `stride`: from a colour of `out` to the next one.
void write_row(const u8* pixels, u64 width, const float* numbers, float* out, u64 stride) {
    float *red = out, *green = out + stride, *blue = green + stride;
    for (u64 x = 0; x < width; ++x, pixels += COLOURS) {
        red[x] = numbers[pixels[0]];
        green[x] = numbers[LEVELS + pixels[1]];
        blue[x] = numbers[2 * LEVELS + pixels[2]];
    }
}

// One patch: the same square of each frame of a group.
void write_patch(const Patches& p, u64 first_frame, u64 row, u64 column, float* out) {
    u64 width = p.columns * p.merge * p.patch_width, height = p.rows * p.merge * p.patch_height;
    u64 plane = p.patch_height * p.patch_width;
    for (u64 i = 0; i < p.group; ++i) {
        u64 frame = first_frame + i < p.count ? first_frame + i : p.count - 1;
        const u8* pixels =
            p.frames + ((frame * height + row * p.patch_height) * width + column * p.patch_width) * COLOURS;
        for (u64 y = 0; y < p.patch_height; ++y)
            write_row(pixels + y * width * COLOURS, p.patch_width, p.numbers, out + i * plane + y * p.patch_width,
                      p.group * plane);
    }
}

}  // namespace

// In the order of memory: what is written is large and not read here.
void write_patches(const Patches& p) {
    u64 size = COLOURS * p.group * p.patch_height * p.patch_width, square = p.merge * p.merge;
    float* out = p.out;
    for (u64 frame = 0; frame < p.count; frame += p.group)
        for (u64 token = 0; token < p.rows * p.columns; ++token)
            for (u64 i = 0; i < square; ++i, out += size)
                write_patch(p, frame, token / p.columns * p.merge + i / p.merge,
                            token % p.columns * p.merge + i % p.merge, out);
}

}  // namespace penstock::engine
