// bindings_token_choice.cpp: the choice of tokens from logits of torch, which are given by their address.
#include <stdexcept>
#include <vector>

#include "bindings_engine.h"
#include "gil.h"
#include "token_choice.h"

namespace penstock::engine {

using namespace nb::literals;

namespace {

using Float32Array = Array<float, nb::ndim<1>>;
using IdArray = nb::ndarray<i32, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ResultArray = nb::ndarray<u8, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void choose(u64 address, i64 stride, u64 vocabulary, Float32Array temperatures, Int64Array top_ks, Float32Array top_ps,
            Float32Array min_ps, Float32Array draws, Int64Array masked, Array<i32, nb::ndim<2>> bits, IdArray ids,
            ResultArray results, u64 threads) {
    u64 rows = temperatures.shape(0);
    for (u64 size : {top_ks.shape(0), top_ps.shape(0), min_ps.shape(0), draws.shape(0), ids.shape(0), results.shape(0)})
        if (size != rows) throw std::invalid_argument("expected an entry for each row in each column");
    if (masked.shape(0) != bits.shape(0) || (bits.shape(0) != 0 && bits.shape(1) * 32 < vocabulary))
        throw std::invalid_argument("expected a bit for each token of each row with a mask");
    std::vector<const u32*> allowed(rows, nullptr);
    for (u64 at = 0; at < masked.shape(0); ++at) {
        i64 row = masked.data()[at];
        if (row < 0 || static_cast<u64>(row) >= rows) throw std::invalid_argument("a mask is of no row");
        allowed[static_cast<u64>(row)] = reinterpret_cast<const u32*>(bits.data()) + at * bits.shape(1);
    }
    for (u64 row = 0; row < rows; ++row)
        if (top_ks.data()[row] < 1) throw std::invalid_argument("expected a top_k of at least 1");
    TokenChoices choices{reinterpret_cast<float*>(address),
                         stride,
                         rows,
                         vocabulary,
                         temperatures.data(),
                         top_ks.data(),
                         top_ps.data(),
                         min_ps.data(),
                         draws.data(),
                         allowed.data(),
                         ids.data(),
                         reinterpret_cast<Choice*>(results.data())};
    python::GilRelease released;
    choose_tokens(choices, threads);
}

}  // namespace

void bind_token_choice(nb::module_& m) {
    m.def(
        "choose_tokens", &choose, "address"_a, "stride"_a, "vocabulary"_a, "temperatures"_a, "top_ks"_a, "top_ps"_a,
        "min_ps"_a, "draws"_a, "masked"_a, "bits"_a, "ids"_a, "results"_a, "threads"_a,
        "Chooses a token from each row of float32 logits. `temperatures`: 0: the likeliest token. `draws`: of [0, 1). "
        "`masked`: rows of which only the tokens with a set bit may come; the logits of the others become -inf. "
        "`results`: 0: chosen; 1: the greatest logit is no number; 2: the mask leaves no token. The caller checks the "
        "address; the stride is in elements.");
}

}  // namespace penstock::engine
