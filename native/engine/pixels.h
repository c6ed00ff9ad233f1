// pixels.h: from decoded frames to the numbers of patches, as torch and transformers compute them, bit by bit.
//
// A frame is [height][width][3] bytes. Resizing is torch's for bytes: sums of bytes times weights of 16 bits, along the
// width and then along the height, each rounded to a byte. Normalization maps a byte of a colour to one number.
//
// The kernel is compiled once per instruction set; paged_attention.h says what that forbids.
#pragma once
#include "paged_attention.h"

namespace penstock::engine {

using i16 = std::int16_t;

constexpr u64 COLOURS = 3;
constexpr u64 LEVELS = 256;
constexpr u64 RESIZE_LANES = 8;

struct Resize {
    bool is_along_width;  // else along the height
    const u8* frames;     // [count][height][width][COLOURS]
    u64 count, height, width;
    u8* out;  // of the same shape, but for `size` of the resized axis
    u64 size;
    const i32* first;       // [size]: of the pixels that a result is made of
    u64 taps;               // number of these pixels
    const i16* weights;     // [size][taps]
    u32 shift;              // weights are multiplied by 1 << shift; at least 1
    u8* scratch = nullptr;  // [width][RESIZE_LANES]: of the kernel
};

using ResizeKernel = void(const Resize& resize);
void compute_resize(Resize resize);  // takes the kernel for this processor, which is one of those below
ResizeKernel resize_portable;
#if defined(__x86_64__)
ResizeKernel resize_avx2;
#endif

struct Patches {
    const u8* frames;  // [count][rows * merge * patch_height][columns * merge * patch_width][COLOURS]
    u64 count;         // the last frame is repeated until the last group is full
    u64 rows, columns;
    u64 merge;  // a square of merge * merge patches is one token
    u64 group;  // frames of a patch
    u64 patch_height, patch_width;
    const float* numbers;  // [COLOURS][LEVELS]
    float* out;            // [groups][rows][columns][merge][merge][COLOURS][group][patch_height][patch_width]
};

void write_patches(const Patches& patches);

}  // namespace penstock::engine
