// block_ledger.h: state and hash of each block of the KV cache, and the ids in the unfinished last block (the tail) of
// each slot's sequence, in memory that outlives the core, for its next life.
//
// The core alone writes. It withdraws a block before it sends the step that overwrites the block, and publishes a block
// after the step that filled it is done. So wherever core and workers are killed, a block that is valid here is
// complete. Steps append to a tail: what is published of it stays as it is until the block is taken again.
#pragma once
#include <algorithm>
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
    BlockHash hash;    // is written only while `state` is WITHDRAWN
};
static_assert(sizeof(LedgerEntry) == 40);

struct LedgerTail {     // the ids of a block follow
    Atomic<u32> count;  // of computed ids; 0: withdrawn
    u32 block;
    BlockHash parent;  // of the block before it; like `block` and the first ids, it is written only while `count` is 0
};
static_assert(sizeof(LedgerTail) == 40 && alignof(LedgerTail) == alignof(LedgerEntry));

class BlockLedger {
   public:
    // `entries`: of nbytes().
    BlockLedger(LedgerEntry* entries, u32 num_blocks, u32 num_slots = 0, u32 block_size = 0)
        : entries_(entries), num_blocks_(num_blocks), num_slots_(num_slots), block_size_(block_size) {}
    u32 num_blocks() const { return num_blocks_; }
    u32 num_slots() const { return num_slots_; }
    u32 block_size() const { return block_size_; }
    static u64 nbytes(u64 num_blocks, u64 num_slots, u64 block_size) {
        return num_blocks * sizeof(LedgerEntry) + num_slots * tail_nbytes(block_size);
    }

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

    void withdraw_tail(u32 slot) { tail(slot).count.store(0, RELAXED); }
    // These ids, beginning with those that are published already, are computed in the block. It is the slot's tail
    // since an earlier step: `count` is 0, or the tail of this block and parent.
    void publish_tail(u32 slot, u32 block, const BlockHash& parent, const i32* ids, u32 count) {
        LedgerTail& to = tail(slot);
        u32 published = to.count.load(RELAXED);
        if (count <= published) return;
        if (published == 0) to.block = block, to.parent = parent;
        std::copy(ids + published, ids + count, tail_ids(slot) + published);
        to.count.store(count, order::ledger.release);
    }
    LedgerTail& tail(u32 slot) const {
        return *reinterpret_cast<LedgerTail*>(reinterpret_cast<u8*>(entries_ + num_blocks_) +
                                              slot * tail_nbytes(block_size_));
    }
    i32* tail_ids(u32 slot) const { return reinterpret_cast<i32*>(&tail(slot) + 1); }

    // Why no core can have written this; empty: a core may have.
    std::string find_damage() const {
        std::unordered_set<BlockHash, BlockHashHash> hashes;
        for (u32 block = 0; block < num_blocks_; ++block) {
            u32 state = entries_[block].state.load(order::ledger.acquire);
            if (state > LedgerEntry::VALID) return format("block %u has the state %u", block, state);
            if (state == LedgerEntry::VALID && !hashes.insert(hash(block)).second)
                return format("block %u has the hash of another block", block);
        }
        for (u32 slot = 0; slot < num_slots_; ++slot) {
            u32 count = tail(slot).count.load(order::ledger.acquire);
            if (count != 0 && (count >= block_size_ || tail(slot).block >= num_blocks_))
                return format("slot %u has %u ids in block %u", slot, count, tail(slot).block);
        }
        return "";
    }
    void clear() {
        for (u32 block = 0; block < num_blocks_; ++block) withdraw(block);
        for (u32 slot = 0; slot < num_slots_; ++slot) withdraw_tail(slot);
    }

   private:
    static u64 tail_nbytes(u64 block_size) { return sizeof(LedgerTail) + block_size * sizeof(i32); }

    LedgerEntry* entries_;
    u32 num_blocks_, num_slots_, block_size_;
};

}  // namespace penstock::engine
