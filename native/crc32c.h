// crc32c.h: the CRC-32C of bytes (Castagnoli, RFC 3720 B.4), by the processor's instruction where it has one.
//
// The instruction takes 8 bytes and has a latency of 3 cycles, so three runs of bytes are computed at a time. The three
// results are joined by tables: the CRC of bytes that are followed by n zeros is a linear function of the CRC of the
// bytes.
#pragma once
#include <array>
#include <cstring>

#include "layout.h"

#if defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace penstock::crc32c {

inline constexpr u32 POLYNOMIAL = 0x82f63b78;            // reflected
inline constexpr u64 RUN_NBYTES = 4096;                  // of each of three: shorter packets meet no cold table
using Table = std::array<std::array<u32, 256>, 8>;       // by the byte's index in a word of 8
using ZerosTable = std::array<std::array<u32, 256>, 4>;  // by the byte's index in a CRC

constexpr Table make_table() {
    Table table{};
    for (u32 byte = 0; byte < 256; ++byte) {
        u32 crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? POLYNOMIAL : 0);
        table[0][byte] = crc;
    }
    for (size_t index = 1; index < 8; ++index)
        for (u32 byte = 0; byte < 256; ++byte) {
            u32 before = table[index - 1][byte];
            table[index][byte] = (before >> 8) ^ table[0][before & 0xff];
        }
    return table;
}
inline constexpr Table TABLE = make_table();

// Returns the product of two polynomials modulo POLYNOMIAL. The highest bit is the coefficient of x^0.
constexpr u32 multiply(u32 a, u32 b) {
    u32 product = 0;
    for (u32 bit = 1u << 31; bit != 0; bit >>= 1) {
        if ((a & bit) != 0) product ^= b;
        b = (b >> 1) ^ ((b & 1) != 0 ? POLYNOMIAL : 0);
    }
    return product;
}

constexpr ZerosTable make_zeros_table(u64 nbytes) {
    u32 power = 1u << 31, square = 1u << 30;  // x^0, x^1
    for (u64 bits = nbytes * 8; bits != 0; bits >>= 1) {
        if ((bits & 1) != 0) power = multiply(power, square);
        square = multiply(square, square);
    }
    ZerosTable table{};
    for (u32 index = 0; index < 4; ++index)
        for (u32 byte = 0; byte < 256; ++byte) table[index][byte] = multiply(power, byte << (8 * index));
    return table;
}
inline constexpr ZerosTable ZEROS = make_zeros_table(RUN_NBYTES);

// Returns the CRC of bytes that are followed by RUN_NBYTES zeros, from the CRC of the bytes. Without inversions.
inline u32 add_zeros(u32 crc) {
    return ZEROS[0][crc & 0xff] ^ ZEROS[1][crc >> 8 & 0xff] ^ ZEROS[2][crc >> 16 & 0xff] ^ ZEROS[3][crc >> 24];
}

inline u64 load_word(const u8* at) {
    u64 word;
    std::memcpy(&word, at, sizeof word);
    return word;
}

// ── kernels: from the CRC of the bytes before to that of these as well. Without inversions ──
inline u32 extend_by_table(u32 crc, const u8* at, u64 nbytes) {
    for (; nbytes >= 8; at += 8, nbytes -= 8) {
        u64 word = load_word(at) ^ crc;
        crc = 0;
        for (size_t index = 0; index < 8; ++index) crc ^= TABLE[7 - index][word >> (8 * index) & 0xff];
    }
    for (; nbytes != 0; ++at, --nbytes) crc = (crc >> 8) ^ TABLE[0][(crc ^ *at) & 0xff];
    return crc;
}

#if defined(__x86_64__) || defined(__aarch64__)
#define PENSTOCK_HAS_CRC32C 1
#if defined(__x86_64__)
#define PENSTOCK_CRC32C __attribute__((target("sse4.2")))
PENSTOCK_CRC32C inline u32 step_word(u32 crc, u64 word) { return static_cast<u32>(_mm_crc32_u64(crc, word)); }
PENSTOCK_CRC32C inline u32 step_byte(u32 crc, u8 byte) { return _mm_crc32_u8(crc, byte); }
inline bool has_instruction() { return __builtin_cpu_supports("sse4.2"); }
#else
#define PENSTOCK_CRC32C __attribute__((target("+crc")))
PENSTOCK_CRC32C inline u32 step_word(u32 crc, u64 word) { return __crc32cd(crc, word); }
PENSTOCK_CRC32C inline u32 step_byte(u32 crc, u8 byte) { return __crc32cb(crc, byte); }
inline bool has_instruction() { return (::getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#endif

PENSTOCK_CRC32C inline void extend_by_three(u32& crc, const u8*& at, u64& nbytes) {
    for (; nbytes >= 3 * RUN_NBYTES; at += 3 * RUN_NBYTES, nbytes -= 3 * RUN_NBYTES) {
        u32 second = 0, third = 0;
        for (u64 i = 0; i < RUN_NBYTES; i += 8) {
            crc = step_word(crc, load_word(at + i));
            second = step_word(second, load_word(at + RUN_NBYTES + i));
            third = step_word(third, load_word(at + 2 * RUN_NBYTES + i));
        }
        crc = add_zeros(add_zeros(crc) ^ second) ^ third;
    }
}

PENSTOCK_CRC32C inline u32 extend_by_instruction(u32 crc, const u8* at, u64 nbytes) {
    extend_by_three(crc, at, nbytes);
    for (; nbytes >= 8; at += 8, nbytes -= 8) crc = step_word(crc, load_word(at));
    for (; nbytes != 0; ++at, --nbytes) crc = step_byte(crc, *at);
    return crc;
}
#else
#define PENSTOCK_HAS_CRC32C 0
#endif

// Returns the CRC-32C of the bytes. `crc` is the CRC-32C of the bytes before them.
inline u32 compute(const void* data, u64 nbytes, u32 crc = 0) {
    const u8* at = static_cast<const u8*>(data);
#if PENSTOCK_HAS_CRC32C
    static const bool is_quick = has_instruction();
    if (is_quick) return ~extend_by_instruction(~crc, at, nbytes);
#endif
    return ~extend_by_table(~crc, at, nbytes);
}

}  // namespace penstock::crc32c
