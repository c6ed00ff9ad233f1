// decoder_layer.cpp: which kernels compute a layer, and with what memory between them.
#include "decoder_layer.h"

#include <algorithm>
#include <cstring>

#include "prefill_attention.h"
#include "rms_norm.h"
#include "rotary.h"
#include "scratch.h"

namespace penstock::engine {
namespace {

struct Buffers {
    u8* delta;    // [tokens][size]: what a half of a layer adds
    u8* normed;   // [tokens][size]
    u8* wide;     // queries, keys and values as projected; or the products of the gate
    u8* queries;  // rotated
    u8* attended;
};

u64 nbytes_of(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

// Each buffer begins at a cache line.
Buffers buffers_of(const std::vector<const DecoderLayer*>& layers, u64 tokens) {
    auto most = [&](auto size_of) {
        u64 size = 0;
        for (const DecoderLayer* layer : layers) size = std::max<u64>(size, size_of(*layer));
        return PackedLinear::divide_up(size * tokens * nbytes_of(layers[0]->dtype()), 64) * 64;
    };
    u64 size = most([](const DecoderLayer& layer) { return layer.size(); });
    u64 wide = most([](const DecoderLayer& layer) {
        return std::max(layer.qkv->results(), layer.gate_up == nullptr ? 0 : layer.gate_up->results());
    });
    u64 queries = most([](const DecoderLayer& layer) { return layer.query_size(); });
    u64 attended = most([](const DecoderLayer& layer) { return layer.attended_size(); });
    u8* memory = scratch<DecoderLayer, u8>(2 * size + wide + queries + attended);
    return {memory, memory + size, memory + 2 * size, memory + 2 * size + wide, memory + 2 * size + wide + queries};
}

void rotate(const DecoderLayer& layer, const AttentionStep& step, const CosSin& rotation, const Buffers& buffers,
            u64 threads) {
    i64 stride = static_cast<i64>(layer.qkv->results());
    u64 nbytes = nbytes_of(layer.dtype());
    const u8* keys = buffers.wide + layer.query_size() * nbytes;
    const u8* values = keys + layer.num_kv_heads * layer.head_size * nbytes;
    const AttentionStep::Cache& cache = step.caches[layer.cache];
    compute_rotary({layer.dtype(),
                    {buffers.wide, stride, layer.query_norm.weight, layer.num_heads},
                    {keys, stride, layer.key_norm.weight, layer.num_kv_heads},
                    {values, stride, nullptr, layer.num_kv_heads},
                    rotation.cos,
                    rotation.sin,
                    layer.query_norm.epsilon,
                    layer.query_norm.adds_one,
                    layer.head_size,
                    layer.value_size,
                    step.tokens,
                    step.places,
                    buffers.queries,
                    cache.keys,
                    cache.values},
                   threads);
}

void attend(const DecoderLayer& layer, const AttentionStep& step, const std::vector<AttentionStep::Chunk>& chunks,
            const Buffers& buffers, u64 threads) {
    const AttentionStep::Cache& cache = step.caches[layer.cache];
    i64 head = static_cast<i64>(layer.head_size), token = static_cast<i64>(layer.query_size());
    if (step.num_seqs != 0) {
        const i64* firsts = step.zeros.data();
        if (layer.window != 0) {
            i64* own = scratch<AttentionStep, i64>(step.num_seqs);
            for (u64 seq = 0; seq < step.num_seqs; ++seq)
                own[seq] = std::max<i64>(step.seq_lens[seq] - static_cast<i64>(layer.window), 0);
            firsts = own;
        }
        attend_rows({layer.dtype(),
                     buffers.queries,
                     token,
                     head,
                     cache.keys,
                     cache.values,
                     buffers.attended,
                     step.block_tables,
                     firsts,
                     step.seq_lens,
                     step.num_seqs,
                     layer.num_heads,
                     layer.num_kv_heads,
                     layer.head_size,
                     layer.value_size,
                     step.block_size,
                     step.table_width,
                     layer.scale,
                     layer.softcap,
                     layer.sinks},
                    threads);
    }
    auto halves = [](const void* memory) { return static_cast<const u16*>(memory); };
    u16* attended = reinterpret_cast<u16*>(buffers.attended);
    for (const AttentionStep::Chunk& chunk : chunks)
        attend_chunk({halves(buffers.queries) + chunk.first * layer.query_size(), token, head, halves(cache.keys),
                      halves(cache.values), attended + chunk.first * layer.attended_size(), chunk.blocks,
                      step.block_size, chunk.tokens, chunk.seq_len, layer.num_heads, layer.num_kv_heads,
                      layer.head_size, layer.value_size, layer.window, layer.scale, layer.softcap, layer.sinks},
                     threads);
}

// Returns what the adapters of a step add to a product for all tokens. `from`: the input of the product.
Addend low_ranks(const DecoderLayer& layer, DecoderLayer::Product product, const PackedLinear& linear,
                 const AttentionStep& step, const void* from, u64 threads) {
    u64 nbytes = nbytes_of(linear.dtype), row_nbytes = linear.outputs * nbytes, end = 0;
    u8* numbers = nullptr;
    for (const AdapterRun& run : step.runs) {
        LowRank low = run.adapter < layer.adapters.size() ? layer.adapters[run.adapter][product] : LowRank{};
        if (low.a == nullptr) continue;
        if (numbers == nullptr) numbers = scratch<AdapterRun, u8>(step.tokens * row_nbytes);
        std::memset(numbers + end * row_nbytes, 0, (run.begin - end) * row_nbytes);
        end = run.end;
        u64 rows = run.end - run.begin, rank = low.a->outputs;
        u8* projected = scratch<LowRank, u8>(rows * rank * nbytes);
        const u8* x = static_cast<const u8*>(from) + run.begin * linear.inputs * nbytes;
        compute_linear(*low.a, x, linear.inputs, rows, projected, rank, threads);
        compute_linear(*low.b, projected, rank, rows, numbers + run.begin * row_nbytes, linear.outputs, threads);
    }
    if (numbers == nullptr) return {};
    std::memset(numbers + end * row_nbytes, 0, (step.tokens - end) * row_nbytes);
    return {numbers, linear.outputs};
}

// Moves rows of tokens: the ends of chunks behind the rows of sequences with one token each, or back.
void move_ends(const AttentionStep& step, u8* rows, u64 nbytes, bool is_back) {
    u64 count = step.ends.size();
    for (u64 number = 0; number < count; ++number) {
        u64 end = is_back ? count - 1 - number : number;
        u8 *behind = rows + (step.num_seqs + end) * nbytes, *at = rows + step.ends[end].first * nbytes;
        std::memmove(is_back ? at : behind, is_back ? behind : at, nbytes);
    }
}

}  // namespace

void compute_layers(const std::vector<const DecoderLayer*>& layers, const AttentionStep& step, const void* x,
                    u64 x_stride, const std::vector<CosSin>& rotations, const NormWeights& final_norm, void* out,
                    void* normed, u64 threads, RankMemory* ranks) {
    u64 tokens = step.tokens, size = layers[0]->size();
    Buffers buffers = buffers_of(layers, tokens);
    const void* added = nullptr;  // what the half before has computed
    std::vector<AttentionStep::Chunk> narrow;
    auto norm = [&](const NormWeights& weights, void* to) {
        compute_norm({layers[0]->dtype(), x, weights.weight, weights.weight == nullptr ? nullptr : to, tokens, size,
                      static_cast<i64>(x_stride), weights.epsilon, weights.adds_one, added, out},
                     threads);
        if (added != nullptr) x = out, x_stride = size;
        added = buffers.delta;
    };
    // Ends a half of a layer: sums of all ranks, and their norm.
    auto finish = [&](const NormWeights& weights) {
        if (ranks != nullptr) ranks->sum(buffers.delta, tokens * size, layers[0]->dtype());
        if (weights.weight == nullptr) return;
        compute_norm({layers[0]->dtype(), buffers.delta, weights.weight, buffers.delta, tokens, size,
                      static_cast<i64>(size), weights.epsilon, weights.adds_one, nullptr, nullptr},
                     threads);
    };
    bool is_narrow = step.reads_ends && layers.size() > 1 && step.runs.empty();
    for (u64 number = 0; number < layers.size(); ++number) {
        const DecoderLayer* layer = layers[number];
        const std::vector<AttentionStep::Chunk>* chunks = &step.chunks;
        auto multiply = [&](DecoderLayer::Product product, const PackedLinear& linear, const void* from, void* to) {
            Addend addend = low_ranks(*layer, product, linear, step, from, threads);
            compute_linear(linear, from, linear.inputs, tokens, to, linear.results(), threads, addend);
        };
        norm(layer->attention_norm, buffers.normed);
        multiply(DecoderLayer::QKV, *layer->qkv, buffers.normed, buffers.wide);
        rotate(*layer, step, rotations[number], buffers, threads);
        if (is_narrow && number + 1 == layers.size()) {
            u64 nbytes = nbytes_of(layer->dtype());
            move_ends(step, buffers.queries, layer->query_size() * nbytes, false);
            move_ends(step, static_cast<u8*>(out), size * nbytes, false);  // `x`, since the first half of a layer
            tokens = step.num_seqs + step.ends.size();
            narrow = step.ends;
            for (u64 end = 0; end < narrow.size(); ++end) narrow[end].first = step.num_seqs + end;
            chunks = &narrow;
        }
        attend(*layer, step, *chunks, buffers, threads);
        multiply(DecoderLayer::OUTPUT, *layer->output, buffers.attended, buffers.delta);
        finish(layer->attended_norm);
        if (layer->gate_up == nullptr) continue;
        norm(layer->mlp_norm, buffers.normed);
        multiply(DecoderLayer::GATE_UP, *layer->gate_up, buffers.normed, buffers.wide);
        multiply(DecoderLayer::DOWN, *layer->down, buffers.wide, buffers.delta);
        finish(layer->mlp_result_norm);
    }
    norm(final_norm, normed);
    if (is_narrow) move_ends(step, static_cast<u8*>(out), size * nbytes_of(layers[0]->dtype()), true);
}

}  // namespace penstock::engine
