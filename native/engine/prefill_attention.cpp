// prefill_attention.cpp: which kernel of prefill_attention.h runs.
#include "prefill_attention.h"

#include <algorithm>

#include "cpu_features.h"
#include "scratch.h"
#include "thread_team.h"

namespace penstock::engine {

const PrefillKernel& prefill_kernel() {
#if defined(__x86_64__)
#if defined(PENSTOCK_COMPILES_BF16)
    if (has_avx512_bf16()) return prefill_attention_avx512_bf16;
#endif
    if (has_avx512()) return prefill_attention_avx512;
    if (has_avx2()) return prefill_attention_avx2;
#endif
    return prefill_attention_portable;
}

void attend_chunk(const PrefillAttention& p, u64 threads) {
    constexpr u64 MAX_PACKED = 1 << 23;  // elements of packed keys and values
    u64 head_nelements = p.tiles() * p.tile_nelements(), groups = p.groups();
    u64 together = std::clamp<u64>(MAX_PACKED / head_nelements, 1, p.num_kv_heads);  // KV heads
    u16* packed = scratch<PrefillAttention, u16>(together * head_nelements);
    const PrefillKernel& kernel = prefill_kernel();
    SumsKernel* multiply = linear_kernel().sums;
    ThreadTeam& team = ThreadTeam::get();
    for (u64 first = 0; first < p.num_kv_heads; first += together) {
        u64 heads = std::min(together, p.num_kv_heads - first);
        team.run(threads, heads * p.tiles(), [&](u64 number) {
            kernel.pack(p, first + number / p.tiles(), number % p.tiles(), packed + number * p.tile_nelements());
        });
        // The last rows of a head attend to the most positions: they begin.
        team.run(threads, heads * groups, [&](u64 number) {
            float* floats = scratch<PrefillAttention, float>(p.scratch_size());
            u64 head = number / groups, group = groups - 1 - number % groups;
            kernel.attend(p, first + head, group, packed + head * head_nelements, multiply, floats);
        });
    }
}

}  // namespace penstock::engine
