// sha256.h: SHA-256 (FIPS 180-4), of one short piece of bytes after the other: what hashlib does, without a call of
// Python for each. By the processor's own instructions where it has them.
#pragma once
#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

namespace penstock::engine {

using Digest = std::array<std::uint8_t, 32>;

#ifdef __x86_64__
inline bool has_sha_instructions() {
    static const bool has = [] {
        unsigned a = 0, b = 0, c = 0, d = 0;
        return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b >> 29 & 1) != 0;
    }();
    return has;
}
#else
inline bool has_sha_instructions() { return false; }
#endif

class Sha256 {
   public:
    explicit Sha256(bool is_portable = !has_sha_instructions()) : is_portable_(is_portable) {}
    void add(const void* bytes, std::size_t nbytes) {
        const auto* from = static_cast<const std::uint8_t*>(bytes);
        total_ += nbytes;
        while (nbytes != 0) {
            std::size_t part = std::min(nbytes, BLOCK - filled_);
            std::memcpy(block_.data() + filled_, from, part);
            from += part, nbytes -= part, filled_ += part;
            if (filled_ == BLOCK) compress();
        }
    }
    Digest digest() {
        std::uint64_t bits = total_ * 8;
        block_[filled_++] = 0x80;
        if (filled_ > BLOCK - 8) {
            std::memset(block_.data() + filled_, 0, BLOCK - filled_);
            compress();
        }
        std::memset(block_.data() + filled_, 0, BLOCK - 8 - filled_);
        for (std::size_t i = 0; i < 8; ++i) block_[BLOCK - 1 - i] = static_cast<std::uint8_t>(bits >> (8 * i));
        compress();
        Digest out;
        for (std::size_t i = 0; i < out.size(); ++i)
            out[i] = static_cast<std::uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
        return out;
    }

   private:
    static constexpr std::size_t BLOCK = 64;
    // The first bits of the fractions of the cube roots of the first 64 primes.
    static constexpr std::array<std::uint32_t, 64> ROUND = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

    void compress() {
#ifdef __x86_64__
        if (!is_portable_) return compress_by_instructions();
#endif
        std::array<std::uint32_t, 64> w;
        for (std::size_t i = 0; i < 16; ++i) {
            const std::uint8_t* at = block_.data() + 4 * i;
            w[i] = std::uint32_t{at[0]} << 24 | std::uint32_t{at[1]} << 16 | std::uint32_t{at[2]} << 8 | at[3];
        }
        for (std::size_t i = 16; i < 64; ++i) {
            std::uint32_t a = w[i - 15], b = w[i - 2];
            w[i] = w[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) + w[i - 7] +
                   (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
        }
        auto [a, b, c, d, e, f, g, h] = state_;
        for (std::size_t i = 0; i < 64; ++i) {
            std::uint32_t one =
                h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + (g ^ (e & (f ^ g))) + ROUND[i] + w[i];
            std::uint32_t two = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) | (c & (a | b)));
            h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
        }
        const std::array<std::uint32_t, 8> after = {a, b, c, d, e, f, g, h};
        for (std::size_t i = 0; i < 8; ++i) state_[i] += after[i];
        filled_ = 0;
    }

#ifdef __x86_64__
    // Four rounds at a time. The instructions want the state as (a, b, e, f) and (c, d, g, h), a in the highest place.
    __attribute__((target("sha,sse4.1"))) void compress_by_instructions() {
        auto [a, b, c, d, e, f, g, h] = std::bit_cast<std::array<int, 8>>(state_);
        __m128i abef = _mm_set_epi32(a, b, e, f), cdgh = _mm_set_epi32(c, d, g, h);
        const __m128i before_abef = abef, before_cdgh = cdgh;
        const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
        __m128i w[16];
        for (std::size_t i = 0; i < 16; ++i) {
            if (i < 4) {
                const auto* at = reinterpret_cast<const __m128i*>(block_.data() + 16 * i);
                w[i] = _mm_shuffle_epi8(_mm_loadu_si128(at), big_endian);
            } else {
                __m128i sum =
                    _mm_add_epi32(_mm_sha256msg1_epu32(w[i - 4], w[i - 3]), _mm_alignr_epi8(w[i - 1], w[i - 2], 4));
                w[i] = _mm_sha256msg2_epu32(sum, w[i - 1]);
            }
            __m128i round = _mm_add_epi32(w[i], _mm_loadu_si128(reinterpret_cast<const __m128i*>(&ROUND[4 * i])));
            __m128i first = _mm_sha256rnds2_epu32(cdgh, abef, round);
            abef = _mm_sha256rnds2_epu32(abef, first, _mm_shuffle_epi32(round, 0x0e));
            cdgh = first;
        }
        std::array<std::uint32_t, 4> left, right;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(left.data()), _mm_add_epi32(abef, before_abef));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(right.data()), _mm_add_epi32(cdgh, before_cdgh));
        state_ = {left[3], left[2], right[3], right[2], left[1], left[0], right[1], right[0]};
        filled_ = 0;
    }
#endif

    // The same of the square roots of the first 8 primes.
    std::array<std::uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                           0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::array<std::uint8_t, BLOCK> block_{};
    std::size_t filled_ = 0;
    std::uint64_t total_ = 0;
    bool is_portable_;
};

}  // namespace penstock::engine
