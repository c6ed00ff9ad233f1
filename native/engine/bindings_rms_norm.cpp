// bindings_rms_norm.cpp: RMS norms of tensors of torch, which are given by their addresses.
#include <stdexcept>

#include "bindings_engine.h"
#include "cpu_features.h"
#include "gil.h"
#include "rms_norm.h"
#include "thread_team.h"

namespace penstock::engine {

using namespace nb::literals;

void rms_norm(const RmsNorm& norm, u64 first, u64 last) {
#if defined(__x86_64__)
#if defined(PENSTOCK_COMPILES_BF16)
    if (has_avx512_bf16()) return rms_norm_avx512_bf16(norm, first, last);
#endif
    if (has_avx2()) return rms_norm_avx2(norm, first, last);
#endif
    rms_norm_portable(norm, first, last);
}

namespace {

constexpr u64 CHUNK = 1 << 15;  // elements: several times what it takes to wake a thread

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
    u64 each = CHUNK / size + 1, chunks = (rows + each - 1) / each;
    ThreadTeam::get().run(threads, chunks, [&](u64 chunk) {
        u64 first = chunk * each, last = first + each;
        rms_norm(norm, first, last < rows ? last : rows);
    });
}

}  // namespace

void bind_rms_norm(nb::module_& m) {
    m.def("rms_norm", &compute, "x_address"_a, "x_stride"_a, "rows"_a, "size"_a, "weight_address"_a, "out_address"_a,
          "epsilon"_a, "adds_one"_a, "is_bfloat16"_a, "threads"_a,
          "Computes x / sqrt(mean(x^2) + epsilon) * w of each row, in float32 or bfloat16. `adds_one`: the factor is "
          "1 + w. The caller checks the addresses; the stride is in elements.");
}

}  // namespace penstock::engine
