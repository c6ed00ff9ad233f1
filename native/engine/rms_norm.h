// rms_norm.h: y = x / sqrt(mean(x^2) + epsilon) * w of each row, on CPUs. Sums are float32.
//
// The kernels are compiled once per instruction set; paged_attention.h says what that forbids.
#pragma once
#include "paged_attention.h"

namespace penstock::engine {

struct RmsNorm {
    DType dtype;  // of x, w and y
    const void* x;
    const void* weight;  // [size]
    void* out;           // [rows][size]; nullptr: only the sum is computed
    u64 rows, size;
    i64 x_stride;
    float epsilon;
    bool adds_one;  // Gemma's way: the factor is 1 + w, and nothing is rounded before it. Otherwise x is, as in Llama's
    const void* added;  // [rows][size], a layer's result: the norm is that of x + added. nullptr: of x
    void* sum;          // [rows][size]: x + added. May be x, or `added`
};

using NormKernel = void(const RmsNorm& norm, u64 first, u64 last);  // rows
NormKernel rms_norm;  // takes the kernel for this processor, which is one of those below
NormKernel rms_norm_portable;
#if defined(__x86_64__)
NormKernel rms_norm_avx2;
NormKernel rms_norm_avx512_bf16;
#endif
void compute_norm(const RmsNorm& norm, u64 threads);  // all rows

}  // namespace penstock::engine
