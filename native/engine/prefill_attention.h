// prefill_attention.h: attention of the tokens of one chunk over a paged KV cache in bfloat16, on CPUs.
//
// FlashAttention (Dao et al. 2022, arXiv:2205.14135) with products by the kernels of packed_linear.h. Of one KV head,
// keys are the weights of a layer from the elements of a head to positions, and values are those of a layer from
// positions to elements. Both are packed once for all queries of the chunk. The query heads of a KV head are rows
// beside the tokens, so each packed tile serves all of these. Weights of the softmax are rounded to bfloat16 before the
// second product, all sums are float32.
//
// The kernels are compiled once per instruction set; paged_attention.h says what that forbids.
#pragma once
#include "packed_linear.h"

namespace penstock::engine {

// Strides are in elements; the elements of one head are contiguous.
struct PrefillAttention {
    static constexpr u64 ROWS = 64;        // queries that are computed together
    static constexpr u64 POSITIONS = 128;  // of a tile
    static constexpr u64 PANELS = POSITIONS / PackedLinear::PANEL;
    static constexpr u64 INPUT_TILES = POSITIONS / PackedLinear::TILE_INPUTS;

    const u16* queries;  // [tokens][num_heads][key_size]
    i64 query_token_stride, query_head_stride;
    const u16 *keys, *values;  // [num_blocks * block_size][num_kv_heads][size]
    u16* out;                  // [tokens][num_heads][value_size]
    const i32* blocks;
    u64 block_size, tokens, seq_len;  // the tokens are the last ones of `seq_len`
    u64 num_heads, num_kv_heads, key_size, value_size;
    u64 window;  // a token attends to so many positions, to that of the token among them; 0: to all
    float scale;
    float softcap;       // see PagedAttention
    const float* sinks;  // see PagedAttention

    [[gnu::always_inline]] u64 heads_per_kv_head() const { return num_heads / num_kv_heads; }
    [[gnu::always_inline]] u64 key_tiles() const {
        return PackedLinear::divide_up(key_size, PackedLinear::TILE_INPUTS);
    }
    [[gnu::always_inline]] u64 value_panels() const { return PackedLinear::divide_up(value_size, PackedLinear::PANEL); }
    [[gnu::always_inline]] u64 position_of(u64 row) const { return seq_len - tokens + row / heads_per_kv_head(); }
    // The first position that the query at `position` attends to.
    [[gnu::always_inline]] u64 first_position(u64 position) const {
        return window == 0 || position < window ? 0 : position + 1 - window;
    }
    [[gnu::always_inline]] u64 rows() const { return tokens * heads_per_kv_head(); }
    [[gnu::always_inline]] u64 first_tile() const { return first_position(position_of(0)) / POSITIONS; }
    u64 tiles() const { return PackedLinear::divide_up(seq_len, POSITIONS) - first_tile(); }
    u64 groups() const { return PackedLinear::divide_up(rows(), ROWS); }  // of rows
    // Elements of packed keys, and of both packed keys and values of a tile.
    [[gnu::always_inline]] u64 keys_nelements() const { return PANELS * key_tiles() * PackedLinear::TILE; }
    [[gnu::always_inline]] u64 tile_nelements() const {
        return keys_nelements() + value_panels() * INPUT_TILES * PackedLinear::TILE;
    }
    // Floats of scratch memory of a group of rows.
    u64 scratch_size() const {
        return ROWS * key_tiles() * PackedLinear::TILE_INPUTS / 2 + ROWS * value_panels() * PackedLinear::PANEL;
    }
};

// `pack` writes the keys and values of one tile of a KV head to `packed`. `attend` computes one group of rows of a KV
// head with its packed tiles. Nothing is checked.
struct PrefillKernel {
    void (*pack)(const PrefillAttention& problem, u64 kv_head, u64 tile, u16* packed);
    void (*attend)(const PrefillAttention& problem, u64 kv_head, u64 group, const u16* packed, SumsKernel* multiply,
                   float* scratch);
};
extern const PrefillKernel prefill_attention_portable;
#if defined(__x86_64__)
extern const PrefillKernel prefill_attention_avx2;
extern const PrefillKernel prefill_attention_avx512;
extern const PrefillKernel prefill_attention_avx512_bf16;
#endif
const PrefillKernel& prefill_kernel();                            // that of this processor
void attend_chunk(const PrefillAttention& problem, u64 threads);  // all groups of all heads

}  // namespace penstock::engine
