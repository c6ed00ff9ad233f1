// bindings_rank_memory.h: the class RankMemory of Python, which layers of a decoder use, too.
#pragma once
#include <vector>

#include "bindings_engine.h"
#include "rank_memory.h"

namespace penstock::engine {

class BoundRanks {
   public:
    using Bytes = nb::ndarray<u8, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

    BoundRanks(Bytes memory, u64 rank, u64 ranks, std::vector<int> pidfds);
    RankMemory& get() { return ranks_; }

   private:
    Bytes memory_;
    RankMemory ranks_;
};

}  // namespace penstock::engine
