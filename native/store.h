// store.h: blocks that are kept under a key after the last lease is gone, until their room is wanted.
//
// A kept block:   none ──begin──► filling ──commit──► ready ──evict──► none
//                           └──── abandon, or the death of the writer ────┘
//
// The truth is in the blocks: kept and key. What is derived (the chains by which a key is found) is rebuilt by whoever
// takes over the lock of a dead holder. A block that is kept is not returned with its last lease; one that is evicted
// is returned at once, for only blocks that nobody holds are evicted. LOCK store is taken before LOCK block, never
// while LOCK pool is held.
#pragma once
#include "pool.h"

namespace penstock {

struct Key {
    u64 words[KEY_WORDS];
};

struct StoreStats {
    u64 hits = 0, misses = 0, puts = 0, evictions = 0, evicted_nbytes = 0, fills_awaited = 0, abandoned = 0;
    struct Item {
        Key key;
        u32 block, generation, taker, holders, hits;  // taker: as it says; of one that is being written, the writer
        u64 nbytes, age_ns, idle_ns;
        bool is_filling;
    };
    std::vector<Item> items;
};

class Store {
   public:
    enum class Begun { hit, fill, wait };

    explicit Store(Attachment& by)
        : by_(by),
          g_(by.segment().geometry()),
          pool_(by),
          head_(*by.segment().at<StoreHeader>(g_.store)),
          buckets_(by.segment().at<Shared<u32>>(g_.store + sizeof(StoreHeader))) {
        if (g_.shape.buckets == 0)
            throw Error(Fault::layout_mismatch, format("pool '%s' keeps nothing by key", by.segment().name().c_str()));
    }
    Pool& pool() { return pool_; }
    StoreHeader& header() const { return head_; }

    // A lease of what is kept under this key. False: nothing is, or it is not written yet.
    bool get(const Key& key, Extent& out) {
        by_.refresh();
        Locked guard(*this);
        u32 index = find(key);
        if (index == NONE || kept(index) != Kept::ready) {
            count(head_.misses);
            return false;
        }
        use(index, out);
        count(head_.hits);
        return true;
    }

    // hit: it is there, and out is a lease of it. fill: out is a lease of a block that is being written, by the caller,
    // who commits or abandons it. wait: somebody else is writing it; wait_for_fill(seen) and begin again.
    // Throws MemoryExhausted where all that is in the way is held.
    Begun begin(const Key& key, u64 nbytes, Extent& out, u32& seen) {
        by_.refresh();
        for (int attempts = 0;; ++attempts) {
            {
                Locked guard(*this);
                Begun found;
                if (look(key, out, seen, found)) return found;
            }
            if (pool_.try_take(nbytes, out)) break;
            if (attempts >= MOST_ATTEMPTS || !evict(nbytes)) throw pool_.exhausted(nbytes);
        }
        PENSTOCK_POINT("store.taken");
        Begun found = Begun::fill;
        Extent ours = out;
        try {
            Locked guard(*this);
            if (!look(key, out, seen, found)) {
                Block& b = pool_.block(ours.block);
                for (u32 i = 0; i < KEY_WORDS; ++i) b.key[i].store(key.words[i], std::memory_order_relaxed);
                b.used_ns.store(now_ns(), std::memory_order_relaxed);
                b.hits.store(0, std::memory_order_relaxed);
                set_kept(ours.block, Kept::filling);
                PENSTOCK_POINT("store.keyed");
                link(ours.block);
                count(head_.puts);
                return Begun::fill;
            }
        } catch (...) {
            pool_.release(ours.block, ours.generation);
            throw;
        }
        pool_.release(ours.block, ours.generation);  // somebody was faster
        return found;
    }
    // What was written is there for everybody. False: it was taken out meanwhile (clear()).
    bool commit(const Extent& extent) {
        bool is_ours;
        {
            Locked guard(*this);
            is_ours = is_filling(extent);
            PENSTOCK_POINT("store.filled");
            if (is_ours) set_kept(extent.block, Kept::ready);  // ORDER block: written before this
        }
        announce_fill();
        return is_ours;
    }
    // What was being written is nobody's: the block goes with its last lease, and somebody else may write the key.
    void abandon(const Extent& extent) {
        {
            Locked guard(*this);
            if (!is_filling(extent)) return;
            let_go(extent.block);
            count(head_.abandoned);
        }
        announce_fill();
    }
    // Takes one key out, or, without one, all: what is held goes with its last lease.
    u64 remove(const Key* key) {
        u64 removed = 0;
        {
            Locked guard(*this);
            for (u32 index = 0; index < g_.shape.max_blocks; ++index) {
                if (kept(index) == Kept::none || (key != nullptr && !is_key(index, *key))) continue;
                let_go(index);
                ++removed;
            }
        }
        announce_fill();
        return removed;
    }
    u32 fills() const { return head_.fills.load(std::memory_order_acquire); }
    Woken wait_for_fill(u32 seen, u64 deadline, Spinner& spinner, Waits& waits) {
        count(head_.fills_awaited);
        return wait<false>(head_.filled, 1ull << (by_.slot() % 64), deadline, spinner, waits, nullptr,
                           [&] { return head_.fills.load(std::memory_order_acquire) != seen || by_.is_stale(); });
    }

    // For the reaper: what that peer was writing is nobody's; if it held the lock, what is derived is rebuilt.
    template <class Still>
    void drop_filling(u32 slot, u32 epoch, Still&& is_still) {
        bool is_any = false;
        {
            if (by_.take_over(head_.lock, slot, epoch))
                rebuild();
            else if (by_.lock(head_.lock, now_ns() + Pool::LOCK_NS / 10))
                rebuild();
            Unlock unlock{by_, head_.lock};
            for (u32 index = 0; index < g_.shape.max_blocks && is_still(); ++index) {
                if (kept(index) != Kept::filling || pool_.block(index).taker.load(std::memory_order_relaxed) != slot)
                    continue;
                let_go(index);
                count(head_.abandoned);
                is_any = true;
            }
        }
        if (is_any) announce_fill();
    }

    StoreStats stats() const {
        StoreStats s;
        s.hits = head_.hits.load(std::memory_order_relaxed);
        s.misses = head_.misses.load(std::memory_order_relaxed);
        s.puts = head_.puts.load(std::memory_order_relaxed);
        s.evictions = head_.evictions.load(std::memory_order_relaxed);
        s.evicted_nbytes = head_.evicted_nbytes.load(std::memory_order_relaxed);
        s.fills_awaited = head_.fills_awaited.load(std::memory_order_relaxed);
        s.abandoned = head_.abandoned.load(std::memory_order_relaxed);
        u64 now = now_ns();
        for (u32 index = 0; index < g_.shape.max_blocks; ++index) {
            Block& b = pool_.block(index);
            Kept state = kept(index);
            if (state == Kept::none || !is_live(index)) continue;
            StoreStats::Item item{};
            for (u32 i = 0; i < KEY_WORDS; ++i) item.key.words[i] = b.key[i].load(std::memory_order_relaxed);
            item.block = index;
            item.generation = b.generation.load(std::memory_order_relaxed);
            item.taker = b.taker.load(std::memory_order_relaxed);
            item.nbytes = b.nbytes.load(std::memory_order_relaxed);
            item.hits = b.hits.load(std::memory_order_relaxed);
            item.is_filling = state == Kept::filling;
            for (u32 p = 0; p < g_.shape.max_peers; ++p)
                item.holders += pool_.held(index)[p].load(std::memory_order_relaxed) != 0;
            u64 taken = b.taken_ns.load(std::memory_order_relaxed), used = b.used_ns.load(std::memory_order_relaxed);
            item.age_ns = now - std::min(now, taken);
            item.idle_ns = now - std::min(now, used);
            s.items.push_back(item);
        }
        return s;
    }

   private:
    static constexpr u32 NONE = ~0u;
    static constexpr int MOST_ATTEMPTS = 64;  // others may take what was made free; then it is really full

    struct Unlock {
        Attachment& by;
        Shared<u32>& word;
        ~Unlock() { by.unlock(word); }
    };
    struct Locked {  // LOCK store, with what is derived repaired if its last holder died
        Store& store;
        explicit Locked(Store& store) : store(store) {
            if (store.by_.lock(store.head_.lock, now_ns() + Pool::LOCK_NS)) store.rebuild();
            PENSTOCK_POINT("store.locked");
        }
        ~Locked() { store.by_.unlock(store.head_.lock); }
    };

    static void count(Shared<u64>& counter) { counter.fetch_add(1, std::memory_order_relaxed); }
    Kept kept(u32 index) const {
        return static_cast<Kept>(pool_.block(index).kept.load(std::memory_order_acquire));  // ORDER block
    }
    void set_kept(u32 index, Kept state) {
        pool_.block(index).kept.store(static_cast<u32>(state), std::memory_order_release);
    }
    bool is_live(u32 index) const {
        return static_cast<BlockState>(pool_.block(index).state.load(std::memory_order_acquire)) == BlockState::live;
    }
    bool is_key(u32 index, const Key& key) const {
        for (u32 i = 0; i < KEY_WORDS; ++i)
            if (pool_.block(index).key[i].load(std::memory_order_relaxed) != key.words[i]) return false;
        return true;
    }
    bool is_filling(const Extent& extent) const {
        return extent.block < g_.shape.max_blocks && kept(extent.block) == Kept::filling &&
               pool_.block(extent.block).generation.load(std::memory_order_relaxed) == extent.generation;
    }
    Shared<u32>& bucket(u64 word) const { return buckets_[word & (g_.shape.buckets - 1)]; }

    // LOCK store is held in all of these.
    u32 find(const Key& key) {
        u32 link = bucket(key.words[0]).load(std::memory_order_relaxed);
        for (u32 steps = 0; link != 0; ++steps) {
            if (link > g_.shape.max_blocks || steps > g_.shape.max_blocks) {  // somebody wrote where it must not
                rebuild();
                return NONE;
            }
            u32 index = link - 1;
            if (kept(index) != Kept::none && is_key(index, key)) return index;
            link = pool_.block(index).next.load(std::memory_order_relaxed);
        }
        return NONE;
    }
    void link(u32 index) {
        Shared<u32>& head = bucket(pool_.block(index).key[0].load(std::memory_order_relaxed));
        pool_.block(index).next.store(head.load(std::memory_order_relaxed), std::memory_order_relaxed);
        head.store(index + 1, std::memory_order_relaxed);
    }
    void unlink(u32 index) {
        Shared<u32>* at = &bucket(pool_.block(index).key[0].load(std::memory_order_relaxed));
        for (u32 steps = 0; steps <= g_.shape.max_blocks; ++steps) {
            u32 link = at->load(std::memory_order_relaxed);
            if (link == 0 || link > g_.shape.max_blocks) return;
            Shared<u32>& next = pool_.block(link - 1).next;
            if (link - 1 == index) {
                at->store(next.load(std::memory_order_relaxed), std::memory_order_relaxed);
                return;
            }
            at = &next;
        }
    }
    void rebuild() {
        pool_.header().recoveries.fetch_add(1, std::memory_order_relaxed);
        for (u32 i = 0; i < g_.shape.buckets; ++i) buckets_[i].store(0, std::memory_order_relaxed);
        for (u32 index = 0; index < g_.shape.max_blocks; ++index)
            if (is_live(index) && kept(index) != Kept::none) link(index);
    }
    void use(u32 index, Extent& out) {
        Block& b = pool_.block(index);
        out = {index, b.generation.load(std::memory_order_relaxed), b.offset.load(std::memory_order_relaxed),
               b.nbytes.load(std::memory_order_relaxed)};
        pool_.open_kept(out);
        PENSTOCK_POINT("store.opened");
        b.used_ns.store(now_ns(), std::memory_order_relaxed);
        b.hits.store(b.hits.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    }
    bool look(const Key& key, Extent& out, u32& seen, Begun& found) {
        seen = fills();
        u32 index = find(key);
        if (index == NONE) return false;
        found = kept(index) == Kept::ready ? Begun::hit : Begun::wait;
        if (found == Begun::hit) {
            use(index, out);
            count(head_.hits);
        }
        return true;
    }
    // The block is kept no longer; it is returned at once if nobody holds it. True: it was.
    bool let_go(u32 index) {
        unlink(index);
        PENSTOCK_POINT("store.unlinked");
        return pool_.keep_no_longer(index, false);
    }

    // Makes room for so many bytes in one piece, by giving up those neighbours that nobody holds and that are worth
    // least: the larger and the longer unused, the less a byte of it is worth. False: there is no such piece.
    bool evict(u64 nbytes) {
        struct Item {
            u64 offset, end;
            u32 index;
            double worth;  // < 0: held
        };
        u64 need = round_up(std::max<u64>(nbytes, 1), LINE);
        {
            Locked guard(*this);
            u64 now = now_ns();
            std::vector<Item> items;
            for (u32 index = 0; index < g_.shape.max_blocks; ++index) {
                if (!is_live(index)) continue;
                Block& b = pool_.block(index);
                u64 offset = b.offset.load(std::memory_order_relaxed),
                    extent = b.extent.load(std::memory_order_relaxed);
                double idle = static_cast<double>(now - std::min(now, b.used_ns.load(std::memory_order_relaxed))) + 1.0;
                bool is_free = kept(index) == Kept::ready && pool_.is_unheld(index);
                items.push_back({offset, offset + extent, index, is_free ? static_cast<double>(extent) / idle : -1.0});
            }
            std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.offset < b.offset; });
            // The window [first, last] of neighbours that are all free to go, with room enough, worth least together.
            size_t first = 0, best_first = 0, best_last = 0;
            double worth = 0, best = -1;
            auto room = [&](size_t from, size_t to) {
                u64 low = from == 0 ? 0 : items[from - 1].end;
                u64 high = to + 1 == items.size() ? pool_.nbytes() : items[to + 1].offset;
                return high > low ? high - low : 0;
            };
            for (size_t last = 0; last < items.size(); ++last) {
                if (items[last].worth < 0) {
                    first = last + 1;
                    worth = 0;
                    continue;
                }
                worth += items[last].worth;
                while (first < last && room(first + 1, last) >= need) worth -= items[first++].worth;
                if (room(first, last) >= need && (best < 0 || worth < best)) {
                    best = worth;
                    best_first = first;
                    best_last = last;
                }
            }
            if (best < 0) return false;
            for (size_t i = best_first; i <= best_last; ++i) {
                unlink(items[i].index);
                PENSTOCK_POINT("store.unlinked");
                if (!pool_.keep_no_longer(items[i].index, true)) {  // somebody has opened it by its reference
                    link(items[i].index);
                    continue;
                }
                count(head_.evictions);
                head_.evicted_nbytes.fetch_add(items[i].end - items[i].offset, std::memory_order_relaxed);
            }
        }
        return true;
    }
    void announce_fill() {
        head_.fills.fetch_add(1, std::memory_order_release);
        std::atomic_thread_fence(std::memory_order_seq_cst);  // ORDER bell
        if (head_.filled.parked.load(std::memory_order_relaxed) == 0) return;
        head_.filled.parked.exchange(0, std::memory_order_seq_cst);
        ring_all(head_.filled);
    }

    Attachment& by_;
    const Geometry& g_;
    mutable Pool pool_;
    StoreHeader& head_;
    Shared<u32>* buckets_;
};

}  // namespace penstock
