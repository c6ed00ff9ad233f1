// rms_norm_impl.h: the kernel of rms_norm.h. Included by one .cpp per instruction set, which defines PENSTOCK_KERNEL,
// the function's name, and PENSTOCK_LANES, the floats in a vector register. Calls only built-in functions.
#include "rms_norm.h"
#include "vector_math.h"

namespace penstock::engine {
namespace {

constexpr u64 LANES = PENSTOCK_LANES;
typedef float Floats __attribute__((vector_size(4 * PENSTOCK_LANES)));
typedef u32 Bits __attribute__((vector_size(4 * PENSTOCK_LANES)));
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
    static Floats load(const u16* at) {
        Halves halves;
        __builtin_memcpy(&halves, at, sizeof halves);
        return __builtin_bit_cast(Floats, __builtin_convertvector(halves, Bits) << 16);
    }
    static void store(u16* at, Floats numbers) {
        Halves halves = __builtin_convertvector(nearest_bfloat16<Bits>(numbers), Halves);
        __builtin_memcpy(at, &halves, sizeof halves);
    }
    static Floats round(Floats numbers) { return __builtin_bit_cast(Floats, nearest_bfloat16<Bits>(numbers) << 16); }
};

// The elements from `first` on, in a vector. The other lanes are zeros.
template <class Type>
inline Floats load_part(const typename Type::Element* row, u64 first, u64 size) {
    if (size - first >= LANES) return Type::load(row + first);
    typename Type::Element part[LANES] = {};
    for (u64 lane = 0; lane < size - first; ++lane) part[lane] = row[first + lane];
    return Type::load(part);
}

template <class Type>
inline void compute(const RmsNorm& norm, u64 first, u64 last) {
    using Element = typename Type::Element;
    const Element* weight = static_cast<const Element*>(norm.weight);
    for (u64 row = first; row < last; ++row) {
        const Element* x = static_cast<const Element*>(norm.x) + static_cast<i64>(row) * norm.x_stride;
        Element* out = static_cast<Element*>(norm.out) + row * norm.size;
        Floats squares[2] = {};
        for (u64 at = 0; at < norm.size; at += LANES) {
            Floats part = load_part<Type>(x, at, norm.size);
            squares[at / LANES % 2] += part * part;
        }
        float sum = 0.0f;
        for (u64 lane = 0; lane < LANES; ++lane) sum += squares[0][lane] + squares[1][lane];
        float scale = 1.0f / __builtin_sqrtf(sum / static_cast<float>(norm.size) + norm.epsilon);
        for (u64 at = 0; at < norm.size; at += LANES) {
            Floats scaled = load_part<Type>(x, at, norm.size) * scale, factor = load_part<Type>(weight, at, norm.size);
            Floats result = norm.adds_one ? scaled * (factor + 1.0f) : Type::round(scaled) * factor;
            if (norm.size - at >= LANES) {
                Type::store(out + at, result);
                continue;
            }
            Element part[LANES];
            Type::store(part, result);
            for (u64 lane = 0; lane < norm.size - at; ++lane) out[at + lane] = part[lane];
        }
    }
}

}  // namespace

void PENSTOCK_KERNEL(const RmsNorm& norm, u64 first, u64 last) {
    if (norm.dtype == DType::float32) return compute<Float32>(norm, first, last);
    compute<Bfloat16>(norm, first, last);
}

}  // namespace penstock::engine
