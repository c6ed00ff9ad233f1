// bindings_paged_attention.cpp: paged attention of NumPy arrays.
#include <nanobind/stl/optional.h>

#include <stdexcept>

#include "bindings_engine.h"
#include "gil.h"
#include "paged_attention.h"
#include "prefill_attention.h"

namespace penstock::engine {

using namespace nb::literals;

namespace {

using Vectors = nb::ndarray<nb::ro, nb::ndim<3>, nb::device::cpu>;
using Result = nb::ndarray<nb::ndim<3>, nb::device::cpu>;

DType dtype_of(const Vectors& vectors) {
    if (vectors.dtype() == nb::dtype<float>()) return DType::float32;
    if (vectors.dtype() == nb::dtype<u16>()) return DType::bfloat16;
    throw std::invalid_argument("expected arrays of float32, or of uint16 with the bits of bfloat16");
}

void require(bool is_right, const char* expected) {
    if (!is_right) throw std::invalid_argument(expected);
}

template <class Any>
bool is_contiguous(const Any& vectors) {
    i64 size = static_cast<i64>(vectors.shape(2)), heads = static_cast<i64>(vectors.shape(1));
    return vectors.stride(2) == 1 && vectors.stride(1) == size && vectors.stride(0) == heads * size;
}

// The shapes that both kinds of attention have in common.
void require_heads(const Vectors& queries, const Vectors& keys, const Vectors& values, const Result& out) {
    u64 num_heads = queries.shape(1), num_kv_heads = keys.shape(1), key_size = queries.shape(2);
    require(num_kv_heads != 0 && num_heads % num_kv_heads == 0 && values.shape(1) == num_kv_heads,
            "expected a number of query heads that is a multiple of the number of KV heads");
    require(keys.shape(2) == key_size && keys.shape(0) == values.shape(0),
            "expected keys of the size of the queries, and a value for each key");
    require(is_contiguous(keys) && is_contiguous(values) && (queries.stride(2) == 1 || key_size == 1),
            "expected contiguous keys and values, and queries with contiguous heads");
    require(out.shape(0) == queries.shape(0) && out.shape(1) == num_heads && out.shape(2) == values.shape(2) &&
                is_contiguous(out),
            "expected a contiguous out with a value for each query");
}

void attend(const Vectors& queries, const Vectors& keys, const Vectors& values, const Result& out,
            const Array<i32, nb::ndim<2>>& block_tables, const Int64Array& first_positions, const Int64Array& seq_lens,
            u64 block_size, float scale, float softcap, std::optional<Array<float, nb::ndim<1>>> sinks, u64 threads) {
    PagedAttention p{};
    p.dtype = dtype_of(queries);
    require(dtype_of(keys) == p.dtype && dtype_of(values) == p.dtype && out.dtype() == queries.dtype(),
            "expected queries, keys, values and out of one dtype");
    p.num_seqs = queries.shape(0), p.num_heads = queries.shape(1), p.key_size = queries.shape(2);
    p.num_kv_heads = keys.shape(1), p.value_size = values.shape(2);
    p.block_size = block_size, p.table_width = block_tables.shape(1);
    require_heads(queries, keys, values, out);
    require(
        block_tables.shape(0) == p.num_seqs && first_positions.size() == p.num_seqs && seq_lens.size() == p.num_seqs,
        "expected a block table, a first position and a length for each sequence");
    require(block_size != 0 && block_size <= keys.shape(0), "expected a block size of 1 to the number of keys");
    require(!sinks || sinks->size() == p.num_heads, "expected a sink for each query head, or none");
    p.queries = queries.data(), p.keys = keys.data(), p.values = values.data(), p.out = out.data();
    p.query_seq_stride = queries.stride(0), p.query_head_stride = queries.stride(1);
    p.block_tables = block_tables.data(), p.first_positions = first_positions.data(), p.seq_lens = seq_lens.data();
    p.scale = scale, p.softcap = softcap;
    p.sinks = sinks ? sinks->data() : nullptr;
    require_positions(p, keys.shape(0) / block_size);
    python::GilRelease released;
    attend_rows(p, threads);
}

void prefill(const Vectors& queries, const Vectors& keys, const Vectors& values, const Result& out,
             const Int32Array& blocks, u64 seq_len, u64 block_size, float scale, u64 window, float softcap,
             std::optional<Array<float, nb::ndim<1>>> sinks, u64 threads) {
    PrefillAttention p{};
    require(dtype_of(queries) == DType::bfloat16 && keys.dtype() == queries.dtype() &&
                values.dtype() == queries.dtype() && out.dtype() == queries.dtype(),
            "expected arrays of uint16 with the bits of bfloat16");
    p.tokens = queries.shape(0), p.num_heads = queries.shape(1), p.key_size = queries.shape(2);
    p.num_kv_heads = keys.shape(1), p.value_size = values.shape(2);
    require_heads(queries, keys, values, out);
    p.block_size = block_size, p.seq_len = seq_len, p.window = window;
    require(block_size != 0 && p.tokens != 0 && p.tokens <= seq_len && seq_len <= blocks.size() * block_size,
            "expected at most as many tokens as the sequence has, and as many blocks");
    u64 num_blocks = keys.shape(0) / block_size;
    for (u64 index = 0; index < blocks.size(); ++index)
        require(blocks.data()[index] >= 0 && static_cast<u64>(blocks.data()[index]) < num_blocks,
                "expected blocks that are there");
    require(!sinks || sinks->size() == p.num_heads, "expected a sink for each query head, or none");
    p.queries = static_cast<const u16*>(queries.data()), p.keys = static_cast<const u16*>(keys.data());
    p.values = static_cast<const u16*>(values.data()), p.out = static_cast<u16*>(out.data());
    p.query_token_stride = queries.stride(0), p.query_head_stride = queries.stride(1);
    p.blocks = blocks.data(), p.scale = scale, p.softcap = softcap, p.sinks = sinks ? sinks->data() : nullptr;
    python::GilRelease released;
    attend_chunk(p, threads);
}

}  // namespace

void bind_paged_attention(nb::module_& m) {
    m.def("paged_attention", &attend, "queries"_a, "keys"_a, "values"_a, "out"_a, "block_tables"_a, "first_positions"_a,
          "seq_lens"_a, "block_size"_a, "scale"_a, "softcap"_a = 0.0f, "sinks"_a = nb::none(), "threads"_a = 1,
          nb::sig(
              "def paged_attention(queries: numpy.typing.NDArray[typing.Any], keys: "
              "numpy.typing.NDArray[typing.Any], values: numpy.typing.NDArray[typing.Any], out: "
              "numpy.typing.NDArray[typing.Any], block_tables: numpy.typing.NDArray[numpy.int32], first_positions: "
              "numpy.typing.NDArray[numpy.int64], seq_lens: numpy.typing.NDArray[numpy.int64], block_size: int, "
              "scale: float, softcap: float = 0.0, sinks: numpy.typing.NDArray[numpy.float32] | None = None, threads: "
              "int = 1) -> None"),
          "Writes to `out` [sequences, heads, value size] the attention of one query per sequence: `queries` "
          "[sequences, heads, key size] attend to `keys` and `values` [positions, KV heads, size] in the blocks of "
          "`block_tables` [sequences, width], from `first_positions` up to `seq_lens`. Arrays are of float32, or of "
          "uint16 with the bits of bfloat16. `softcap` bounds scores by tanh; `sinks` has a score without a value for "
          "each head. Raises ValueError for shapes that do not fit and for blocks that are not there.");
    m.def("prefill_attention", &prefill, "queries"_a, "keys"_a, "values"_a, "out"_a, "blocks"_a, "seq_len"_a,
          "block_size"_a, "scale"_a, "window"_a = 0, "softcap"_a = 0.0f, "sinks"_a = nb::none(), "threads"_a = 1,
          nb::sig("def prefill_attention(queries: numpy.typing.NDArray[numpy.uint16], keys: "
                  "numpy.typing.NDArray[numpy.uint16], values: numpy.typing.NDArray[numpy.uint16], out: "
                  "numpy.typing.NDArray[numpy.uint16], blocks: numpy.typing.NDArray[numpy.int32], seq_len: int, "
                  "block_size: int, scale: float, window: int = 0, softcap: float = 0.0, sinks: "
                  "numpy.typing.NDArray[numpy.float32] | None = None, threads: int = 1) -> None"),
          "Writes to `out` [tokens, heads, value size] the attention of the last tokens of one sequence: `queries` "
          "[tokens, heads, key size] attend to `keys` and `values` [positions, KV heads, size] in `blocks`, each up "
          "to its own position. Arrays have the bits of bfloat16. `window`: a token attends to so many positions; 0: "
          "to all. `softcap` and `sinks`: as in `paged_attention`. Raises ValueError for shapes that do not fit and "
          "for blocks that are not there.");
}

}  // namespace penstock::engine
