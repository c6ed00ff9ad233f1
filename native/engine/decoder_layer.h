// decoder_layer.h: layers of a decoder in bfloat16 or float32 on CPUs, from the kernels of the other headers:
//
//     x += output(attention(rotary(qkv(norm(x)))))
//     x += down(silu(gate(norm(x))) * up(norm(x)))
//
// Each sum may have a norm of what is added (Gemma). Of several ranks, each has some of the heads and of the gate's
// outputs, and all ranks add up what is added.
//
// All numbers between two kernels lie in memory that the calling thread keeps from one call to the next.
#pragma once
#include <array>
#include <vector>

#include "packed_linear.h"
#include "rank_memory.h"

namespace penstock::engine {

struct NormWeights {
    const void* weight;  // nullptr: there is no norm
    float epsilon;
    bool adds_one;  // see RmsNorm
};

// What an adapter (LoRA) adds to a product: x A^T B^T.
struct LowRank {
    const PackedLinear *a = nullptr, *b = nullptr;  // nullptr: the adapter adds nothing
};

// Consecutive tokens of a step with one adapter.
struct AdapterRun {
    u64 adapter, begin, end;
};

// Pointers are to what the caller keeps alive.
struct DecoderLayer {
    enum Product : u64 { QKV, OUTPUT, GATE_UP, DOWN, PRODUCTS };

    NormWeights attention_norm, attended_norm;  // before the attention, and of its result
    NormWeights mlp_norm, mlp_result_norm;
    NormWeights query_norm, key_norm;                   // of heads, of one kind
    const PackedLinear *qkv, *output, *gate_up, *down;  // `gate_up` is gated; nullptr: the caller computes the MLP
    u64 num_heads, num_kv_heads, head_size, value_size;
    float scale;
    u64 window;                                           // see PrefillAttention
    float softcap;                                        // see PagedAttention
    const float* sinks;                                   // see PagedAttention
    u64 cache;                                            // index of the layer's keys and values
    std::vector<std::array<LowRank, PRODUCTS>> adapters;  // by number

    DType dtype() const { return output->dtype; }  // of all linear layers, norms and caches
    u64 size() const { return output->outputs; }   // of a hidden state
    u64 attended_size() const { return num_heads * value_size; }
    u64 query_size() const { return num_heads * head_size; }
};

// The tokens of a step, and where in the KV cache their keys and values lie.
struct AttentionStep {
    struct Cache {
        void *keys, *values;  // of a layer
    };
    struct Chunk {  // tokens of one sequence, its last ones
        u64 first, tokens, seq_len;
        const i32* blocks;
    };

    DType dtype;  // of the caches
    std::vector<Cache> caches;
    u64 block_size, tokens;
    const i64* places;  // of each token
    // The first tokens are of sequences that compute one token each.
    u64 num_seqs, table_width;
    const i32* block_tables;  // [num_seqs][table_width]
    const i64* seq_lens;
    std::vector<i64> zeros;        // first positions without a window
    std::vector<Chunk> chunks;     // none in float32, for which there is no kernel
    std::vector<Chunk> ends;       // last tokens of chunks: if `reads_ends`, those with results that the caller reads
    bool reads_ends;               // else the caller reads the results of all tokens
    std::vector<AdapterRun> runs;  // in the order of the tokens
};

struct CosSin {
    const void *cos, *sin;  // [tokens][head_size]
};

// Computes the hidden states of all tokens, all of one dtype: `x` [tokens] with a stride becomes `out` [tokens][size].
// `final_norm` of the result becomes `normed`, which may be `out`. `rotations`: of each layer. `ranks`: of the model;
// nullptr: one. Of tokens that the caller does not read, the last of several layers computes keys and values only.
// Nothing is checked.
void compute_layers(const std::vector<const DecoderLayer*>& layers, const AttentionStep& step, const void* x,
                    u64 x_stride, const std::vector<CosSin>& rotations, const NormWeights& final_norm, void* out,
                    void* normed, u64 threads, RankMemory* ranks);

}  // namespace penstock::engine
