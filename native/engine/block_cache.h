// block_cache.h: the blocks of the KV cache by number: reference counts, free blocks, prefix lookup by hash, eviction
// of the least recently used. Keys and values themselves lie in the worker's memory; nothing here touches them.
#pragma once
#include <algorithm>
#include <limits>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "block_ledger.h"

namespace penstock::engine {

// A block is in one of three states. In use: its reference count is above 0. Cached: its count is 0, and it can be
// found by its hash. Empty: its count is 0, and it has no hash. Cached and empty blocks are free.
class BlockCache {
   public:
    static constexpr u32 MAX_BLOCKS = std::numeric_limits<i32>::max();  // block numbers travel as i32

    explicit BlockCache(u32 num_blocks)
        : ref_counts_(require_count(num_blocks), 0), hashes_(num_blocks), next_(num_blocks + 1), prev_(num_blocks + 1) {
        for (u32 block = num_blocks; block-- > 0;) empty_.push_back(block);  // low numbers are taken first
        next_[num_blocks] = prev_[num_blocks] = num_blocks;
        by_hash_.reserve(num_blocks);  // a table that grows is rehashed whole: a million blocks held the core up 120 ms
    }
    // Keeps the ledger, and begins with the blocks that are valid there, all of them cached. A damaged ledger is
    // cleared, and the cache begins empty: damage() says why.
    BlockCache(u32 num_blocks, const BlockLedger& ledger) : BlockCache(num_blocks) {
        if (ledger.num_blocks() != num_blocks)
            throw std::invalid_argument(
                format("expected a ledger of %u blocks, got %u", num_blocks, ledger.num_blocks()));
        ledger_ = ledger;
        damage_ = ledger_->find_damage();
        if (!damage_.empty()) ledger_->clear();
        empty_.clear();
        adopt_tails();
        std::vector<u32> valid;
        for (u32 block = num_blocks; block-- > 0;)
            if (slots_[block] == ADOPTED)
                slots_[block] = NO_SLOT;
            else
                (ledger_->is_valid(block) ? valid : empty_).push_back(block);
        std::stable_sort(valid.begin(), valid.end(), [&](u32 a, u32 b) { return evicted_at(a) < evicted_at(b); });
        for (u32 block : valid) {
            hashes_[block] = &by_hash_.try_emplace(ledger_->hash(block), block).first->first;
            append_to_cached(block);
        }
        num_adopted_ = num_cached_;
    }
    u64 num_adopted() const { return num_adopted_; }
    const std::string& damage() const { return damage_; }  // of the ledger; empty: none
    u32 num_blocks() const { return static_cast<u32>(ref_counts_.size()); }
    u64 num_free() const { return empty_.size() + num_cached_; }
    u32 ref_count(u32 block) const { return ref_counts_[block]; }

    // Finds the block with this hash and adds a reference to it. False: no block has this hash.
    bool find(const BlockHash& hash, u32& block) {
        auto entry = by_hash_.find(hash);
        if (entry == by_hash_.end()) return false;
        block = entry->second;
        if (ref_counts_[block]++ != 0) return true;
        remove_from_cached(block);
        if (ledger_) ledger_->set_used(block, IN_USE | next_use());
        return true;
    }
    // Takes `count` blocks with one reference each: empty blocks first, then the least recently used cached blocks,
    // which lose their hash. False, and nothing is taken, if fewer are free.
    bool take(u64 count, i32* blocks) {
        if (count > num_free()) return false;
        for (; count != 0; --count) {
            u32 block;
            if (!empty_.empty()) {
                block = empty_.back();
                empty_.pop_back();
                if (empty_.size() < adopted_tails_.size()) adopted_tails_.pop_back();
            } else {
                block = next_[num_blocks()];
                remove_from_cached(block);
                by_hash_.erase(by_hash_.find(*hashes_[block]));
                hashes_[block] = nullptr;
            }
            if (ledger_) ledger_->withdraw(block);
            if (!slots_.empty()) forget_tail(slots_[block]);
            ref_counts_[block] = 1;
            *blocks++ = static_cast<i32>(block);
        }
        return true;
    }
    // Removes a reference. False: the block has none.
    bool release(u32 block) {
        if (ref_counts_[block] == 0) return false;
        if (--ref_counts_[block] != 0) return true;
        if (hashes_[block] == nullptr)
            empty_.push_back(block);
        else
            append_to_cached(block);
        return true;
    }
    // Makes a block in use findable by this hash, unless another block has the hash already. False: it is not in use.
    bool publish(u32 block, const BlockHash& hash) {
        if (ref_counts_[block] == 0) return false;
        if (hashes_[block] != nullptr) return true;
        auto [entry, is_new] = by_hash_.try_emplace(hash, block);
        if (!is_new) return true;
        hashes_[block] = &entry->first;
        if (ledger_) {
            ledger_->set_used(block, IN_USE | next_use());
            ledger_->publish(block, hash);
        }
        return true;
    }
    // ── unfinished blocks ──
    bool has_tails() const { return !tails_.empty(); }
    bool fits_tails(u32 num_slots, u32 block_size) const {
        return !has_tails() || (num_slots <= tails_.size() && block_size == ledger_->block_size());
    }
    // So many ids, those of earlier calls included, are computed in the slot's last block, which is in use. Steps
    // append to the block.
    void publish_tail(u32 slot, u32 block, const BlockHash& parent, const i32* ids, u32 count) {
        if (tails_[slot] == block) return ledger_->publish_tail(slot, block, parent, ids, count);
        forget_tail(slot);  // and the fields are written in a later step: a kill leaves the withdrawal before them
        tails_[slot] = block;
        slots_[block] = slot;
    }
    // Takes the block that a former life has left after the block with the hash `parent`, with the most of these ids.
    // `matched`: so many; 0: there is none, and nothing is taken.
    void take_tail(const BlockHash& parent, const i32* ids, u32 count, u32& block, u32& matched) {
        matched = 0;
        std::size_t best = 0;
        for (std::size_t at = 0; at < adopted_tails_.size(); ++at) {
            const AdoptedTail& tail = adopted_tails_[at];
            if (tail.parent != parent) continue;
            auto end = std::mismatch(tail.ids.begin(), tail.ids.end(), ids, ids + count).first;
            auto length = static_cast<u32>(end - tail.ids.begin());
            if (length > matched) matched = length, best = at;
        }
        if (matched == 0) return;
        block = empty_[best];
        empty_.erase(empty_.begin() + static_cast<std::ptrdiff_t>(best));
        adopted_tails_.erase(adopted_tails_.begin() + static_cast<std::ptrdiff_t>(best));
        ref_counts_[block] = 1;
    }
    // For tests: which of the invariants is broken; nullptr: none.
    const char* broken_invariant() const {
        std::vector<u8> lists(num_blocks(), 0);
        for (u32 block : empty_)
            if (lists[block]++ != 0 || hashes_[block] != nullptr) return "an empty block is listed twice or has a hash";
        u64 num_cached = 0;
        for (u32 block = next_[num_blocks()]; block != num_blocks(); block = next_[block], ++num_cached)
            if (lists[block]++ != 0 || hashes_[block] == nullptr)
                return "a cached block is listed twice or has no hash";
        if (num_cached != num_cached_) return "the number of cached blocks is not the length of their list";
        u64 num_hashes = 0;
        for (u32 block = 0; block < num_blocks(); ++block) {
            if ((ref_counts_[block] == 0) != (lists[block] == 1)) return "a block is free and in use, or neither";
            if (hashes_[block] == nullptr) continue;
            ++num_hashes;
            if (by_hash_.find(*hashes_[block])->second != block) return "a hash leads to another block than its own";
        }
        return num_hashes == by_hash_.size() ? nullptr : "a hash leads to a block that does not have it";
    }

   private:
    static constexpr u32 NO_SLOT = std::numeric_limits<u32>::max(), ADOPTED = NO_SLOT - 1, NO_BLOCK = NO_SLOT;
    struct AdoptedTail {
        BlockHash parent;
        std::vector<i32> ids;
    };

    // The blocks of tails become the first of the empty blocks, which are taken last.
    void adopt_tails() {
        tails_.assign(ledger_->num_slots(), NO_BLOCK);
        slots_.assign(num_blocks(), NO_SLOT);
        for (u32 slot = 0; slot < ledger_->num_slots(); ++slot) {
            const LedgerTail& tail = ledger_->tail(slot);
            u32 count = tail.count.load(order::ledger.acquire);
            if (count != 0 && !ledger_->is_valid(tail.block) && slots_[tail.block] == NO_SLOT) {
                slots_[tail.block] = ADOPTED;
                empty_.push_back(tail.block);
                adopted_tails_.push_back({tail.parent, {ledger_->tail_ids(slot), ledger_->tail_ids(slot) + count}});
            }
            ledger_->withdraw_tail(slot);
        }
    }
    void forget_tail(u32 slot) {
        if (slot == NO_SLOT || tails_[slot] == NO_BLOCK) return;
        ledger_->withdraw_tail(slot);
        slots_[tails_[slot]] = NO_SLOT;
        tails_[slot] = NO_BLOCK;
    }
    static u32 require_count(u32 num_blocks) {
        if (num_blocks > MAX_BLOCKS) throw std::invalid_argument(format("a cache has at most %u blocks", MAX_BLOCKS));
        return num_blocks;
    }
    void append_to_cached(u32 block) {  // evicted after all that are in the list now
        u32 end = num_blocks(), last = prev_[end];
        next_[last] = prev_[end] = block;
        prev_[block] = last, next_[block] = end;
        ++num_cached_;
        if (ledger_) ledger_->set_used(block, next_use());
    }
    u32 next_use() { return uses_++ & ~IN_USE; }
    // Of a block of the former life: cached blocks in the order of their release, then those in use, the last published
    // or matched first. So the end of a prefix is evicted before its beginning.
    u32 evicted_at(u32 block) const {
        u32 used = ledger_->used(block);
        return used >= IN_USE ? ~used | IN_USE : used;
    }
    void remove_from_cached(u32 block) {
        next_[prev_[block]] = next_[block];
        prev_[next_[block]] = prev_[block];
        --num_cached_;
    }

    std::vector<u32> ref_counts_;
    std::vector<u32> empty_;
    std::unordered_map<BlockHash, u32, BlockHashHash> by_hash_;
    std::vector<const BlockHash*> hashes_;  // of each block: its key in by_hash_; nullptr: none
    std::vector<u32> next_, prev_;  // the cached blocks as a ring through num_blocks(), least recently used first
    u64 num_cached_ = 0;
    static constexpr u32 IN_USE = 1u << 31;   // of a ledger's `used`: a sample had the block
    u32 uses_ = 0;                            // starts again in each life, after the blocks that the life has adopted
    std::optional<BlockLedger> ledger_;       // of the blocks that the next life may adopt
    std::vector<u32> tails_;                  // the block of each slot's tail; NO_BLOCK: none
    std::vector<u32> slots_;                  // of each block: the slot that has it in tails_; NO_SLOT: none
    std::vector<AdoptedTail> adopted_tails_;  // of the first of the empty blocks, in their order
    std::string damage_;
    u64 num_adopted_ = 0;
};

}  // namespace penstock::engine
