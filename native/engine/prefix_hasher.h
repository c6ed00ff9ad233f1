// prefix_hasher.h: hashes KV-cache blocks as sequences fill them, and publishes them in the block cache once they are
// computed. Token ids arrive per step; step numbers increase.
#pragma once
#include "block_cache.h"

namespace penstock::engine {

// Computes the hash of a full block. It covers the parent's hash, so equal hashes mean equal prefixes. `extra`: what
// else decides the block's keys and values, such as images. A cryptographic hash: with a collision one user would see
// what another wrote.
using HashBlock = BlockHash (*)(const BlockHash& parent, const i32* token_ids, u64 num_tokens, const void* extra,
                                u64 extra_nbytes);

// One sequence per slot. A sequence takes part in the steps from its first step until it is finished.
class PrefixHasher {
   public:
    static constexpr i64 NO_STEP = std::numeric_limits<i64>::max();

    PrefixHasher(BlockCache& cache, u32 num_slots, u32 block_size, HashBlock hash_block)
        : cache_(cache),
          hash_block_(hash_block),
          block_size_(block_size),
          first_step_(num_slots, NO_STEP),
          allocated_step_(num_slots, NO_STEP),
          num_tokens_(num_slots, 0),
          publish_at_(num_slots, NEVER_FULL),
          tails_(u64{num_slots} * block_size, 0),
          chains_(num_slots),
          extra_(num_slots),
          reported_(num_slots, 0) {
        if (block_size == 0) throw std::invalid_argument("a block has at least one token");
        if (!cache.fits_tails(num_slots, block_size))
            throw std::invalid_argument("the ledger has other slots or blocks");
    }
    u32 num_slots() const { return static_cast<u32>(first_step_.size()); }
    u32 block_size() const { return block_size_; }
    const BlockCache& cache() const { return cache_; }

    // ── a sequence ──
    // Puts a new sequence into the slot. `chain`: the root hash and the hashes of the prompt's full blocks; `tail`: the
    // prompt's ids after those, fewer than a block; `extra`: of the block that the tail begins.
    void add_sequence(u32 slot, std::vector<BlockHash> chain, const i32* tail, u64 tail_length, std::vector<u8> extra) {
        first_step_[slot] = allocated_step_[slot] = NO_STEP;
        num_tokens_[slot] = static_cast<i64>((chain.size() - 1) * block_size_ + tail_length);
        publish_at_[slot] = NEVER_FULL;
        std::copy(tail, tail + tail_length, tails_.begin() + u64{slot} * block_size_);
        reported_[slot] = static_cast<u32>(chain.size());
        chains_[slot] = std::move(chain);
        extra_[slot] = std::move(extra);
    }
    // The sequence has been given blocks, also after a preemption; the first `num_cached` are published already.
    void allocate(u32 slot, u64 num_cached) { publish_at_[slot] = static_cast<i32>((num_cached + 1) * block_size_); }
    // The step that first uses the blocks given by allocate().
    void schedule(u32 slot, i64 step) {
        allocated_step_[slot] = step;
        if (first_step_[slot] == NO_STEP) first_step_[slot] = step;
    }
    // Tokens that still arrive for the sequence are ignored from now on.
    void finish(u32 slot) { first_step_[slot] = NO_STEP; }
    // NO_STEP before its first step and after its end.
    i64 first_step(u32 slot) const { return first_step_[slot]; }
    i64 num_tokens(u32 slot) const { return num_tokens_[slot]; }
    const std::vector<BlockHash>& chain(u32 slot) const { return chains_[slot]; }

    // ── a step ──
    // The step is done, and num_computed[slot] tokens of each sequence are computed. Publishes the blocks that are full
    // by it. is_running(slot): it has blocks now; block(slot, index) is one of them. False: a block to be published was
    // not in use.
    template <class IsRunning, class Block>
    bool publish(i64 step, const i32* num_computed, IsRunning&& is_running, Block&& block) {
        bool are_in_use = true;
        for (u32 slot = 0; slot < num_slots(); ++slot) {
            if (first_step_[slot] > step) continue;
            if (num_computed[slot] < publish_at_[slot]) {
                if (cache_.has_tails() && allocated_step_[slot] <= step && is_running(slot))
                    publish_tail(slot, static_cast<u32>(num_computed[slot]), block);
                continue;
            }
            auto num_full = static_cast<u32>(num_computed[slot]) / block_size_;
            auto num_published = static_cast<u32>(publish_at_[slot]) / block_size_ - 1;
            publish_at_[slot] = static_cast<i32>((num_full + 1) * block_size_);
            std::vector<BlockHash>& chain = chains_[slot];
            if (num_full > chain.size())
                throw std::invalid_argument(
                    format("slot %u: %d tokens are computed, and fewer are known", slot, num_computed[slot]));
            if (num_full == chain.size()) {  // the tail is full; the next id overwrites its first
                std::vector<u8>& extra = extra_[slot];
                chain.push_back(hash_block_(chain.back(), &tails_[u64{slot} * block_size_], block_size_, extra.data(),
                                            extra.size()));
                extra.clear();
            }
            // Preempted since this step was sent: these blocks are not the sequence's any more.
            if (allocated_step_[slot] > step || !is_running(slot)) continue;
            for (u32 index = num_published; index < num_full; ++index)
                are_in_use &= cache_.publish(block(slot, index), chain[index + 1]);
        }
        return are_in_use;
    }
    // Appends the id that the step sampled for each of these slots. False: some were for sequences that have finished.
    bool append(i64 step, const i64* slots, const i32* token_ids, u64 count) {
        bool are_all_alive = true;
        for (u64 i = 0; i < count; ++i) {
            auto slot = static_cast<u32>(slots[i]);
            if (first_step_[slot] > step)
                are_all_alive = false;
            else
                tails_[u64{slot} * block_size_ + static_cast<u64>(num_tokens_[slot]++) % block_size_] = token_ids[i];
        }
        return are_all_alive;
    }
    // Calls report(slot, tokens in its full blocks) for each sequence that has filled a block since the last call.
    template <class Report>
    void report_filled(Report&& report) {
        for (u32 slot = 0; slot < num_slots(); ++slot) {
            if (reported_[slot] == chains_[slot].size() || first_step_[slot] == NO_STEP) continue;
            reported_[slot] = static_cast<u32>(chains_[slot].size());
            report(slot, u64{reported_[slot] - 1} * block_size_);
        }
    }

   private:
    static constexpr i32 NEVER_FULL = std::numeric_limits<i32>::max();

    template <class Block>
    void publish_tail(u32 slot, u32 num_computed, Block&& block) {
        u32 index = num_computed / block_size_, count = num_computed % block_size_;
        // Ids of other blocks are not in the tail. A block with inputs has more than ids.
        if (count == 0 || index + 1 != chains_[slot].size() || !extra_[slot].empty()) return;
        const i32* ids = &tails_[u64{slot} * block_size_];
        cache_.publish_tail(slot, block(slot, index), chains_[slot].back(), ids, count);
    }

    BlockCache& cache_;
    HashBlock hash_block_;
    u32 block_size_;                                // tokens
    std::vector<i64> first_step_, allocated_step_;  // allocated: the first step with its present blocks
    std::vector<i64> num_tokens_;                   // known, the prompt's included
    std::vector<i32> publish_at_;                   // once this many tokens are computed there is a block to publish
    std::vector<i32> tails_;                        // [num_slots, block_size]: ids of each sequence's last block
    std::vector<std::vector<BlockHash>> chains_;    // the root, then a hash for each full block
    std::vector<std::vector<u8>> extra_;            // of the block that is filled next
    std::vector<u32> reported_;                     // length of the chain when report_filled() saw it last
};

}  // namespace penstock::engine
