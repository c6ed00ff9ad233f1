// resize_impl.h: the kernel of pixels.h that resizes. Included by one .cpp per instruction set, which defines
// PENSTOCK_KERNEL, the function's name, and PENSTOCK_LANES, the numbers of 32 bits in a vector register. Calls only
// built-in functions, and those that are always inlined.
#include "pixels.h"

#if PENSTOCK_LANES == 8
#include <immintrin.h>
#endif

namespace penstock::engine {
namespace {

constexpr u64 LANES = PENSTOCK_LANES;
constexpr u64 ROWS = LANES / 4;  // resized at a time along the width: each has four lanes, of which three are colours
constexpr u64 VECTORS = 4;       // of a row that are resized at a time along the height

using Sums = i32 __attribute__((vector_size(4 * LANES)));

inline Sums half(const Resize& problem) { return Sums{} + (1 << (problem.shift - 1)); }

// GCC 12 converts these vectors element by element where the source does not name the instruction.
#if PENSTOCK_LANES == 8
inline Sums load(const u8* from) {
    return (Sums)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}

inline void store(u8* to, Sums sums, u32 shift) {
    auto levels = (__m256i)(sums >> static_cast<i32>(shift));
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(levels), _mm256_extracti128_si256(levels, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(words, words));
}
#else
inline Sums load(const u8* from) {
    Sums levels;
    for (u64 lane = 0; lane < LANES; ++lane) levels[lane] = from[lane];
    return levels;
}

inline void store(u8* to, Sums sums, u32 shift) {
    for (u64 lane = 0; lane < LANES; ++lane) {
        i32 level = sums[lane] >> shift;
        to[lane] = static_cast<u8>(level < 0 ? 0 : level > 255 ? 255 : level);
    }
}
#endif

// Copies a pixel with the byte after it, which a later pixel replaces or no lane of a colour reads.
inline void copy_pixel(u8* to, const u8* from, bool is_last) { __builtin_memcpy(to, from, is_last ? COLOURS : 4); }

// Some rows, interleaved: the same pixel of each row in one vector.
inline void interleave(u8* to, const u8* const* rows, u64 width) {
    for (u64 row = 0; row < ROWS; ++row) {
        for (u64 x = 0; x + 1 < width; ++x) copy_pixel(to + x * LANES + row * 4, rows[row] + x * COLOURS, false);
        copy_pixel(to + (width - 1) * LANES + row * 4, rows[row] + (width - 1) * COLOURS, true);
    }
}

inline void resize_widths(const Resize& problem, u8* const* outs, u64 live) {
    for (u64 x = 0; x < problem.size; ++x) {
        const u8* pixels = problem.scratch + static_cast<u64>(problem.first[x]) * LANES;
        const i16* weights = problem.weights + x * problem.taps;
        Sums sums = half(problem);
        for (u64 tap = 0; tap < problem.taps; ++tap)
            sums += load(pixels + tap * LANES) * static_cast<i32>(weights[tap]);
        u8 bytes[LANES];
        store(bytes, sums, problem.shift);
        for (u64 row = 0; row < live; ++row)
            copy_pixel(outs[row] + x * COLOURS, bytes + row * 4, x + 1 == problem.size);
    }
}

inline void along_width(const Resize& problem) {
    u64 total = problem.count * problem.height;
    for (u64 row = 0; row < total; row += ROWS) {
        const u8* rows[ROWS];
        u8* outs[ROWS];
        u64 live = total - row < ROWS ? total - row : ROWS;
        for (u64 i = 0; i < ROWS; ++i) {
            u64 at = row + (i < live ? i : live - 1);
            rows[i] = problem.frames + at * problem.width * COLOURS;
            outs[i] = problem.out + at * problem.size * COLOURS;
        }
        interleave(problem.scratch, rows, problem.width);
        resize_widths(problem, outs, live);
    }
}

// Sums `COUNT` vectors of a row.
template <u64 COUNT>
inline void resize_heights(const Resize& problem, const u8* from, u64 row_size, const i16* weights, u8* to) {
    Sums sums[COUNT];
    for (u64 i = 0; i < COUNT; ++i) sums[i] = half(problem);
    for (u64 tap = 0; tap < problem.taps; ++tap)
        for (u64 i = 0; i < COUNT; ++i)
            sums[i] += load(from + tap * row_size + i * LANES) * static_cast<i32>(weights[tap]);
    for (u64 i = 0; i < COUNT; ++i) store(to + i * LANES, sums[i], problem.shift);
}

inline void resize_height(const Resize& problem, const u8* from, u64 row_size, const i16* weights, u8* to) {
    i32 sum = 1 << (problem.shift - 1);
    for (u64 tap = 0; tap < problem.taps; ++tap) sum += from[tap * row_size] * weights[tap];
    sum >>= problem.shift;
    *to = static_cast<u8>(sum < 0 ? 0 : sum > 255 ? 255 : sum);
}

inline void along_height(const Resize& problem) {
    u64 row_size = problem.width * COLOURS;
    for (u64 frame = 0; frame < problem.count; ++frame)
        for (u64 y = 0; y < problem.size; ++y) {
            const u8* from = problem.frames + (frame * problem.height + static_cast<u64>(problem.first[y])) * row_size;
            u8* to = problem.out + (frame * problem.size + y) * row_size;
            const i16* weights = problem.weights + y * problem.taps;
            u64 at = 0;
            for (; at + VECTORS * LANES <= row_size; at += VECTORS * LANES)
                resize_heights<VECTORS>(problem, from + at, row_size, weights, to + at);
            for (; at + LANES <= row_size; at += LANES)
                resize_heights<1>(problem, from + at, row_size, weights, to + at);
            for (; at < row_size; ++at) resize_height(problem, from + at, row_size, weights, to + at);
        }
}

}  // namespace

void PENSTOCK_KERNEL(const Resize& problem) {
    if (problem.is_along_width) return along_width(problem);
    along_height(problem);
}

}  // namespace penstock::engine
