// rank_memory.h: sums and copies of the numbers of all ranks of a model, in memory that the ranks of a machine share.
//
// For operation n a rank writes its numbers to its part, says that n is written, waits until all ranks have said so,
// and reads the parts of all ranks. A rank has two parts, for even and odd operations. It writes for n + 2 after all
// ranks have said n + 1, so after all have read n.
//
// Sums are float32, in the order of the ranks, and are rounded once. So all ranks have the same bits.
#pragma once
#include <vector>

#include "paged_attention.h"
#include "wait.h"

namespace penstock::engine {

// Of one thread at a time.
class RankMemory {
   public:
    static constexpr u64 PART_NBYTES = 1 << 20, MAX_RANKS = 64;

    static u64 nbytes_of(u64 ranks) { return ranks * (sizeof(Row) + 2 * PART_NBYTES); }

    // `memory`: of `nbytes_of(ranks)` zeros, at a multiple of 64 bytes. `pidfds`: of the processes of all ranks, by
    // rank, to see that a process has ended; empty: none ends. The caller keeps both.
    RankMemory(u8* memory, u64 rank, u64 ranks, std::vector<int> pidfds)
        : rows_(reinterpret_cast<Row*>(memory)),
          parts_(memory + ranks * sizeof(Row)),
          rank_(rank),
          ranks_(ranks),
          pidfds_(std::move(pidfds)) {}

    // Adds up the numbers of all ranks, in place. Throws std::runtime_error if a rank ends, or does not come.
    // Waits also where `count` is 0: after the last sum of a step the core publishes blocks of all ranks.
    void sum(void* numbers, u64 count, DType dtype);

    // Copies rows of bytes of all ranks to `out` [rows][ranks][nbytes]. Throws as `sum`.
    void gather(const void* bytes, u64 rows, u64 nbytes, void* out);

    u64 ranks() const { return ranks_; }

   private:
    static constexpr u64 TIMEOUT_NS = 300'000'000'000;

    struct alignas(LINE) Row {
        Shared<u64> written;  // operations of the rank
        Shared<u32> cpu;      // where the rank ran last
        Bell bell;            // where the other ranks wait
    };

    u8* part(u64 rank) const { return parts_ + (number_ % 2 * ranks_ + rank) * PART_NBYTES; }
    void exchange(const void* bytes, u64 nbytes);  // at most a part
    void await(u64 rank);
    void require_alive(u64 rank) const;

    Row* rows_;
    u8* parts_;  // [2][ranks][PART_NBYTES]
    u64 rank_, ranks_;
    std::vector<int> pidfds_;
    u64 number_ = 0;  // operations so far
    Spinner spinner_;
    Waits waits_{};
};

}  // namespace penstock::engine
