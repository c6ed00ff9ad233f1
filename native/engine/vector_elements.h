// vector_elements.h: vectors of elements of one dtype, as float32. Included by kernels that are compiled once per
// instruction set, after the file that defines PENSTOCK_LANES, the floats in a vector register.
#pragma once
#include "vector_math.h"

namespace penstock::engine {
namespace {

constexpr u64 LANES = PENSTOCK_LANES;
typedef float Floats __attribute__((vector_size(4 * PENSTOCK_LANES)));
typedef u32 Bits __attribute__((vector_size(4 * PENSTOCK_LANES)));
typedef i32 Indices __attribute__((vector_size(4 * PENSTOCK_LANES)));
typedef u16 Halves __attribute__((vector_size(2 * PENSTOCK_LANES)));

// Elements of one dtype: how a vector of them is read, rounded and written.
struct Float32 {
    using Element = float;
    static Floats load(const float* at) {
        Floats out;
        __builtin_memcpy(&out, at, sizeof out);
        return out;
    }
    static void store(float* at, Floats numbers) { __builtin_memcpy(at, &numbers, sizeof numbers); }
    static Floats round(Floats numbers) { return numbers; }
};

struct Bfloat16 {
    using Element = u16;
    static Floats widen(Halves halves) {
        return __builtin_bit_cast(Floats, __builtin_convertvector(halves, Bits) << 16);
    }
    static Floats load(const u16* at) {
        Halves halves;
        __builtin_memcpy(&halves, at, sizeof halves);
        return widen(halves);
    }
    static void store(u16* at, Floats numbers) {
        Halves halves = to_bfloat16<Halves, Bits>(numbers);
        __builtin_memcpy(at, &halves, sizeof halves);
    }
    static Floats round(Floats numbers) { return widen(to_bfloat16<Halves, Bits>(numbers)); }
};

// The elements from `first` on, in a vector. The other lanes are zeros.
template <class Type>
inline Floats load_part(const typename Type::Element* row, u64 first, u64 size) {
    if (size - first >= LANES) return Type::load(row + first);
    typename Type::Element part[LANES] = {};
    for (u64 lane = 0; lane < size - first; ++lane) part[lane] = row[first + lane];
    return Type::load(part);
}

// Writes the elements from `first` on, of those that a row has.
template <class Type>
inline void store_part(typename Type::Element* row, u64 first, u64 size, Floats numbers) {
    if (size - first >= LANES) return Type::store(row + first, numbers);
    typename Type::Element part[LANES];
    Type::store(part, numbers);
    for (u64 lane = 0; lane < size - first; ++lane) row[first + lane] = part[lane];
}

}  // namespace
}  // namespace penstock::engine
