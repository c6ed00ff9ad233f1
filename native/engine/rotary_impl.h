// rotary_impl.h: the kernel of rotary.h. Included by one .cpp per instruction set, which defines PENSTOCK_KERNEL, the
// function's name, and PENSTOCK_LANES, the floats in a vector register. Calls only built-in functions.
#include "rotary.h"
#include "vector_elements.h"

namespace penstock::engine {
namespace {

template <class Type>
inline void read(float* to, const void* from, i64 first, u64 size) {
    const auto* row = static_cast<const typename Type::Element*>(from) + first;
    for (u64 at = 0; at < size; at += LANES) Float32::store(to + at, load_part<Type>(row, at, size));
}

template <class Type>
inline void write(void* to, u64 first, const float* numbers, u64 size) {
    auto* row = static_cast<typename Type::Element*>(to) + first;
    for (u64 at = 0; at < size; at += LANES) store_part<Type>(row, at, size, Float32::load(numbers + at));
}

template <class Type>
inline void normalize(float* x, const float* weight, const Rotary& rotary) {
    Floats squares = {};
    for (u64 at = 0; at < rotary.size; at += LANES) squares += Float32::load(x + at) * Float32::load(x + at);
    float sum = 0.0f;
    for (u64 lane = 0; lane < LANES; ++lane) sum += squares[lane];
    float scale = 1.0f / __builtin_sqrtf(sum / static_cast<float>(rotary.size) + rotary.epsilon);
    for (u64 at = 0; at < rotary.size; at += LANES) {
        Floats scaled = Float32::load(x + at) * scale, factor = Float32::load(weight + at);
        Floats result = rotary.adds_one ? scaled * (factor + 1.0f) : Type::round(scaled) * factor;
        Float32::store(x + at, Type::round(result));
    }
}

// `size` floats, and zeros up to the next whole vector.
using Head = float[Rotary::MAX_SIZE + LANES];

template <class Type>
inline void compute_heads(const Rotary& rotary, const Rotary::Heads& heads, u64 token, const float* cos,
                          const float* sin, void* out, u64 first_row) {
    alignas(64) Head x, rotated, weight;
    u64 size = rotary.size, half = size / 2;
    if (heads.norm != nullptr) read<Type>(weight, heads.norm, 0, size);
    for (u64 head = 0; head < heads.count; ++head) {
        read<Type>(x, heads.projected, static_cast<i64>(token) * heads.stride + static_cast<i64>(head * size), size);
        if (heads.norm != nullptr) normalize<Type>(x, weight, rotary);
        for (u64 i = 0; i < half; ++i) rotated[i] = x[i] * cos[i] - x[half + i] * sin[i];
        for (u64 i = half; i < size; ++i) rotated[i] = x[i] * cos[i] + x[i - half] * sin[i];
        write<Type>(out, (first_row * heads.count + head) * size, rotated, size);
    }
}

template <class Type>
inline void compute(const Rotary& rotary, u64 first, u64 last) {
    using Element = typename Type::Element;
    alignas(64) Head cos, sin;
    u64 values = rotary.values.count * rotary.value_size;
    for (u64 token = first; token < last; ++token) {
        u64 place = static_cast<u64>(rotary.places[token]);
        read<Type>(cos, rotary.cos, static_cast<i64>(token * rotary.size), rotary.size);
        read<Type>(sin, rotary.sin, static_cast<i64>(token * rotary.size), rotary.size);
        compute_heads<Type>(rotary, rotary.queries, token, cos, sin, rotary.out, token);
        compute_heads<Type>(rotary, rotary.keys, token, cos, sin, rotary.cached_keys, place);
        __builtin_memcpy(
            static_cast<Element*>(rotary.cached_values) + place * values,
            static_cast<const Element*>(rotary.values.projected) + static_cast<i64>(token) * rotary.values.stride,
            values * sizeof(Element));
    }
}

}  // namespace

void PENSTOCK_KERNEL(const Rotary& rotary, u64 first, u64 last) {
    if (rotary.dtype == DType::float32) return compute<Float32>(rotary, first, last);
    compute<Bfloat16>(rotary, first, last);
}

}  // namespace penstock::engine
