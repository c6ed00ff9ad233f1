// bindings_rotary.cpp: rotary embedding and cache write of tensors of torch, which are given by their addresses.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <stdexcept>

#include "bindings_engine.h"
#include "gil.h"
#include "rotary.h"

namespace penstock::engine {

using namespace nb::literals;

namespace {

using HeadsArgument = std::tuple<u64, i64, u64, u64>;

Rotary::Heads heads_of(const HeadsArgument& argument) {
    auto [address, stride, count, norm] = argument;
    return {reinterpret_cast<const void*>(address), stride, reinterpret_cast<const void*>(norm), count};
}

void compute(const HeadsArgument& queries, const HeadsArgument& keys, const HeadsArgument& values,
             std::pair<u64, u64> cos_sin, float epsilon, bool adds_one, std::pair<u64, u64> sizes, u64 tokens,
             u64 places, std::tuple<u64, u64, u64> outputs, bool is_bfloat16, u64 threads) {
    auto [size, value_size] = sizes;
    if (size == 0 || size % 2 != 0 || size > Rotary::MAX_SIZE)
        throw std::invalid_argument("expected heads of an even size of at most 512");
    auto [out, cached_keys, cached_values] = outputs;
    Rotary problem{is_bfloat16 ? DType::bfloat16 : DType::float32,
                   heads_of(queries),
                   heads_of(keys),
                   heads_of(values),
                   reinterpret_cast<const void*>(cos_sin.first),
                   reinterpret_cast<const void*>(cos_sin.second),
                   epsilon,
                   adds_one,
                   size,
                   value_size,
                   tokens,
                   reinterpret_cast<const i64*>(places),
                   reinterpret_cast<void*>(out),
                   reinterpret_cast<void*>(cached_keys),
                   reinterpret_cast<void*>(cached_values)};
    python::GilRelease released;
    compute_rotary(problem, threads);
}

}  // namespace

void bind_rotary(nb::module_& m) {
    m.attr("MAX_ROTARY_SIZE") = Rotary::MAX_SIZE;
    m.def("rotary", &compute, "queries"_a, "keys"_a, "values"_a, "cos_sin"_a, "epsilon"_a, "adds_one"_a, "sizes"_a,
          "tokens"_a, "places"_a, "outputs"_a, "is_bfloat16"_a, "threads"_a,
          "Normalizes and rotates queries and keys, and writes keys and values to the cache. `queries`, `keys`, "
          "`values`: address, stride between tokens in elements, number of heads, address of the weights of a norm or "
          "0. `cos_sin`: addresses of [tokens, size]. `sizes`: of a key and of a value. `places`: the address of the "
          "places of the tokens in the cache. `outputs`: addresses of the queries, and of all cached keys and values. "
          "The caller checks the addresses.");
}

}  // namespace penstock::engine
