// block_ledger.h: state and hash of each block of the KV cache, in memory that outlives the core, for its next life.
//
// The core alone writes. It withdraws a block before it sends the step that overwrites the block, and publishes a block
// after the step that filled it is done. So wherever core and workers are killed, a block that is valid here is
// complete.
#pragma once
#include <array>
#include <cstring>
#include <string>
#include <unordered_set>

#include "atomic.h"
#include "errors.h"

namespace penstock::engine {

using BlockHash = std::array<u8, 32>;  // a SHA-256

struct BlockHashHash {  // the bytes of a SHA-256 are evenly distributed already
    std::size_t operator()(const BlockHash& hash) const {
        std::size_t first;
        std::memcpy(&first, hash.data(), sizeof first);
        return first;
    }
};

struct LedgerEntry {
    static constexpr u32 WITHDRAWN = 0, VALID = 1;
    Atomic<u32> state;
    Atomic<u32> used;  // when, by the core's count of uses. It decides the order of eviction alone, and may be anything
    BlockHash hash;  // is written only while `state` is WITHDRAWN
};
static_assert(sizeof(LedgerEntry) == 40);

class BlockLedger {
   public:
    BlockLedger(LedgerEntry* entries, u32 num_blocks) : entries_(entries), num_blocks_(num_blocks) {}
    u32 num_blocks() const { return num_blocks_; }

    // The next step may overwrite the block. The send of the step releases, and the worker's receive acquires.
    void withdraw(u32 block) { entries_[block].state.store(LedgerEntry::WITHDRAWN, RELAXED); }
    // The block is withdrawn, and the step that has filled it is done.
    void publish(u32 block, const BlockHash& hash) {
        entries_[block].hash = hash;
        entries_[block].state.store(LedgerEntry::VALID, order::ledger.release);
    }
    void set_used(u32 block, u32 when) { entries_[block].used.store(when, RELAXED); }
    u32 used(u32 block) const { return entries_[block].used.load(RELAXED); }
    bool is_valid(u32 block) const { return entries_[block].state.load(order::ledger.acquire) == LedgerEntry::VALID; }
    const BlockHash& hash(u32 block) const { return entries_[block].hash; }

    // Why no core can have written this; empty: a core may have.
    std::string find_damage() const {
        std::unordered_set<BlockHash, BlockHashHash> hashes;
        for (u32 block = 0; block < num_blocks_; ++block) {
            u32 state = entries_[block].state.load(order::ledger.acquire);
            if (state > LedgerEntry::VALID) return format("block %u has the state %u", block, state);
            if (state == LedgerEntry::VALID && !hashes.insert(hash(block)).second)
                return format("block %u has the hash of another block", block);
        }
        return "";
    }
    void clear() {
        for (u32 block = 0; block < num_blocks_; ++block) withdraw(block);
    }

   private:
    LedgerEntry* entries_;
    u32 num_blocks_;
};

}  // namespace penstock::engine
