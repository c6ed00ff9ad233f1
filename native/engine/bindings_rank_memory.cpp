// bindings_rank_memory.cpp: sums of the ranks of a model, for tensors of torch, which are given by their addresses.
#include "bindings_rank_memory.h"

#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "gil.h"

namespace penstock::engine {

using namespace nb::literals;

BoundRanks::BoundRanks(Bytes memory, u64 rank, u64 ranks, std::vector<int> pidfds)
    : memory_(std::move(memory)), ranks_(memory_.data(), rank, ranks, std::move(pidfds)) {
    if (rank >= ranks || ranks > RankMemory::MAX_RANKS)
        throw std::invalid_argument("expected a rank of at most 64 ranks");
    if (memory_.size() < RankMemory::nbytes_of(ranks) || reinterpret_cast<std::uintptr_t>(memory_.data()) % LINE != 0)
        throw std::invalid_argument(format("expected memory of %llu bytes at a multiple of 64 bytes",
                                           (unsigned long long)RankMemory::nbytes_of(ranks)));
}

void bind_rank_memory(nb::module_& m) {
    nb::class_<BoundRanks>(m, "RankMemory", "Adds up numbers of all ranks of a model, in memory that the ranks share.")
        .def(
            nb::init<BoundRanks::Bytes, u64, u64, std::vector<int>>(), "memory"_a, "rank"_a, "ranks"_a, "pidfds"_a,
            nb::sig("def __init__(self, memory: numpy.typing.NDArray[numpy.uint8], rank: int, ranks: int, pidfds: "
                    "Sequence[int]) -> None"),
            "`memory`: of `rank_memory_nbytes` zeros, which all ranks map. `pidfds`: of the processes of all ranks, by "
            "rank; empty: no rank ends before this one.")
        .def(
            "sum",
            [](BoundRanks& bound, u64 address, u64 count, bool is_bfloat16) {
                python::GilRelease released;
                bound.get().sum(reinterpret_cast<void*>(address), count,
                                is_bfloat16 ? DType::bfloat16 : DType::float32);
            },
            "address"_a, "count"_a, "is_bfloat16"_a,
            "Adds up numbers of all ranks, in place. Blocks until all ranks have called. Raises RuntimeError if a rank "
            "ends. The caller checks the address.")
        .def(
            "gather",
            [](BoundRanks& bound, u64 address, u64 rows, u64 nbytes, u64 out_address) {
                python::GilRelease released;
                bound.get().gather(reinterpret_cast<const void*>(address), rows, nbytes,
                                   reinterpret_cast<void*>(out_address));
            },
            "address"_a, "rows"_a, "nbytes"_a, "out_address"_a,
            "Copies rows of bytes of all ranks to [rows, ranks, nbytes] at `out_address`. Blocks and raises as `sum`.");
    m.def("rank_memory_nbytes", &RankMemory::nbytes_of, "ranks"_a, "Bytes of the memory of so many ranks.");
}

}  // namespace penstock::engine
