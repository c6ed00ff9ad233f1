// cached.h: numbered blocks in one process's memory: which are free, how many use each, and which are found again by
// the hash of what lies in them. Plain numbers: what lies in a block is somewhere else.
#pragma once
#include <limits>
#include <string>
#include <unordered_map>
#include <vector>

#include "errors.h"
#include "sha256.h"

namespace penstock {

struct DigestHash {
    std::size_t operator()(const Digest& digest) const {
        std::size_t first;
        std::memcpy(&first, digest.data(), sizeof first);
        return first;
    }
};

// Every block is in use by somebody, or kept (nobody uses it, and it can be found), or empty.
class CachedBlocks {
   public:
    static constexpr u32 MOST = std::numeric_limits<i32>::max();  // their numbers travel as i32

    explicit CachedBlocks(u32 blocks)
        : references(require(blocks), 0), digests_(blocks), after_(blocks + 1), before_(blocks + 1) {
        for (u32 block = blocks; block-- > 0;) empty_.push_back(block);  // low ones first
        after_[blocks] = before_[blocks] = blocks;
        found_.reserve(blocks);  // a table that grows moves all that it holds: the core would be held up for that long
    }
    u32 blocks() const { return static_cast<u32>(references.size()); }
    u64 free() const { return empty_.size() + kept_; }

    // The block in which this lies has one user more. False: nobody has it.
    bool find(const Digest& digest, u32& block) {
        auto at = found_.find(digest);
        if (at == found_.end()) return false;
        block = at->second;
        if (references[block]++ == 0) unkeep(block);
        return true;
    }
    // Empty ones first; then those that nobody has used for the longest time, which can be found no more.
    bool take(u64 count, i32* out) {
        if (count > free()) return false;
        for (; count != 0; --count) {
            u32 block;
            if (!empty_.empty()) {
                block = empty_.back();
                empty_.pop_back();
            } else {
                block = after_[blocks()];
                unkeep(block);
                found_.erase(found_.find(*digests_[block]));
                digests_[block] = nullptr;
            }
            references[block] = 1;
            *out++ = static_cast<i32>(block);
        }
        return true;
    }
    // One user less. False: it had none.
    bool release(u32 block) {
        if (references[block] == 0) return false;
        if (--references[block] != 0) return true;
        if (digests_[block] == nullptr)
            empty_.push_back(block);
        else
            keep(block);
        return true;
    }
    // If it lies in another block already, that one is found. False: nobody uses the block.
    bool publish(u32 block, const Digest& digest) {
        if (references[block] == 0) return false;
        if (digests_[block] != nullptr) return true;
        auto [at, is_new] = found_.try_emplace(digest, block);
        if (is_new) digests_[block] = &at->first;
        return true;
    }
    // For tests: what contradicts itself, or nothing.
    const char* wrong() const {
        std::vector<u8> where(blocks(), 0);
        for (u32 block : empty_)
            if (where[block]++ != 0 || digests_[block] != nullptr) return "an empty block twice, or one that is found";
        u64 kept = 0;
        for (u32 block = after_[blocks()]; block != blocks(); block = after_[block], ++kept)
            if (where[block]++ != 0 || digests_[block] == nullptr)
                return "a kept block twice, or one that is not found";
        if (kept != kept_) return "another number of kept blocks";
        u64 found = 0;
        for (u32 block = 0; block < blocks(); ++block) {
            if ((references[block] == 0) != (where[block] == 1)) return "a block that is free and in use, or neither";
            if (digests_[block] == nullptr) continue;
            ++found;
            if (found_.find(*digests_[block])->second != block) return "a block that is found in another's place";
        }
        return found == found_.size() ? nullptr : "what is found in no block";
    }

    std::vector<u32> references;  // users of each block; changed here only

   private:
    static u32 require(u32 blocks) {
        if (blocks > MOST) throw Error(Fault::value, format("a cache has at most %u blocks", MOST));
        return blocks;
    }

    void keep(u32 block) {  // the last in the list: the last to be emptied
        u32 end = blocks(), last = before_[end];
        after_[last] = before_[end] = block;
        before_[block] = last, after_[block] = end;
        ++kept_;
    }
    void unkeep(u32 block) {
        after_[before_[block]] = after_[block];
        before_[after_[block]] = before_[block];
        --kept_;
    }

    std::vector<u32> empty_;
    std::unordered_map<Digest, u32, DigestHash> found_;
    std::vector<const Digest*> digests_;  // by what the block is found: a key of found_; null: by nothing
    std::vector<u32> after_, before_;     // the list of kept blocks, a ring through `blocks`; the first is emptied next
    u64 kept_ = 0;
};

}  // namespace penstock
