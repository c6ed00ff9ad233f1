// rms_norm_impl.h: the kernel of rms_norm.h. Included by one .cpp per instruction set, which defines PENSTOCK_KERNEL,
// the function's name, and PENSTOCK_LANES, the floats in a vector register. Calls only built-in functions.
#include "rms_norm.h"
#include "vector_elements.h"

namespace penstock::engine {
namespace {

template <class Type>
inline void compute(const RmsNorm& norm, u64 first, u64 last) {
    using Element = typename Type::Element;
    const Element* weight = static_cast<const Element*>(norm.weight);
    const Element* added = static_cast<const Element*>(norm.added);
    for (u64 row = first; row < last; ++row) {
        const Element* x = static_cast<const Element*>(norm.x) + static_cast<i64>(row) * norm.x_stride;
        if (added != nullptr) {
            Element* sum = static_cast<Element*>(norm.sum) + row * norm.size;
            for (u64 at = 0; at < norm.size; at += LANES) {
                Floats left = load_part<Type>(x, at, norm.size);
                store_part<Type>(sum, at, norm.size, left + load_part<Type>(added + row * norm.size, at, norm.size));
            }
            x = sum;
        }
        if (norm.out == nullptr) continue;
        Element* out = static_cast<Element*>(norm.out) + row * norm.size;
        Floats even = {}, odd = {};  // two sums: each addition waits for the one before it
        for (u64 at = 0; at < norm.size; at += 2 * LANES) {
            Floats part = load_part<Type>(x, at, norm.size);
            even += part * part;
            if (at + LANES < norm.size) part = load_part<Type>(x, at + LANES, norm.size), odd += part * part;
        }
        float sum = 0.0f;
        for (u64 lane = 0; lane < LANES; ++lane) sum += even[lane] + odd[lane];
        float scale = 1.0f / __builtin_sqrtf(sum / static_cast<float>(norm.size) + norm.epsilon);
        for (u64 at = 0; at < norm.size; at += LANES) {
            Floats scaled = load_part<Type>(x, at, norm.size) * scale, factor = load_part<Type>(weight, at, norm.size);
            Floats result = norm.adds_one ? scaled * (factor + 1.0f) : Type::round(scaled) * factor;
            store_part<Type>(out, at, norm.size, result);
        }
    }
}

}  // namespace

void PENSTOCK_KERNEL(const RmsNorm& norm, u64 first, u64 last) {
    if (norm.dtype == DType::float32) return compute<Float32>(norm, first, last);
    compute<Bfloat16>(norm, first, last);
}

}  // namespace penstock::engine
