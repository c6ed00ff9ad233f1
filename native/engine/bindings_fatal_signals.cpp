// bindings_fatal_signals.cpp: record_fatal_signals, which each child process of the launcher calls once.
#include "bindings_engine.h"
#include "fatal_signals.h"

namespace penstock::engine {

void bind_fatal_signals(nb::module_& m) {
    m.def(
        "record_fatal_signals",
        [](nb::ndarray<std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> words, std::size_t index) {
            if (index >= words.shape(0)) throw std::invalid_argument("expected the index of one of the words");
            static_assert(sizeof(Atomic<std::uint64_t>) == sizeof(std::uint64_t));
            record_fatal_signals(reinterpret_cast<Atomic<std::uint64_t>*>(words.data() + index));
            (void)words.cast(nb::rv_policy::reference).release();  // mapped until the process ends
        },
        nb::arg("words"), nb::arg("index"),
        "Stores the number, the code and the sender of the first signal that ends this process in a word of shared "
        "memory: number | code << 8 | sender << 32. The array is kept until the process ends.");
}

}  // namespace penstock::engine
