// vector_math.h: functions of vectors of floats that several kernels need, for vectors of any width.
//
// All is in an unnamed namespace, and calls only built-in functions: a kernel that is compiled for some processors may
// not define what others define, too (paged_attention.h).
#pragma once
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "paged_attention.h"

namespace penstock::engine {
namespace {

// e^x for |x| <= 87, within 2 units in the last place; NaN stays NaN. x = n * ln 2 + r: 2^n goes into the exponent's
// bits, e^r is the polynomial of Cephes' expf.
template <class Bits, class Floats>
inline Floats exponential(Floats x) {
    constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits of the sum
    Floats n = x * 1.44269504f + ROUNDER;
    Floats power_of_two = __builtin_bit_cast(Floats, (__builtin_bit_cast(Bits, n) + 127) << 23);
    n -= ROUNDER;
    Floats r = x - n * 0.693359375f - n * -2.12194440e-4f;
    Floats sum = r * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * r + 8.3334519073e-3f;
    sum = sum * r + 4.1665795894e-2f;
    sum = sum * r + 1.6666665459e-1f;
    sum = sum * r + 5.0000001201e-1f;
    return (sum * r * r + r + 1.0f) * power_of_two;
}

// 2^x for x <= 0, within 3 units in the last place, and 0 for x < -126. The polynomial is that of the least greatest
// error between -1/2 and 1/2.
template <class Bits, class Floats>
inline Floats power_of_two(Floats x) {
    constexpr float ROUNDER = 12582912.0f;  // see `exponential`
    Floats n = x + ROUNDER;
    Floats power = __builtin_bit_cast(Floats, (__builtin_bit_cast(Bits, n) + 127) << 23);
    Floats r = x - (n - ROUNDER);
    Floats sum = r * 1.3264726899e-3f + 9.6715126606e-3f;
    sum = sum * r + 5.5507337442e-2f;
    sum = sum * r + 2.4022242085e-1f;
    sum = sum * r + 6.9314697760e-1f;
    return x < -126.0f ? Floats{} : (sum * r + 1.0f) * power;
}

// tanh(x), within 3 units in the last place. Near 0 by the polynomial of Cephes' tanhf, as 1 - 2 / (e^2x + 1) loses
// digits there.
template <class Bits, class Floats>
inline Floats hyperbolic_tangent(Floats x) {
    Floats twice = x * 2.0f;
    twice = twice < -20.0f ? Floats{} - 20.0f : twice;
    twice = twice > 20.0f ? Floats{} + 20.0f : twice;
    Floats far = 1.0f - 2.0f / (exponential<Bits>(twice) + 1.0f);
    Floats square = x * x;
    Floats sum = square * -5.70498872745e-3f + 2.06390887954e-2f;
    sum = sum * square - 5.37397155531e-2f;
    sum = sum * square + 1.33314422036e-1f;
    sum = sum * square - 3.33332819422e-1f;
    return square < 0.390625f ? sum * square * x + x : far;
}

// The bits of the nearest bfloat16, ties to even, in the lower halves; NaN stays NaN.
template <class Bits, class Floats>
inline Bits nearest_bfloat16(Floats numbers) {
    Bits bits = __builtin_bit_cast(Bits, numbers);
    Bits nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : nearest;
}

// The nearest bfloat16 of each number. The instruction makes zeros of denormal numbers.
template <class Halves, class Bits, class Floats>
inline Halves to_bfloat16(Floats numbers) {
#if defined(__AVX512BF16__)
    if constexpr (sizeof(Floats) == 64)
        return __builtin_bit_cast(Halves, _mm512_cvtneps_pbh(__builtin_bit_cast(__m512, numbers)));
    else
#endif
        return __builtin_convertvector(nearest_bfloat16<Bits>(numbers), Halves);
}

}  // namespace
}  // namespace penstock::engine
