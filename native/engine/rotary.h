// rotary.h: from projected queries, keys and values to an attention: RMS norms of heads, rotary embedding, cache write.
//
// Rotary embedding (Su et al. 2021, arXiv:2104.09864) in transformers' way: the first half of a head and the second one
// are the coordinates of its rotations. Products and sums are float32, and are rounded once.
//
// The kernels are compiled once per instruction set; paged_attention.h says what that forbids.
#pragma once
#include "paged_attention.h"

namespace penstock::engine {

struct Rotary {
    static constexpr u64 MAX_SIZE = 512;  // elements of a head

    struct Heads {
        const void* projected;  // [tokens][count][size]
        i64 stride;             // elements between tokens
        const void* norm;       // [size], nullptr: none
        u64 count;
    };

    DType dtype;
    Heads queries, keys, values;
    const void *cos, *sin;  // [tokens][size]
    float epsilon;          // of the norms
    bool adds_one;          // see RmsNorm
    u64 size, value_size, tokens;
    const i64* places;    // of each token in the cache
    void* out;            // [tokens][queries.count][size]
    void* cached_keys;    // [places][keys.count][size]
    void* cached_values;  // [places][keys.count][value_size]
};

using RotaryKernel = void(const Rotary& rotary, u64 first, u64 last);  // tokens
RotaryKernel rotary;  // takes the kernel for this processor, which is one of those below
RotaryKernel rotary_portable;
#if defined(__x86_64__)
RotaryKernel rotary_avx2;
RotaryKernel rotary_avx512_bf16;
#endif
void compute_rotary(const Rotary& rotary, u64 threads);  // all tokens

}  // namespace penstock::engine
