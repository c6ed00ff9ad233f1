// bindings_attend.cpp: attention over blocks, for processors.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include "attend.h"
#include "python.h"

namespace penstock::python {

using namespace nb::literals;

namespace {

using Vectors = nb::ndarray<nb::ro, nb::ndim<3>, nb::device::cpu>;
template <class Kind, class... Shape>
using Column = nb::ndarray<const Kind, Shape..., nb::c_contig, nb::device::cpu>;

Number number_of(const Vectors& vectors) {
    if (vectors.dtype() == nb::dtype<float>()) return Number::float32;
    if (vectors.dtype() == nb::dtype<u16>()) return Number::bfloat16;
    throw Error(Fault::value, "vectors are of float32, or of uint16, which are the bits of bfloat16");
}

void require(bool is_right, const char* what) {
    if (!is_right) throw Error(Fault::value, what);
}

// One after the other, as `groups` of vectors for every position.
bool is_whole(const Vectors& vectors) {
    i64 size = static_cast<i64>(vectors.shape(2)), groups = static_cast<i64>(vectors.shape(1));
    return vectors.stride(2) == 1 && vectors.stride(1) == size && vectors.stride(0) == groups * size;
}

void attend_rows(const Vectors& queries, const Vectors& keys, const Vectors& values,
                 const nb::ndarray<nb::ndim<3>, nb::device::cpu>& out, const Column<i32, nb::ndim<2>>& table,
                 const Column<i64, nb::ndim<1>>& firsts, const Column<i64, nb::ndim<1>>& lengths, u64 block_size,
                 float scale, float cap, std::optional<Column<float, nb::ndim<1>>> sinks, u64 part, u64 parts) {
    Attending asked{};
    asked.number = number_of(queries);
    require(number_of(keys) == asked.number && number_of(values) == asked.number && out.dtype() == queries.dtype(),
            "queries, keys, values and what comes out are of one type");
    asked.rows = queries.shape(0), asked.heads = queries.shape(1), asked.key_size = queries.shape(2);
    asked.groups = keys.shape(1), asked.value_size = values.shape(2);
    asked.block_size = block_size, asked.width = table.shape(1);
    require(asked.groups != 0 && asked.heads % asked.groups == 0 && values.shape(1) == asked.groups,
            "heads are divided among the groups of keys and values");
    require(keys.shape(2) == asked.key_size && keys.shape(0) == values.shape(0), "keys are as large as queries");
    require(is_whole(keys) && is_whole(values) && (queries.stride(2) == 1 || asked.key_size == 1),
            "what belongs to one head lies together");
    require(out.shape(0) == asked.rows && out.shape(1) == asked.heads && out.shape(2) == asked.value_size &&
                out.stride(2) == 1 && out.stride(1) == static_cast<i64>(asked.value_size) &&
                out.stride(0) == static_cast<i64>(asked.heads * asked.value_size),
            "what comes out is whole, a value for each query");
    require(table.shape(0) == asked.rows && firsts.size() == asked.rows && lengths.size() == asked.rows,
            "every row has blocks, a first position and a length");
    require(block_size != 0 && block_size <= keys.shape(0), "a block has at least one position");
    require(!sinks || sinks->size() == asked.heads, "every head has a sink, or none");
    asked.queries = queries.data(), asked.keys = keys.data(), asked.values = values.data(), asked.out = out.data();
    asked.query_row = queries.stride(0), asked.query_head = queries.stride(1);
    asked.table = table.data(), asked.firsts = firsts.data(), asked.lengths = lengths.data();
    asked.scale = scale, asked.cap = cap;
    asked.sinks = sinks ? sinks->data() : nullptr;
    require(part < parts, "a part is below the number of parts");
    require_positions(asked, keys.shape(0) / block_size);
    GilRelease released;
    std::vector<float> scratch(asked.scratch());
    attend(asked, first_pair(asked, part, parts), first_pair(asked, part + 1, parts), scratch.data());
}

}  // namespace

void bind_attend(nb::module_& m) {
    m.def("attend", &attend_rows, "queries"_a, "keys"_a, "values"_a, "out"_a, "table"_a, "firsts"_a, "lengths"_a,
          "block_size"_a, "scale"_a, "cap"_a = 0.0f, "sinks"_a = nb::none(), "part"_a = 0, "parts"_a = 1,
          nb::sig("def attend(queries: numpy.typing.NDArray[typing.Any], keys: numpy.typing.NDArray[typing.Any], "
                  "values: numpy.typing.NDArray[typing.Any], out: numpy.typing.NDArray[typing.Any], "
                  "table: numpy.typing.NDArray[numpy.int32], firsts: numpy.typing.NDArray[numpy.int64], "
                  "lengths: numpy.typing.NDArray[numpy.int64], block_size: int, scale: float, cap: float = 0.0, "
                  "sinks: numpy.typing.NDArray[numpy.float32] | None = None, part: int = 0, parts: int = 1) -> None"),
          "Every row of queries [rows, heads, size] attends to keys and values [positions, groups, size] in the blocks "
          "of its row in `table`, from its first position up to its length. Of float32, or of uint16, which are the "
          "bits of bfloat16. With a `cap`, scores are pulled below it by tanh; `sinks` are scores without a value, one "
          "a head. Of so many `parts` of the work this does one; all together do it once.");
}

}  // namespace penstock::python
