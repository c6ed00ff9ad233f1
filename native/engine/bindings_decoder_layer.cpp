// bindings_decoder_layer.cpp: layers of a decoder, and the attention of a step, for tensors of torch, which are given
// by their addresses.
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <map>
#include <stdexcept>

#include "bindings_packed_linear.h"
#include "bindings_rank_memory.h"
#include "decoder_layer.h"
#include "rotary.h"

namespace penstock::engine {

using namespace nb::literals;

namespace {

using NormArgument = std::tuple<u64, float, bool>;
using LinearArguments = std::tuple<const Linear*, const Linear*, const Linear*, const Linear*>;
constexpr u64 MAX_ADAPTERS = 1 << 16;
using FloatArray = Array<float, nb::ndim<1>>;

NormWeights norm_of(const NormArgument& argument) {
    auto [address, epsilon, adds_one] = argument;
    return {reinterpret_cast<const void*>(address), epsilon, adds_one};
}

void require(bool is_right, const char* expected) {
    if (!is_right) throw std::invalid_argument(expected);
}

struct BoundLayer {
    DecoderLayer layer{};
    std::optional<FloatArray> sinks;
    std::map<std::pair<u64, u64>, std::pair<nb::object, nb::object>> factors;  // by adapter and product: keeps A and B

    BoundLayer(u64 cache, const std::array<NormArgument, 6>& norms, const LinearArguments& linears,
               const std::array<u64, 4>& heads, float scale, u64 window, float softcap,
               std::optional<FloatArray> own_sinks)
        : sinks(std::move(own_sinks)) {
        auto [qkv, output, gate_up, down] = linears;
        require(qkv != nullptr && output != nullptr && (gate_up == nullptr) == (down == nullptr),
                "expected four layers, or those of the attention");
        layer = {norm_of(norms[0]),
                 norm_of(norms[1]),
                 norm_of(norms[2]),
                 norm_of(norms[3]),
                 norm_of(norms[4]),
                 norm_of(norms[5]),
                 &qkv->get(),
                 &output->get(),
                 gate_up == nullptr ? nullptr : &gate_up->get(),
                 down == nullptr ? nullptr : &down->get(),
                 heads[0],
                 heads[1],
                 heads[2],
                 heads[3],
                 scale,
                 window,
                 softcap,
                 sinks ? sinks->data() : nullptr,
                 cache,
                 {}};
        require(layer.num_kv_heads != 0 && layer.num_heads % layer.num_kv_heads == 0,
                "expected a number of query heads that is a multiple of the number of KV heads");
        require(layer.head_size != 0 && layer.head_size % 2 == 0 && layer.head_size <= Rotary::MAX_SIZE,
                "expected heads of an even size of at most 512");
        u64 key_and_value = layer.num_kv_heads * (layer.head_size + layer.value_size), size = layer.size();
        require(!qkv->get().is_gated && qkv->inputs() == size && qkv->results() == layer.query_size() + key_and_value,
                "expected a projection from a hidden state to queries, keys and values");
        require(!output->get().is_gated && output->inputs() == layer.attended_size(),
                "expected a projection from all heads to a hidden state");
        require(gate_up == nullptr || (gate_up->get().is_gated && gate_up->inputs() == size),
                "expected a gate for a hidden state");
        require(down == nullptr ||
                    (!down->get().is_gated && down->inputs() == gate_up->results() && down->results() == size),
                "expected a projection from the gate to a hidden state");
        for (const Linear* linear : {qkv, output, gate_up, down})
            require(linear == nullptr || linear->get().dtype == layer.dtype(), "expected linear layers of one dtype");
        require(!sinks || sinks->size() == layer.num_heads, "expected a sink for each query head, or none");
    }

    void set_adapter(u64 adapter, u64 product, const Linear& a, const Linear& b) {
        require(adapter < MAX_ADAPTERS && product < DecoderLayer::PRODUCTS, "expected an adapter and a product");
        const PackedLinear* linear = std::array{layer.qkv, layer.output, layer.gate_up, layer.down}[product];
        require(linear != nullptr && a.inputs() == linear->inputs && b.inputs() == a.results() &&
                    b.results() == linear->outputs && a.get().dtype == linear->dtype && b.get().dtype == linear->dtype,
                "expected A and B for the inputs and outputs of the product, of its dtype");
        if (layer.adapters.size() <= adapter) layer.adapters.resize(adapter + 1);
        layer.adapters[adapter][product] = {&a.get(), &b.get()};
        factors[{adapter, product}] = {nb::find(a), nb::find(b)};
    }

    void remove_adapter(u64 adapter) {
        if (adapter < layer.adapters.size()) layer.adapters[adapter] = {};
        for (u64 product = 0; product < DecoderLayer::PRODUCTS; ++product) factors.erase({adapter, product});
    }
};

using RunArgument = std::tuple<u64, u64, u64>;
using ChunkArgument = std::tuple<u64, u64, u64, Int32Array>;

struct BoundStep {
    AttentionStep step{};
    Int64Array places, seq_lens;
    Array<i32, nb::ndim<2>> block_tables;
    std::vector<ChunkArgument> chunks;

    void set_runs(const std::vector<RunArgument>& runs) {
        step.runs.clear();
        u64 last = 0;
        for (auto [adapter, begin, end] : runs) {
            require(last <= begin && begin < end && end <= step.tokens, "expected runs of tokens that are there");
            step.runs.push_back({adapter, begin, end});
            last = end;
        }
    }

    void set_read(const Int64Array& tokens) {
        step.ends.clear();
        for (const AttentionStep::Chunk& chunk : step.chunks) {
            i64 last = static_cast<i64>(chunk.first + chunk.tokens - 1);
            if (std::find(tokens.data(), tokens.data() + tokens.size(), last) != tokens.data() + tokens.size())
                step.ends.push_back({static_cast<u64>(last), 1, chunk.seq_len, chunk.blocks});
        }
        u64 behind = 0;
        for (u64 index = 0; index < tokens.size(); ++index)
            behind += tokens.data()[index] < 0 || static_cast<u64>(tokens.data()[index]) >= step.num_seqs;
        require(behind == step.ends.size(), "expected rows of one token, and last tokens of chunks");
        step.reads_ends = true;
    }

    BoundStep(const Array<i64, nb::ndim<2>>& caches, u64 num_blocks, u64 block_size, Int64Array own_places,
              Array<i32, nb::ndim<2>> own_tables, Int64Array own_lens, std::vector<ChunkArgument> own_chunks,
              bool is_float32)
        : places(std::move(own_places)),
          seq_lens(std::move(own_lens)),
          block_tables(std::move(own_tables)),
          chunks(std::move(own_chunks)) {
        require(caches.shape(1) == 2, "expected addresses of the keys and of the values of each layer");
        for (u64 layer = 0; layer < caches.shape(0); ++layer)
            step.caches.push_back({reinterpret_cast<void*>(caches.data()[2 * layer]),
                                   reinterpret_cast<void*>(caches.data()[2 * layer + 1])});
        step.dtype = is_float32 ? DType::float32 : DType::bfloat16;
        require(!is_float32 || chunks.empty(), "expected one token of each sequence in float32");
        step.block_size = block_size, step.tokens = places.size(), step.places = places.data();
        step.num_seqs = seq_lens.size(), step.table_width = block_tables.shape(1);
        step.block_tables = block_tables.data(), step.seq_lens = seq_lens.data();
        step.zeros.resize(step.num_seqs);
        require(block_tables.shape(0) == step.num_seqs && step.num_seqs <= step.tokens,
                "expected a block table and a token for each sequence");
        for (u64 token = 0; token < step.tokens; ++token)
            require(step.places[token] >= 0 && static_cast<u64>(step.places[token]) < num_blocks * block_size,
                    "expected places that are there");
        PagedAttention rows{};
        rows.block_size = block_size, rows.table_width = step.table_width, rows.num_seqs = step.num_seqs;
        rows.block_tables = step.block_tables, rows.first_positions = step.zeros.data();
        rows.seq_lens = step.seq_lens;
        require_positions(rows, num_blocks);
        for (const auto& [first, tokens, seq_len, blocks] : chunks) {
            require(tokens != 0 && first + tokens <= step.tokens && tokens <= seq_len &&
                        seq_len <= blocks.size() * block_size,
                    "expected chunks of tokens that are there, at most as many as the sequence has, and as many "
                    "blocks");
            for (u64 index = 0; index < blocks.size(); ++index)
                require(blocks.data()[index] >= 0 && static_cast<u64>(blocks.data()[index]) < num_blocks,
                        "expected blocks that are there");
            step.chunks.push_back({first, tokens, seq_len, blocks.data()});
        }
    }
};

void compute(const std::vector<const BoundLayer*>& bound, const BoundStep& step, std::pair<u64, u64> x,
             const std::vector<std::pair<u64, u64>>& cos_sins, const NormArgument& final_norm, u64 out_address,
             u64 threads, BoundRanks* ranks, u64 normed_address) {
    require(!bound.empty() && cos_sins.size() == bound.size(), "expected at least one layer, each with a rotation");
    std::vector<const DecoderLayer*> layers;
    for (const BoundLayer* each : bound) {
        require(each->layer.gate_up != nullptr || bound.size() == 1, "expected layers with an MLP, or one layer");
        require(each->layer.cache < step.step.caches.size() && each->layer.size() == bound[0]->layer.size() &&
                    each->layer.dtype() == step.step.dtype,
                "expected layers of one size, each with a cache, and of its dtype");
        layers.push_back(&each->layer);
    }
    std::vector<CosSin> rotations;
    for (auto [cos, sin] : cos_sins)
        rotations.push_back({reinterpret_cast<const void*>(cos), reinterpret_cast<const void*>(sin)});
    if (step.step.tokens == 0) return;
    python::GilRelease released;
    compute_layers(layers, step.step, reinterpret_cast<const void*>(x.first), x.second, rotations, norm_of(final_norm),
                   reinterpret_cast<void*>(out_address),
                   reinterpret_cast<void*>(normed_address == 0 ? out_address : normed_address), threads,
                   ranks == nullptr ? nullptr : &ranks->get());
}

}  // namespace

void bind_decoder_layer(nb::module_& m) {
    nb::class_<BoundLayer>(
        m, "DecoderLayer",
        "A layer in bfloat16 or float32: attention and a gated MLP, a norm before each, and residuals.")
        .def(nb::init<u64, const std::array<NormArgument, 6>&, const LinearArguments&, const std::array<u64, 4>&, float,
                      u64, float, std::optional<FloatArray>>(),
             "cache"_a, "norms"_a, "linears"_a, "heads"_a, "scale"_a, "window"_a = 0, "softcap"_a = 0.0f,
             "sinks"_a = nb::none(), nb::keep_alive<1, 4>(),
             nb::sig("def __init__(self, cache: int, norms: Sequence[tuple[int, float, bool]], linears: "
                     "tuple[PackedLinear, PackedLinear, PackedLinear | None, PackedLinear | None], heads: "
                     "Sequence[int], scale: "
                     "float, window: int = 0, softcap: float = 0.0, sinks: numpy.typing.NDArray[numpy.float32] | None "
                     "= None) -> None"),
             "`cache`: index of the layer's keys and values. `norms`: address of the weights or 0, epsilon, whether "
             "the factor is 1 + w; before attention, of its result, before the MLP, of its result, of queries, of "
             "keys. `linears`: queries, keys "
             "and values; output; gate and up; down; None twice: the layer ends before its MLP. `heads`: numbers of "
             "heads and of KV heads, sizes of a key and of "
             "a value. The rest is as in `prefill_attention`. The caller checks the addresses.")
        .def("set_adapter", &BoundLayer::set_adapter, "adapter"_a, "product"_a, "a"_a, "b"_a,
             "Adds x A^T B^T to a product for tokens with an adapter. `product`: index in `linears`.")
        .def("remove_adapter", &BoundLayer::remove_adapter, "adapter"_a,
             "Forgets A and B of an adapter. No step with tokens of the adapter may run.")
        .def_prop_ro("size", [](const BoundLayer& bound) { return bound.layer.size(); }, "Elements of a hidden state.");
    nb::class_<BoundStep>(m, "AttentionStep",
                          "The tokens of a step, and where in the KV cache their keys and values lie.")
        .def(nb::init<const Array<i64, nb::ndim<2>>&, u64, u64, Int64Array, Array<i32, nb::ndim<2>>, Int64Array,
                      std::vector<ChunkArgument>, bool>(),
             "caches"_a, "num_blocks"_a, "block_size"_a, "places"_a, "block_tables"_a, "seq_lens"_a, "chunks"_a,
             "is_float32"_a = false,
             nb::sig("def __init__(self, caches: numpy.typing.NDArray[numpy.int64], num_blocks: int, block_size: int, "
                     "places: numpy.typing.NDArray[numpy.int64], block_tables: numpy.typing.NDArray[numpy.int32], "
                     "seq_lens: numpy.typing.NDArray[numpy.int64], chunks: Sequence[tuple[int, int, int, "
                     "numpy.typing.NDArray[numpy.int32]]], is_float32: bool = False) -> None"),
             "`caches` [layers, 2]: addresses of all keys and of all values. `places`: of each token. The first tokens "
             "are of sequences with one token each, of `block_tables` and `seq_lens`. `chunks`: first token, number "
             "of tokens, length and blocks of each other sequence, in bfloat16 only. Raises ValueError for places and "
             "blocks that are "
             "not there.")
        .def("set_runs", &BoundStep::set_runs, "runs"_a,
             "Sets the tokens that have an adapter: number of the adapter, first token and token behind the last, in "
             "the order of the tokens.")
        .def("set_read", &BoundStep::set_read, "tokens"_a,
             nb::sig("def set_read(self, tokens: numpy.typing.NDArray[numpy.int64]) -> None"),
             "Sets the tokens with hidden states that are read: rows of one token, and last tokens of chunks. Those of "
             "other tokens of chunks may be anything after several layers. Raises ValueError.");
    m.def("compute_layers", &compute, "layers"_a, "step"_a, "x"_a, "cos_sins"_a, "final_norm"_a, "out_address"_a,
          "threads"_a, "ranks"_a.none() = nb::none(), "normed_address"_a = 0,
          "Computes hidden states [tokens, size] of the layers' dtype. `x`: address and stride between tokens in "
          "elements. "
          "`cos_sins`: of each layer, addresses of [tokens, size of a key]. `final_norm`: as in `DecoderLayer`; of the "
          "result, which goes to `normed_address`, or replaces the result if that is 0. `ranks`: of a model with "
          "several; all compute the same tokens. The caller checks the addresses. "
          "Raises RuntimeError if a rank ends.");
}

}  // namespace penstock::engine
