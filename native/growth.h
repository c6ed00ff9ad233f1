// growth.h: rows of numbers that grow by one at a time, and lie in blocks of a cache: when a block of a row has become
// full, its hash is computed, and from then on the block is found by it. Leaves to the caller whose rows they are.
#pragma once
#include <limits>

#include "cached.h"

namespace penstock {

// Of a full block. Equal hashes mean that all is equal that is before it, too.
inline Digest hash_after(const Digest& before, const void* numbers, u64 nbytes, const void* more, u64 more_nbytes) {
    Sha256 hash;
    hash.add(before.data(), before.size());
    hash.add(numbers, nbytes);
    hash.add(more, more_nbytes);
    return hash.digest();
}

// Numbers come for steps, whose own numbers grow. A row takes part in those from its birth until its end.
class Growth {
   public:
    static constexpr i64 NEVER = std::numeric_limits<i64>::max();

    Growth(CachedBlocks& cache, u32 rows, u32 size)
        : cache_(cache),
          size_(size),
          born_(rows, NEVER),
          since_(rows, NEVER),
          count_(rows, 0),
          next_full_(rows, NEVER_FULL),
          tails_(u64{rows} * size, 0),
          chains_(rows),
          more_(rows),
          told_(rows, 0) {
        if (size == 0) throw Error(Fault::value, "a block has at least one number");
    }
    u32 rows() const { return static_cast<u32>(born_.size()); }
    u32 size() const { return size_; }
    const CachedBlocks& cache() const { return cache_; }

    // ── a row ──
    // It begins anew. `chain`: that which its first block follows, then the hashes of its full blocks. `tail`: the
    // numbers after those, fewer than fill a block; `more`: what else lies where they lie.
    void join(u32 row, std::vector<Digest> chain, const i32* tail, u64 count, std::vector<u8> more) {
        born_[row] = since_[row] = NEVER;
        count_[row] = static_cast<i64>((chain.size() - 1) * size_ + count);
        next_full_[row] = NEVER_FULL;
        std::copy(tail, tail + count, tails_.begin() + u64{row} * size_);
        told_[row] = static_cast<u32>(chain.size());
        chains_[row] = std::move(chain);
        more_[row] = std::move(more);
    }
    // It has got blocks, so many of which are published.
    void begin(u32 row, u64 published) { next_full_[row] = static_cast<i32>((published + 1) * size_); }
    // The step with which it got them; with the first of those it was born.
    void since(u32 row, i64 step) {
        since_[row] = step;
        if (born_[row] == NEVER) born_[row] = step;
    }
    // What comes for it from now on is nobody's.
    void end(u32 row) { born_[row] = NEVER; }
    i64 born(u32 row) const { return born_[row]; }
    i64 count(u32 row) const { return count_[row]; }
    const std::vector<Digest>& chain(u32 row) const { return chains_[row]; }

    // ── a step ──
    // It is done: so many numbers of each row are computed. Blocks that are full by it are published. has_blocks(row):
    // those that it had then are still its own; block(row, at) is one of them. False: somebody has published a block
    // that nobody uses.
    template <class HasBlocks, class Block>
    bool publish(i64 step, const i32* computed, HasBlocks&& has_blocks, Block&& block) {
        bool are_used = true;
        for (u32 row = 0; row < rows(); ++row) {
            if (computed[row] < next_full_[row] || born_[row] > step) continue;
            auto full = static_cast<u32>(computed[row]) / size_;
            auto begun = static_cast<u32>(next_full_[row]) / size_ - 1;
            next_full_[row] = static_cast<i32>((full + 1) * size_);
            std::vector<Digest>& chain = chains_[row];
            if (full > chain.size())
                throw Error(Fault::value, format("row %u is computed farther than it is known", row));
            if (full == chain.size()) {  // the tail is full: the next number takes the place of the first in it
                const std::vector<u8>& more = more_[row];
                chain.push_back(hash_after(chain.back(), &tails_[u64{row} * size_], u64{size_} * sizeof(i32),
                                           more.data(), more.size()));
                more_[row].clear();
            }
            if (since_[row] > step || !has_blocks(row)) continue;  // it was preempted, and will look for their likes
            for (u32 at = begun; at < full; ++at) are_used &= cache_.publish(block(row, at), chain[at + 1]);
        }
        return are_used;
    }
    // A step has brought a number for each of these rows. False: some of them have ended, and it was not theirs.
    bool keep(i64 step, const i64* rows, const i32* numbers, u64 count) {
        bool are_theirs = true;
        for (u64 i = 0; i < count; ++i) {
            auto row = static_cast<u32>(rows[i]);
            if (born_[row] > step)
                are_theirs = false;
            else
                tails_[u64{row} * size_ + static_cast<u64>(count_[row]++) % size_] = numbers[i];
        }
        return are_theirs;
    }
    // told(row, numbers): its blocks are full up to there, and were not when this was called last.
    template <class Told>
    void tell_full(Told&& told) {
        for (u32 row = 0; row < rows(); ++row) {
            if (told_[row] == chains_[row].size() || born_[row] == NEVER) continue;
            told_[row] = static_cast<u32>(chains_[row].size());
            told(row, u64{told_[row] - 1} * size_);
        }
    }

   private:
    static constexpr i32 NEVER_FULL = std::numeric_limits<i32>::max();

    CachedBlocks& cache_;
    u32 size_;                       // numbers of a block
    std::vector<i64> born_, since_;  // steps; NEVER: it has none, or has ended
    std::vector<i64> count_;         // numbers that we have
    std::vector<i32> next_full_;     // so many that are computed fill a block that is not published
    std::vector<i32> tails_;         // those of the last block of each row
    std::vector<std::vector<Digest>> chains_;
    std::vector<std::vector<u8>> more_;  // what else lies in the block that is filled next
    std::vector<u32> told_;
};

}  // namespace penstock
