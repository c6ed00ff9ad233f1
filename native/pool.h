// pool.h: lends out blocks of variable size. Any peer takes, any peer opens; leases are counted per block and
// peer.
//
// A block:   free ──take──► live ──last lease and grant given back──► returned ──next take sweeps──► free
//
// The truth is in the blocks: state, extent, held[peer], grants[from][to], pending. Every change of a count is one
// store under the block's lock, so a death in between leaves nothing half done. What is derived (entries: the
// taken extents in the order of their offsets; grant_units) is rebuilt by the peer that takes over the lock of a dead
// holder. Releasing needs no lock of the pool, so giving memory back waits for no allocation.
#pragma once
#include "granules.h"
#include "watcher.h"

namespace penstock {

struct Extent {  // a checked, local copy of where a block lies
    u32 block = 0;
    u32 generation = 0;
    u64 offset = 0;
    u64 nbytes = 0;
};

struct DeadPeer;  // reap.h

struct PoolStats {
    u64 nbytes = 0, taken_nbytes = 0, free_nbytes = 0, largest_free_nbytes = 0, claimed_nbytes = 0;
    u64 blocks = 0, takes = 0, taken_nbytes_total = 0, exhaustions = 0, recoveries = 0, stale_refs = 0;
    struct Holder {
        u32 slot;
        u64 blocks, nbytes, granted;
    };
    std::vector<Holder> holders;
};

class Pool {
   public:
    static constexpr u64 LOCK_NS = 2'000'000'000;  // a lock held longer than this is an error that names the holder
    static constexpr u64 REAP_NS = 20'000'000;     // a reaper does not wait longer: it is done later
    static constexpr u32 AHEAD = 16;               // blocks: a sweep prefetches states so far ahead
    static constexpr u64 SMALL = 64;               // smaller than a 64th of the pool: taken from the low end of a gap

    explicit Pool(Attachment& by)
        : attachment_(by),
          geometry_(by.segment().geometry()),
          head_(*by.segment().at<PoolHeader>(geometry_.pool)),
          entries_(by.segment().at<Entry>(geometry_.entries)) {}

    Block& block(u32 index) const {
        return *attachment_.segment().at<Block>(geometry_.blocks + index * geometry_.block_stride);
    }
    Shared<u32>* held(u32 index) const {
        return attachment_.segment().at<Shared<u32>>(geometry_.blocks + index * geometry_.block_stride + sizeof(Block));
    }
    Shared<u16>* grants(u32 index, u32 from) const {
        u64 rows = geometry_.grants + index * geometry_.grants_stride;
        return attachment_.segment().at<Shared<u16>>(rows + 2ull * from * geometry_.shape.max_peers);
    }
    PoolHeader& header() const { return head_; }
    u64 nbytes() const { return geometry_.shape.pool_nbytes; }

    // ── take ──
    // A live block of which this peer holds one lease. False: there is no room now. Throws MemoryExhausted when there
    // can never be, or when the machine has no memory for a pool that grows.
    // deadline: for the lock alone, here and below.
    // limit: only below it, in the pool's bytes.
    // claims: its pages, in a pool that grows.
    bool try_take(u64 nbytes, Extent& out, u64 deadline = NEVER, u64 limit = NEVER, bool claims = true) {
        attachment_.refresh();
        attachment_.finish_put_off();
        u64 extent = round_up(std::max<u64>(nbytes, 1), LINE);
        if (extent > this->nbytes()) {
            head_.exhaustions.add();
            throw exhausted(nbytes);
        }
        if (attachment_.lock(head_.lock, std::min(deadline, now_ns() + LOCK_NS))) rebuild();
        PENSTOCK_POINT("pool.locked");
        Unlock unlock{attachment_, head_.lock};
        if (head_.swept_returns.load(RELAXED) != head_.returns.load(order::returns.acquire)) sweep();
        u32 count = std::min(head_.entry_count.load(RELAXED), geometry_.shape.max_blocks);
        u64 best = NEVER, best_offset = 0, at = 0;
        u32 best_index = 0;
        for (u32 i = 0; i <= count; ++i) {  // the smallest gap that fits
            u64 end = i < count ? entries_[i].offset : this->nbytes();
            if (end > this->nbytes() || end < at) {  // only something that wrote where it must not
                rebuild();
                return false;
            }
            u64 gap = std::min(end, limit) > at ? std::min(end, limit) - at : 0;
            if (gap >= extent && gap < best) {
                best = gap;
                best_offset = at;
                best_index = i;
                if (gap == extent) break;
            }
            if (i < count) {
                u64 taken = entries_[i].extent;
                at = taken <= this->nbytes() ? entries_[i].offset + taken : NEVER / 2;
            }
        }
        u32 index = best == NEVER || count >= geometry_.shape.max_blocks ? NONE : free_block();
        if (index == NONE) return false;
        // Small ones from the low end of a gap, large ones from the high end: they do not cut each other's room. A gap
        // that is not all claimed is filled from below, so that a pool claims as little as it can.
        if (extent >= this->nbytes() / SMALL && is_claimed(best_offset, best)) best_offset += best - extent;
        Block& block = this->block(index);
        u32 generation = block.generation.load(RELAXED) + 1;
        block.generation.store(generation, RELAXED);
        block.offset.store(best_offset, RELAXED);
        block.extent.store(extent, RELAXED);
        block.nbytes.store(nbytes, RELAXED);
        block.pending.store(0, RELAXED);
        block.store_state.store(static_cast<u32>(StoreState::none), RELAXED);
        block.grant_units.store(0, RELAXED);
        block.taker.store(attachment_.slot(), RELAXED);
        block.taken_ns.store(now_ns(), RELAXED);
        for (u32 p = 0; p < geometry_.shape.max_peers; ++p) held(index)[p].store(0, RELAXED);
        held(index)[attachment_.slot()].store(1, RELAXED);
        block.state.store(static_cast<u32>(BlockState::live), order::block.release);  // the fields before
        PENSTOCK_POINT("pool.live");
        std::memmove(entries_ + best_index + 1, entries_ + best_index, (count - best_index) * sizeof(Entry));
        entries_[best_index] = {best_offset, extent, index, 0};
        head_.entry_count.store(count + 1, RELAXED);
        PENSTOCK_POINT("pool.inserted");
        head_.takes.add();
        head_.taken_nbytes_total.add(nbytes);
        unlock.now();
        out = {index, generation, best_offset, nbytes};
        if (claims) claim(out, extent);
        fence(order::tap.release);  // what lay here was given back before this
        return true;
    }

    // What is taken, in the order of its offsets. Swept first, also of what was returned and not announced yet: the
    // peer that returned it may be stopped, and room that is found here must be found by the next take too.
    std::vector<Entry> taken(u64 deadline = NEVER) {
        if (attachment_.lock(head_.lock, std::min(deadline, now_ns() + LOCK_NS))) rebuild();
        PENSTOCK_POINT("pool.locked");
        Unlock unlock{attachment_, head_.lock};
        sweep();
        u32 count = std::min(head_.entry_count.load(RELAXED), geometry_.shape.max_blocks);
        std::vector<Entry> entries(entries_, entries_ + count);
        std::erase_if(entries, [&](const Entry& entry) { return entry.block >= geometry_.shape.max_blocks; });
        return entries;
    }
    // Sleeps until some block has come back since `seen` was read from returns().
    Woken wait_for_return(u32 returns, u64 deadline, Spinner& spinner, Waits& waits, const Atomic<bool>& is_closing) {
        return wait<false>(head_.memory, 1ull << (attachment_.slot() % 64), deadline, spinner, waits, nullptr, [&] {
            return head_.returns.load(order::returns.acquire) != returns || attachment_.is_stale() ||
                   attachment_.is_group_broken() || is_closing.load(RELAXED);
        });
    }
    // Has [offset, offset + nbytes) its pages? Within bounds; not to be relied on for what is not held.
    bool is_claimed(u64 offset, u64 nbytes) const;  // pool_pages.h
    // So many bytes from the pool's start have their pages: the limit where the machine has no more memory.
    u64 claimed_from_start() const;  // pool_pages.h
    bool is_growing() const { return claimed_from_start() < nbytes(); }
    u32 returns() const { return head_.returns.load(order::returns.acquire); }
    // By this object, of blocks for which the machine has no pages. Counted before the return, and so seen with the
    // return.
    u32 fruitless_returns() const { return static_cast<u32>(fruitless_returns_.value()); }

    // ── leases and grants ──
    // One more lease for this peer, by a reference that another peer sent. Throws StaleRef unless it names a live block
    // of this generation and lies within it. A grant made to us is used up first.
    void open(const Extent& ref);  // pool_grants.h
    // The same for the store, which has looked: under its lock, so nothing else may be done on the way.
    // uses_grant: a grant made to us is used up, if there is one.
    void open_kept(const Extent& ref, u64 deadline, bool uses_grant) {
        Held guard(*this, ref.block, deadline);
        require(ref);
        if (uses_grant && use_grant(ref.block)) return;
        Shared<u32>& own = held(ref.block)[attachment_.slot()];
        own.store(own.load(RELAXED) + 1, RELAXED);
    }
    // The store gives a block up: it is returned if it is not held. False: it is, and only_if_unheld.
    bool keep_no_longer(u32 index, bool only_if_unheld, u64 deadline) {
        bool is_last = false;
        {
            Held guard(*this, index, deadline);
            Block& block = this->block(index);
            if (only_if_unheld && !is_unheld(index)) return false;
            block.store_state.store(static_cast<u32>(StoreState::none), RELAXED);
            PENSTOCK_POINT("store.half");
            is_last = static_cast<BlockState>(block.state.load(RELAXED)) == BlockState::live && return_if_last(index);
        }
        if (is_last) announce_return();
        return true;
    }
    // Waits until no peer holds the lock of this block. Throws Timeout, which names the one that does.
    void await(u32 index, u64 deadline) { Held guard(*this, index, deadline); }
    bool is_locked(u32 index) const { return block(index).lock.load(RELAXED) != 0; }
    bool is_unheld(u32 index) const {
        const Block& block = this->block(index);
        if (block.pending.load(RELAXED) != 0 || block.grant_units.load(RELAXED) != 0) return false;
        const Shared<u32>* row = held(index);
        for (u32 p = 0; p < geometry_.shape.max_peers; ++p)
            if (row[p].load(RELAXED) != 0) return false;
        return true;
    }
    // Asks for what is_unheld() and a look at the block will read: it is too far apart to be foreseen.
    void fetch_ahead(u32 index) const {
        const u8* at = reinterpret_cast<const u8*>(&block(index));
        for (u64 line = 0; line < sizeof(Block) + 4ull * geometry_.shape.max_peers; line += LINE)
            __builtin_prefetch(at + line);
    }
    // Opens what a channel granted to one of its receivers: see pend().
    void open_pending(const Extent& ref, u32 receiver, u64 deadline = NEVER) {
        Held guard(*this, checked(ref), deadline);
        require(ref);
        Block& block = this->block(ref.block);
        u64 pending = block.pending.load(RELAXED);
        if ((pending >> receiver & 1) == 0) throw stale(ref, "was not granted to this receiver");
        Shared<u32>& own = held(ref.block)[attachment_.slot()];
        own.store(own.load(RELAXED) + 1, RELAXED);
        PENSTOCK_POINT("open.half");
        block.pending.store(pending & ~(1ull << receiver), RELAXED);
    }
    // Lets `to` open the block later, whatever happens to our lease meanwhile. The grant ends with the first open by
    // `to`, and with the death or leaving of either side. We must hold a lease or an unused grant ourselves.
    void grant(const Extent& ref, u32 to) { grant_all(ref, {to}); }
    // The same for each of `to`, or, where one cannot be granted it, for none. Returns the number of grants.
    u32 grant_all(const Extent& ref, const std::vector<u32>& to, bool passes_over_dead = false);  // pool_grants.h
    // The same for every other peer that is live.
    u32 grant_all(const Extent& ref);
    // Takes unused grants of ours back (a message that could not be sent after all). Returns whether there was one.
    bool revoke(const Extent& ref, u32 to);
    // Grants of ours that `to` has not used.
    u32 unused_grants(const Extent& ref, u32 to);
    // For a channel's sender: the receivers in `mask` will open the block through the record at `position`. Our own
    // lease keeps it alive until the record is committed; a death before that is seen by position >= committed.
    template <class Mask>
    void pend(const Extent& ref, u32 lane, u64 position, u64 deadline, Mask&& mask) {
        Held guard(*this, ref.block, deadline);
        Block& block = this->block(ref.block);
        block.pending_lane.store(lane, RELAXED);
        block.pending_position.store(position, RELAXED);
        fence(order::pend.seq_cst);  // see put_out
        // Under the lock: a receiver that goes now is cleared after.
        block.pending.store(mask(), RELAXED);
    }
    // Gives one lease of this peer back. Never throws, never waits long: while a stopped peer holds the block's lock it
    // is put off.
    void release(u32 index, u32 generation) noexcept {
        try {
            release_within(index, generation, 0);
        } catch (const Error&) {
            attachment_.put_off([index, generation](Attachment& by) {
                Pool(by).release_within(index, generation, 0);
                return true;
            });
        }
    }

    // ── what the reaper does ──
    void give_back(u32 index, const DeadPeer& dead);  // reap.h
    // A receiver that leaves while its process stays: what it has not opened yet is not waited for.
    // False: some block is locked by a stopped peer: to be called again.
    bool drop_receiver(u32 receiver) {
        bool is_done = true;
        for (u32 index = 0; index < geometry_.shape.max_blocks; ++index) {
            Block& block = this->block(index);
            if (static_cast<BlockState>(block.state.load(order::block.acquire)) != BlockState::live) continue;
            bool is_last = false;
            try {
                Held guard(*this, index, 0);  // even if no bit is seen: one may just be being set
                u64 pending = block.pending.load(RELAXED);
                if ((pending >> receiver & 1) == 0) continue;
                block.pending.store(pending & ~(1ull << receiver), RELAXED);
                is_last =
                    static_cast<BlockState>(block.state.load(RELAXED)) == BlockState::live && return_if_last(index);
            } catch (const Error&) {
                is_done = false;
            }
            if (is_last) announce_return();
        }
        return is_done;
    }
    // For the reaper: if the dead peer held the pool's lock, its half-made change is undone.
    void recover_lock(u32 slot, u32 epoch) {
        if (!attachment_.take_over(head_.lock, slot, epoch)) return;
        rebuild();
        attachment_.unlock(head_.lock);
    }

    // ── seen from outside ──
    PoolStats stats() const;               // describe.h
    Error exhausted(u64 requested) const;  // describe.h: with the numbers and the holders
    u64 trim(u64 keep);                    // pool_pages.h
    void announce_return() {
        head_.returns.fetch_add(1, order::returns.release);
        u64 sleepers;
        fence(order::bell.seq_cst);
        Bell& bell = head_.memory;
        if (__builtin_expect(bell.parked.load(RELAXED) == 0 && bell.parked_async.load(RELAXED) == 0, 1)) return;
        // Peers share bits here (there are more peers than bits), so all are woken, and set theirs again.
        bell.parked.exchange(0, order::bell.seq_cst);
        sleepers = bell.parked_async.exchange(0, order::bell.seq_cst);
        ring_all(bell);
        if (sleepers != 0)
            for (u32 p = 0; p < geometry_.shape.max_peers; ++p)
                if ((sleepers >> (p % 64) & 1) != 0) attachment_.wake_async(p);
    }
    void rebuild() {  // LOCK pool is held
        head_.recoveries.add();
        u32 returns = head_.returns.load(order::returns.acquire);
        std::vector<Entry> live;
        for (u32 index = 0; index < geometry_.shape.max_blocks; ++index) {
            Block& block = this->block(index);
            BlockState state = static_cast<BlockState>(block.state.load(order::block.acquire));
            if (state == BlockState::free) continue;
            Entry entry{block.offset.load(RELAXED), block.extent.load(RELAXED), index, 0};
            bool is_possible = entry.extent <= nbytes() && entry.offset <= nbytes() - entry.extent && entry.extent != 0;
            if (state == BlockState::live && is_possible)
                live.push_back(entry);
            else
                block.state.store(static_cast<u32>(BlockState::free), order::block.release);
        }
        std::sort(live.begin(), live.end(), [](const Entry& a, const Entry& b) { return a.offset < b.offset; });
        std::copy(live.begin(), live.end(), entries_);
        head_.entry_count.store(static_cast<u32>(live.size()), RELAXED);
        head_.swept_returns.store(returns, RELAXED);
    }

   private:
    static constexpr u32 NONE = ~0u;

    struct Unlock {
        Attachment& by;
        Shared<u32>& word;
        bool is_held = true;
        void now() {
            if (is_held) by.unlock(word);
            is_held = false;
        }
        ~Unlock() { now(); }
    };
    struct Held {  // LOCK block, repaired if its last holder died
        Pool& pool;
        u32 index;
        Held(Pool& pool, u32 index, u64 deadline = NEVER) : pool(pool), index(index) {
            if (pool.attachment_.lock(pool.block(index).lock, std::min(deadline, now_ns() + LOCK_NS)))
                pool.recover_block(index);
            PENSTOCK_POINT("block.locked");
        }
        ~Held() { pool.attachment_.unlock(pool.block(index).lock); }
    };
    u32 checked(const Extent& ref) {
        if (ref.block >= geometry_.shape.max_blocks) throw stale(ref, "names a block that does not exist");
        return ref.block;
    }
    void require(const Extent& ref) {
        Block& block = this->block(ref.block);
        BlockState state = static_cast<BlockState>(block.state.load(order::block.acquire));
        u32 generation = block.generation.load(RELAXED);
        if (state != BlockState::live || generation != ref.generation) throw stale(ref, "is gone", generation);
        u64 offset = block.offset.load(RELAXED), nbytes = block.nbytes.load(RELAXED);
        if (nbytes > this->nbytes() || offset > this->nbytes() - nbytes) throw stale(ref, "lies outside the pool");
        if (ref.offset < offset || ref.nbytes > nbytes || ref.offset - offset > nbytes - ref.nbytes)
            throw stale(ref, "lies outside its block");
    }
    Error stale(const Extent& ref, const char* why, u32 actual = 0) const;  // describe.h
    bool has_right(u32 index, u32 slot) const;  // pool_grants.h, as are these; LOCK block is held
    bool use_grant(u32 index);                  // a grant made to us becomes a lease. False: there is none
    void require_right(const Extent& ref);      // ours, to grant the block
    void add_grant(const Extent& ref, u32 to);  // throws MemoryExhausted
    void take_grant_back(u32 index, u32 to);
    // Whether others may now have its room: it is returned, or it is kept, and may be evicted.
    bool return_if_last(u32 index) {  // LOCK block is held, the state is live
        Block& block = this->block(index);
        if (!is_unheld(index)) return false;
        if (block.store_state.load(RELAXED) != static_cast<u32>(StoreState::none)) return true;
        PENSTOCK_POINT("release.last");
        block.state.store(static_cast<u32>(BlockState::returned), order::block.release);
        return true;
    }
    void release_within(u32 index, u32 generation, u64 deadline) {
        bool is_last = false;
        {
            Held guard(*this, index, deadline);
            Block& block = this->block(index);
            if (static_cast<BlockState>(block.state.load(RELAXED)) != BlockState::live ||
                block.generation.load(RELAXED) != generation)
                return;
            Shared<u32>& own = held(index)[attachment_.slot()];
            u32 many = own.load(RELAXED);
            if (many == 0) return;
            own.store(many - 1, RELAXED);
            if (many == 1) is_last = return_if_last(index);
        }
        if (is_last) announce_return();
    }
    void recount(u32 index) {
        u32 units = 0;
        for (u32 from = 0; from < geometry_.shape.max_peers; ++from)
            for (u32 to = 0; to < geometry_.shape.max_peers; ++to) units += grants(index, from)[to].load(RELAXED);
        block(index).grant_units.store(units, RELAXED);
    }
    void recover_block(u32 index) {
        head_.recoveries.add();
        if (geometry_.shape.has_grants != 0) recount(index);
    }
    void sweep() {  // LOCK pool is held
        u32 returns = head_.returns.load(order::returns.acquire);
        u32 count = std::min(head_.entry_count.load(RELAXED), geometry_.shape.max_blocks), entry_count = 0;
        for (u32 i = 0; i < count; ++i) {
            u32 index = entries_[i].block;
            if (i + AHEAD < count && entries_[i + AHEAD].block < geometry_.shape.max_blocks)
                __builtin_prefetch(&block(entries_[i + AHEAD].block).state);
            if (index < geometry_.shape.max_blocks) {
                u32 returned = static_cast<u32>(BlockState::returned);
                Shared<u32>& state = block(index).state;
                if (state.load(order::block.acquire) == returned) {
                    state.compare_exchange_strong(returned, static_cast<u32>(BlockState::free), order::block.acq_rel);
                    continue;
                }
            }
            if (entry_count != i) entries_[entry_count] = entries_[i];
            ++entry_count;
        }
        head_.entry_count.store(entry_count, RELAXED);
        head_.swept_returns.store(returns, RELAXED);
    }
    u32 free_block() {  // LOCK pool is held
        u32 start = head_.next_block.load(RELAXED) % geometry_.shape.max_blocks;
        for (u32 i = 0; i < geometry_.shape.max_blocks; ++i) {
            u32 index = start + i < geometry_.shape.max_blocks ? start + i : start + i - geometry_.shape.max_blocks;
            if (static_cast<BlockState>(block(index).state.load(order::block.acquire)) != BlockState::free) continue;
            head_.next_block.store(index + 1, RELAXED);
            return index;
        }
        return NONE;
    }
    void claim(const Extent& extent, u64 nbytes);  // pool_pages.h

    Attachment& attachment_;
    const Geometry& geometry_;
    PoolHeader& head_;
    Entry* entries_;
    Counter fruitless_returns_;
};

}  // namespace penstock

#include "pool_grants.h"
#include "pool_pages.h"
