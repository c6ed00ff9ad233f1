// bindings_rms_norm.cpp: RMS norms of tensors of torch, which are given by their addresses.
#include <stdexcept>

#include "bindings_engine.h"
#include "gil.h"
#include "rms_norm.h"

namespace penstock::engine {

using namespace nb::literals;

namespace {

void compute(u64 x_address, i64 x_stride, u64 rows, u64 size, u64 weight_address, u64 out_address, float epsilon,
             bool adds_one, bool is_bfloat16, u64 threads) {
    if (size == 0) throw std::invalid_argument("expected at least one element in a row");
    RmsNorm norm{is_bfloat16 ? DType::bfloat16 : DType::float32,
                 reinterpret_cast<const void*>(x_address),
                 reinterpret_cast<const void*>(weight_address),
                 reinterpret_cast<void*>(out_address),
                 rows,
                 size,
                 x_stride,
                 epsilon,
                 adds_one};
    python::GilRelease released;
    compute_norm(norm, threads);
}

}  // namespace

void bind_rms_norm(nb::module_& m) {
    m.def("rms_norm", &compute, "x_address"_a, "x_stride"_a, "rows"_a, "size"_a, "weight_address"_a, "out_address"_a,
          "epsilon"_a, "adds_one"_a, "is_bfloat16"_a, "threads"_a,
          "Computes x / sqrt(mean(x^2) + epsilon) * w of each row, in float32 or bfloat16. `adds_one`: the factor is "
          "1 + w. The caller checks the addresses; the stride is in elements.");
}

}  // namespace penstock::engine
