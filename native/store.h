// store.h: blocks that are kept under a key after the last lease is gone, until their room is wanted.
//
// A kept block:   none ──begin──► filling ──commit──► ready ──evict──► none
//                           └──── abandon, or the writer's lease is gone ─┘
//
// The truth is in the blocks: state and key, and the writer: the taker, as long as it holds a lease. What is derived
// (the chains by which a key is found) is rebuilt by the peer that takes over the lock of a dead holder. A block that
// is kept is not returned with its last lease; one that is evicted is returned at once, for only blocks that are not
// held are evicted. LOCK store is taken before LOCK block, never while LOCK pool is held.
#pragma once
#include <optional>

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
        : attachment_(by),
          geometry_(by.segment().geometry()),
          pool_(by),
          head_(*by.segment().at<StoreHeader>(geometry_.store)),
          buckets_(by.segment().at<Shared<u32>>(geometry_.store + sizeof(StoreHeader))) {
        if (geometry_.shape.buckets == 0)
            throw Error(Fault::layout_mismatch, format("expected a store, got pool '%s'", by.segment().name().c_str()));
    }
    Pool& pool() { return pool_; }
    StoreHeader& header() const { return head_; }

    // What was looked up is a hit where it is found, and a miss where the peer has to make it: in begin(), or without
    // the store's room. So each value counts once, however often the peer looks before. count(): of a peer that gives
    // up to put a value, or that holds the value already.
    void count(u64 hits, u64 misses) const {
        head_.hits.add(hits);
        head_.misses.add(misses);
    }

    // A lease of what is kept under this key. False: nothing is, or it is not written yet.
    // is_granted: the peer opens what it has been told of, which is no hit; a grant to it is used up, if there is one.
    bool get(const Key& key, Extent& out, bool is_granted = false) {
        attachment_.refresh();
        return locked(NEVER, [&] {
            u32 index = find(key);
            if (index == NONE || state(index) != StoreState::ready) return false;
            use(index, out, is_granted);
            return true;
        });
    }

    // hit: the value is there, and out is a lease of it. fill: out is a lease of a block that the caller writes, then
    // commits or abandons. wait: another peer is writing the value; wait_for_fill(seen) and begin again.
    // Throws MemoryExhausted where all that is in the way is held.
    // deadline: for locks.
    Begun begin(const Key& key, u64 nbytes, Extent& out, u32& fills_before, u64 deadline = NEVER) {
        attachment_.refresh();
        Begun begun;
        auto is_there = [&] { return locked(deadline, [&] { return look(key, out, fills_before, begun); }); };
        if (!take(nbytes, out, deadline, is_there)) return begun;
        PENSTOCK_POINT("store.taken");
        begun = Begun::fill;
        Extent ours = out;
        try {
            bool is_there = locked(deadline, [&] {
                if (look(key, out, fills_before, begun)) return true;
                Block& block = pool_.block(ours.block);
                for (u32 i = 0; i < KEY_WORDS; ++i) block.key[i].store(key.words[i], RELAXED);
                block.used_ns.store(now_ns(), RELAXED);
                block.hits.store(0, RELAXED);
                set_state(ours.block, StoreState::filling);
                PENSTOCK_POINT("store.keyed");
                link(ours.block);
                head_.puts.add();
                head_.misses.add();
                return false;
            });
            if (!is_there) return Begun::fill;
        } catch (...) {
            pool_.release(ours.block, ours.generation);
            throw;
        }
        pool_.release(ours.block, ours.generation);  // another peer was faster
        return begun;
    }
    // What was written is there for all. False: it was taken out meanwhile (clear()).
    bool commit(const Extent& extent) {
        bool is_ours;
        {
            Locked guard(*this);
            is_ours = is_filling(extent);
            PENSTOCK_POINT("store.filled");
            if (is_ours) set_state(extent.block, StoreState::ready);
        }
        PENSTOCK_POINT("store.committed");
        announce_fill();
        return is_ours;
    }
    // What was being written is given up: the block goes with its last lease, and another peer may write the key.
    void abandon(const Extent& extent, u64 deadline = NEVER) {
        bool was_ours = locked(deadline, [&] {
            if (!is_filling(extent)) return false;
            let_go(extent.block);
            head_.abandoned.add();
            return true;
        });
        if (was_ours) announce_fill();
    }
    // The writer's last lease, given back without a word. Where a stopped peer holds the lock, that alone says it:
    // see is_given_up().
    void give_up(const Extent& extent) noexcept {
        try {
            abandon(extent, 0);
        } catch (...) {
            head_.abandoned.add();
        }
        pool_.release(extent.block, extent.generation);
        announce_fill();
    }
    // A block without a key, for which what is kept gives way. Throws MemoryExhausted where that is held.
    void take(u64 nbytes, Extent& out, u64 deadline = NEVER) {
        attachment_.refresh();
        take(nbytes, out, deadline, [] { return false; });
    }
    // Gives one key up that no peer holds or was granted. False: it is held, or being written, or not there.
    bool evict_key(const Key& key) {
        attachment_.refresh();
        return locked(NEVER, [&] {
            u32 index = find(key);
            if (index == NONE || !may_go(index, pool_.block(index).generation.load(RELAXED))) return false;
            return give_up_unheld(index, pool_.block(index).extent.load(RELAXED));
        });
    }
    // Takes one key out, or, without one, all: what is held goes with its last lease.
    u64 remove(const Key* key) {
        u64 removed = 0;
        locked(NEVER, [&] {
            if (key != nullptr) {
                u32 index = find(*key);
                if (index != NONE) let_go(index), ++removed;
            } else {
                for (u32 index = 0; index < geometry_.shape.max_blocks; ++index)
                    if (state(index) != StoreState::none) let_go(index), ++removed;
            }
            return true;
        });
        announce_fill();
        return removed;
    }
    u32 fills() const { return head_.fills.load(order::fills.acquire); }
    Woken wait_for_fill(u32 fills, u64 deadline, Spinner& spinner, Waits& waits) {
        head_.fills_awaited.add();
        return wait<false>(head_.filled, 1ull << (attachment_.slot() % 64), deadline, spinner, waits, nullptr,
                           [&] { return head_.fills.load(order::fills.acquire) != fills || attachment_.is_stale(); });
    }

    // For the reaper: what that peer was writing is given up; if it held the lock, what is derived is rebuilt.
    template <class Still>
    void drop_filling(u32 slot, u32 epoch, Still&& is_still) {
        {
            if (attachment_.take_over(head_.lock, slot, epoch))
                rebuild();
            else if (attachment_.lock(head_.lock, now_ns() + Pool::REAP_NS))
                rebuild();
            Unlock unlock{attachment_, head_.lock};
            for (u32 index = 0; index < geometry_.shape.max_blocks && is_still(); ++index) {
                if (state(index) != StoreState::filling || pool_.block(index).taker.load(RELAXED) != slot) continue;
                let_go(index);
                head_.abandoned.add();
            }
        }
        announce_fill();  // in any case: it may have died between committing and saying so, as may another reaper
    }

    StoreStats stats() const {
        StoreStats s;
        s.hits = head_.hits.value();
        s.misses = head_.misses.value();
        s.puts = head_.puts.value();
        s.evictions = head_.evictions.value();
        s.evicted_nbytes = head_.evicted_nbytes.value();
        s.fills_awaited = head_.fills_awaited.value();
        s.abandoned = head_.abandoned.value();
        u64 now = now_ns();
        for (u32 index = 0; index < geometry_.shape.max_blocks; ++index) {
            Block& block = pool_.block(index);
            StoreState current = state(index);
            if (current == StoreState::none || !is_live(index)) continue;
            StoreStats::Item item{};
            for (u32 i = 0; i < KEY_WORDS; ++i) item.key.words[i] = block.key[i].load(RELAXED);
            item.block = index;
            item.generation = block.generation.load(RELAXED);
            item.taker = block.taker.load(RELAXED);
            item.nbytes = block.nbytes.load(RELAXED);
            item.hits = block.hits.load(RELAXED);
            item.is_filling = current == StoreState::filling;
            for (u32 p = 0; p < geometry_.shape.max_peers; ++p) item.holders += pool_.held(index)[p].load(RELAXED) != 0;
            u64 taken = block.taken_ns.load(RELAXED), used = block.used_ns.load(RELAXED);
            item.age_ns = now - std::min(now, taken);
            item.idle_ns = now - std::min(now, used);
            s.items.push_back(item);
        }
        return s;
    }

   private:
    // A block, for which what is kept gives way. False: is_there() said so first. Where the machine has no memory for
    // more pages, the room is made among those that are claimed, and the next take tries to claim more again.
    template <class IsThere>
    bool take(u64 nbytes, Extent& out, u64 deadline, IsThere&& is_there) {
        bool is_full = false;
        u64 limit = NEVER;
        std::optional<Error> shortage;
        for (int attempts = 0;; ++attempts) {
            if (is_there()) return false;
            if (is_full) {  // after a last look, for it may have come
                if (shortage) throw *shortage;
                pool_.header().exhaustions.add();
                throw pool_.exhausted(nbytes);
            }
            try {
                if (pool_.try_take(nbytes, out, deadline, limit)) return true;
            } catch (const Error& error) {
                if (error.fault != Fault::memory_exhausted || limit != NEVER) throw;
                shortage = error;
                limit = pool_.claimed_from_start();
                if (round_up(std::max<u64>(nbytes, 1), LINE) > limit) throw;
                continue;
            }
            is_full = attempts >= MAX_ATTEMPTS || !evict(nbytes, deadline, limit);
        }
    }

    static constexpr u32 NONE = ~0u;
    static constexpr size_t AHEAD = 6;       // blocks; looking at many is waiting for memory, and little else
    static constexpr int MAX_ATTEMPTS = 64;  // others may take what was made free; then it is really full

    struct Unlock {
        Attachment& by;
        Shared<u32>& word;
        ~Unlock() { by.unlock(word); }
    };
    struct Locked {  // LOCK store, with what is derived repaired if its last holder died
        Store& store;
        explicit Locked(Store& store, u64 deadline = NEVER) : store(store) {
            if (store.attachment_.lock(store.head_.lock, std::min(deadline, now_ns() + Pool::LOCK_NS))) store.rebuild();
            PENSTOCK_POINT("store.locked");
        }
        ~Locked() { store.attachment_.unlock(store.head_.lock); }
    };
    // Under LOCK store. A block that a stopped peer has locked is not waited for there, as all other keys would wait
    // too: it is waited for alone, and then all begins again.
    template <class Do>
    bool locked(u64 deadline, Do&& what) {
        for (deadline = std::min(deadline, now_ns() + Pool::LOCK_NS);;) {
            busy_ = NONE;
            try {
                Locked guard(*this, deadline);
                return what();
            } catch (const Error& error) {
                if (error.fault != Fault::timeout || busy_ == NONE || now_ns() >= deadline) throw;
            }
            pool_.await(busy_, deadline);
        }
    }
    // What needs the lock of one block, under LOCK store.
    template <class Do>
    auto unless_busy(u32 index, Do&& what) {
        try {
            return what();
        } catch (const Error& error) {
            if (error.fault == Fault::timeout) busy_ = index;
            throw;
        }
    }

    StoreState state(u32 index) const { return static_cast<StoreState>(pool_.block(index).store_state.load(RELAXED)); }
    void set_state(u32 index, StoreState to) { pool_.block(index).store_state.store(static_cast<u32>(to), RELAXED); }
    bool is_live(u32 index) const {
        return static_cast<BlockState>(pool_.block(index).state.load(order::block.acquire)) == BlockState::live;
    }
    bool is_key(u32 index, const Key& key) const {
        for (u32 i = 0; i < KEY_WORDS; ++i)
            if (pool_.block(index).key[i].load(RELAXED) != key.words[i]) return false;
        return true;
    }
    bool is_filling(const Extent& extent) const {
        return extent.block < geometry_.shape.max_blocks && state(extent.block) == StoreState::filling &&
               pool_.block(extent.block).generation.load(RELAXED) == extent.generation;
    }
    Shared<u32>& bucket(u64 word) const { return buckets_[word & (geometry_.shape.buckets - 1)]; }

    // LOCK store is held in all of these.
    u32 find(const Key& key) {
        for (bool is_rebuilt : {false, true}) {
            u32 link = bucket(key.words[0]).load(RELAXED), steps = 0;
            for (; link != 0 && link <= geometry_.shape.max_blocks && steps <= geometry_.shape.max_blocks; ++steps) {
                u32 index = link - 1;
                if (state(index) != StoreState::none && is_key(index, key) && is_live(index)) return index;
                link = pool_.block(index).next.load(RELAXED);
            }
            if (link == 0 || is_rebuilt) break;
            rebuild();  // a peer wrote where it must not
        }
        return NONE;
    }
    // Its writer has no lease of it any more, and so will never commit it.
    bool is_given_up(u32 index) const {  // its lease was there before it was `filling`, which LOCK store shows
        u32 taker = pool_.block(index).taker.load(RELAXED);
        return state(index) == StoreState::filling &&
               (taker >= geometry_.shape.max_peers || pool_.held(index)[taker].load(RELAXED) == 0);
    }
    void link(u32 index) {
        Shared<u32>& head = bucket(pool_.block(index).key[0].load(RELAXED));
        pool_.block(index).next.store(head.load(RELAXED), RELAXED);
        head.store(index + 1, RELAXED);
    }
    void unlink(u32 index) {
        Shared<u32>* at = &bucket(pool_.block(index).key[0].load(RELAXED));
        for (u32 steps = 0; steps <= geometry_.shape.max_blocks; ++steps) {
            u32 link = at->load(RELAXED);
            if (link == 0 || link > geometry_.shape.max_blocks) return;
            Shared<u32>& next = pool_.block(link - 1).next;
            if (link - 1 == index) {
                at->store(next.load(RELAXED), RELAXED);
                return;
            }
            at = &next;
        }
    }
    void rebuild() {
        pool_.header().recoveries.add();
        for (u32 i = 0; i < geometry_.shape.buckets; ++i) buckets_[i].store(0, RELAXED);
        for (u32 index = 0; index < geometry_.shape.max_blocks; ++index)
            if (is_live(index) && state(index) != StoreState::none) link(index);
    }
    void use(u32 index, Extent& out, bool is_granted = false) {
        Block& block = pool_.block(index);
        out = {index, block.generation.load(RELAXED), block.offset.load(RELAXED), block.nbytes.load(RELAXED)};
        unless_busy(index, [&] { pool_.open_kept(out, 0, is_granted); });
        PENSTOCK_POINT("store.opened");
        block.used_ns.store(now_ns(), RELAXED);
        if (is_granted) return;
        block.hits.store(block.hits.load(RELAXED) + 1, RELAXED);
        head_.hits.add();
    }
    bool look(const Key& key, Extent& out, u32& fills_before, Begun& begun) {
        fills_before = fills();
        u32 index = find(key);
        if (index == NONE) return false;
        if (is_given_up(index)) {
            let_go(index);
            return false;
        }
        begun = state(index) == StoreState::ready ? Begun::hit : Begun::wait;
        if (begun == Begun::hit) use(index, out);
        return true;
    }
    // The block is kept no longer; it is returned at once if it is not held. False: it is held, and only_if_unheld.
    bool let_go(u32 index, bool only_if_unheld = false) {
        unlink(index);
        PENSTOCK_POINT("store.unlinked");
        bool has_gone = false;
        try {
            has_gone = unless_busy(index, [&] { return pool_.keep_no_longer(index, only_if_unheld, 0); });
        } catch (...) {
            link(index);
            throw;
        }
        if (!has_gone) link(index);
        return has_gone;
    }

    // Makes room for so many bytes in one piece, by giving up those neighbours that are not held and that are together
    // worth least. Worth falls with the time unused and grows with the size: a small one goes for a small need, and a
    // large one that was not used for long goes before small ones that were. False: there is no such piece.
    // Looking at all of them takes as long as there are many, so no peer is kept out meanwhile: what was chosen is
    // looked at again under the lock, and what has become something else since then stays.
    // A block that is locked, perhaps by a stopped peer, is passed over where there is another way.
    // limit: the room is to lie below it.
    bool evict(u64 nbytes, u64 deadline, u64 limit, bool passes_over = true) {
        u64 need = round_up(std::max<u64>(nbytes, 1), LINE);
        bool has_passed = false;
        std::vector<Item> items = by_offset(deadline, passes_over, has_passed);
        auto room = [&](size_t first, size_t end) {  // were [first, end) gone
            u64 low = first == 0 ? 0 : items[first - 1].end,
                high = std::min(end < items.size() ? items[end].offset : pool_.nbytes(), limit);
            return high > low ? high - low : 0;
        };
        size_t best_first = 0, best_end = 0;
        Worth best = ~Worth{0};
        auto consider = [&](size_t first, size_t end, Worth worth) {
            if (worth >= best) return;
            best = worth;
            best_first = first;
            best_end = end;
        };
        bool is_gap = false;
        for (size_t at = 0; at <= items.size(); ++at) is_gap = is_gap || room(at, at) >= need;
        if (is_gap) {
            if (items.size() < geometry_.shape.max_blocks) return true;  // it has come meanwhile
            for (size_t at = 0; at < items.size(); ++at)                 // what is short is a number for the block
                if (items[at].may_go) consider(at, at + 1, items[at].worth);
        } else {
            Worth worth = 0;
            for (size_t first = 0, at = 0; at < items.size(); ++at) {
                if (!items[at].may_go) {
                    first = at + 1;
                    worth = 0;
                    continue;
                }
                worth += items[at].worth;
                while (first < at && room(first + 1, at + 1) >= need) worth -= items[first++].worth;
                if (room(first, at + 1) >= need) consider(first, at + 1, worth);
            }
        }
        if (best_first == best_end) return has_passed && evict(nbytes, deadline, limit, false);
        PENSTOCK_POINT("store.chosen");
        return locked(deadline, [&] {
            for (size_t i = best_first; i < best_end; ++i) {
                if (!may_go(items[i].index, items[i].generation)) continue;
                give_up_unheld(items[i].index, items[i].end - items[i].offset);
            }
            return true;
        });
    }
    bool give_up_unheld(u32 index, u64 extent) {
        if (!let_go(index, true)) return false;  // another peer has opened it by its reference
        head_.evictions.add();
        head_.evicted_nbytes.add(extent);
        return true;
    }
    bool may_go(u32 index, u32 generation) const {
        return is_live(index) && pool_.block(index).generation.load(RELAXED) == generation &&
               (state(index) == StoreState::ready || is_given_up(index)) && pool_.is_unheld(index);
    }
    __extension__ typedef unsigned __int128 Worth;  // exact, so that small ones are not lost in sums with large ones
    struct Item {
        u64 offset, end;
        Worth worth;
        u32 index, generation;
        bool may_go;
    };
    std::vector<Item> by_offset(u64 deadline, bool passes_over, bool& has_passed) {
        std::vector<Entry> taken = pool_.taken(deadline);
        std::vector<Item> items;
        items.reserve(taken.size());
        u64 now = now_ns();
        for (size_t i = 0; i < taken.size(); ++i) {
            if (i + AHEAD < taken.size()) pool_.fetch_ahead(taken[i + AHEAD].block);
            const Entry& entry = taken[i];
            Block& block = pool_.block(entry.block);
            u32 generation = block.generation.load(RELAXED);
            if (!is_live(entry.block) || block.offset.load(RELAXED) != entry.offset) continue;
            u64 idle_ns = now - std::min(now, block.used_ns.load(RELAXED));
            bool may_go = this->may_go(entry.block, generation);
            if (may_go && passes_over && pool_.is_locked(entry.block)) {
                may_go = false;
                has_passed = true;
            }
            items.push_back({entry.offset, entry.offset + entry.extent, Worth{entry.extent} * (~u64{0} / (idle_ns + 1)),
                             entry.block, generation, may_go});
        }
        return items;
    }
    void announce_fill() {
        head_.fills.fetch_add(1, order::fills.release);
        fence(order::bell.seq_cst);
        if (head_.filled.parked.load(RELAXED) == 0) return;
        head_.filled.parked.exchange(0, order::bell.seq_cst);
        ring_all(head_.filled);
    }

    Attachment& attachment_;
    const Geometry& geometry_;
    mutable Pool pool_;
    StoreHeader& head_;
    Shared<u32>* buckets_;
    u32 busy_ = NONE;  // the block that was locked
};

}  // namespace penstock
