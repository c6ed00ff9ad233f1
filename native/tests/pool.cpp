// pool.cpp: peers take, fill, grant, open, pass on and give back blocks at random, and come and go meanwhile. Whoever
// opens a block finds in it what was written; in the end all is back and the pool is one piece again. Then what a death
// leaves half done, forged one by one: a lock, a table of entries, a return that nobody was told of, a reused pid.
#include <algorithm>
#include <barrier>

#include "testing.h"

using namespace testing;

namespace {

constexpr u64 NBYTES = 1 << 20;
constexpr u32 BLOCKS = 256;
constexpr int TRADERS = 5;

struct Letter {  // a reference on its way, and what it refers to
    Extent extent;
    u64 key;
};
struct Mailbox {
    std::mutex mutex;
    std::deque<Letter> letters;
};

struct Lent {
    Letter letter;
    bool is_own;
};

void check_filled(Attachment& by, const Letter& letter) {
    const u8* at = by.segment().read_at(by.segment().geometry().pool_data + letter.extent.offset);
    REQUIRE(is_filled(at, letter.extent.nbytes, letter.key), "block %u, generation %u: not what was written",
            letter.extent.block, letter.extent.generation);
}

void require_disjoint(Attachment& by) {
    Pool pool(by);
    std::vector<std::pair<u64, u64>> taken;
    for (u32 i = 0; i < by.shape().max_blocks; ++i)
        if (pool.block(i).state.load(RELAXED) == static_cast<u32>(BlockState::live))
            taken.emplace_back(pool.block(i).offset.load(RELAXED), pool.block(i).extent.load(RELAXED));
    std::sort(taken.begin(), taken.end());
    for (size_t i = 1; i < taken.size(); ++i)
        REQUIRE(taken[i - 1].first + taken[i - 1].second <= taken[i].first, "blocks overlap at %" PRIu64,
                taken[i].first);
}
// A grant to one who has left would be inherited by the next in that place, and keep the block until then.
void require_no_grants_to_the_gone(Attachment& by) {
    Pool pool(by);
    for (u32 i = 0; i < by.shape().max_blocks; ++i) {
        if (pool.block(i).state.load(RELAXED) != static_cast<u32>(BlockState::live)) continue;
        for (u32 from = 0; from < by.shape().max_peers; ++from)
            for (u32 to = 0; to < by.shape().max_peers; ++to)
                REQUIRE(by.is_live(to) || pool.grants(i, from)[to].load(RELAXED) == 0,
                        "block %u: %u grants from peer %u to peer %u, who has left", i,
                        pool.grants(i, from)[to].load(RELAXED), from, to);
    }
}
void require_empty(Attachment& by) {
    Pool pool(by);
    PoolStats stats = pool.stats();
    REQUIRE(stats.blocks == 0 && stats.holders.empty(), "%" PRIu64 " blocks left, %zu holders", stats.blocks,
            stats.holders.size());
    Extent whole;
    REQUIRE(pool.try_take(NBYTES, whole), "the pool is not in one piece: %" PRIu64 " free of which %" PRIu64 " at once",
            stats.free_nbytes, stats.largest_free_nbytes);
    pool.release(whole.block, whole.generation);
}

// One peer: its lease on everything in `lent`; letters arrive in the mailbox of its slot.
class Trader {
   public:
    Trader(std::shared_ptr<Segment> segment, std::vector<Mailbox>& mail, u64 seed, std::atomic<u64>& keys)
        : segment_(std::move(segment)), mail_(mail), random_(seed), keys_(keys) {
        come();
    }
    void step() {
        switch (random_.below(16)) {
            case 0:
            case 1:
            case 2:
            case 3: return take();
            case 4:
            case 5:
            case 6: return grant();
            case 7:
            case 8:
            case 9: return open();
            case 10: return revoke();
            case 11:
                if (!random_.one_in(50)) return;
                lent_.clear();  // without giving back: leaving does it
                by_.reset();
                return come();
            default: return release();
        }
    }
    void give_all_back() {
        while (!lent_.empty()) release();
    }
    void leave() { by_.reset(); }
    u64 opened = 0, refused = 0, taken = 0;

   private:
    void come() { by_ = Attachment::join(segment_, "trader"); }
    void take() {
        if (lent_.size() > 24) return release();
        Pool pool(*by_);
        Letter letter{{}, keys_.fetch_add(1)};
        u64 nbytes = random_.one_in(20) ? random_.below(NBYTES / 4) : random_.below(4096);
        if (!pool.try_take(nbytes, letter.extent)) return release();
        fill(segment_->write_at(segment_->geometry().pool_data + letter.extent.offset), nbytes, letter.key);
        lent_.push_back({letter, true});
        ++taken;
    }
    void grant() {
        if (lent_.empty()) return;
        const Lent& lent = lent_[random_.below(lent_.size())];
        u32 to = static_cast<u32>(random_.below(mail_.size()));
        if (!by_->is_live(to)) return;
        try {
            Pool(*by_).grant(lent.letter.extent, to);
        } catch (const Error& error) {
            REQUIRE(error.fault == Fault::peer_died, "grant: %s", error.what());  // it left just now
            return;
        }
        std::lock_guard guard(mail_[to].mutex);
        mail_[to].letters.push_back(lent.letter);
        if (mail_[to].letters.size() > 64) mail_[to].letters.pop_front();  // and its grant stays until somebody leaves
    }
    void open() {
        Letter letter;
        {
            Mailbox& mine = mail_[by_->slot()];
            std::lock_guard guard(mine.mutex);
            if (mine.letters.empty()) return;
            letter = mine.letters.front();
            mine.letters.pop_front();
        }
        try {
            Pool(*by_).open(letter.extent);
        } catch (const Error& error) {
            REQUIRE(error.fault == Fault::stale_ref, "open: %s", error.what());  // its granter left, or it was revoked
            ++refused;
            return;
        }
        check_filled(*by_, letter);
        lent_.push_back({letter, false});
        ++opened;
    }
    void revoke() {
        if (lent_.empty()) return;
        Pool(*by_).revoke(lent_[random_.below(lent_.size())].letter.extent,
                          static_cast<u32>(random_.below(mail_.size())));
    }
    void release() {
        if (lent_.empty()) return;
        u64 i = random_.below(lent_.size());
        check_filled(*by_, lent_[i].letter);
        Pool(*by_).release(lent_[i].letter.extent.block, lent_[i].letter.extent.generation);
        std::swap(lent_[i], lent_.back());
        lent_.pop_back();
    }
    std::shared_ptr<Segment> segment_;
    std::shared_ptr<Attachment> by_;
    std::vector<Mailbox>& mail_;
    std::vector<Lent> lent_;
    Random random_;
    std::atomic<u64>& keys_;
};

void trade(u64 seed, u64 steps) {
    auto segment = create(pool_shape(NBYTES, BLOCKS, 12), "pool");
    auto look = Attachment::join(segment, "look");
    std::vector<Mailbox> mail(12);
    std::atomic<u64> keys{1}, opened{0}, refused{0}, taken{0};
    std::barrier has_given_back(TRADERS + 1), may_leave(TRADERS + 1);
    std::vector<std::thread> threads;
    for (u64 t = 0; t < static_cast<u64>(TRADERS); ++t)
        threads.emplace_back([&, t] {
            Trader trader(WATCHES_THREADS ? segment : map_again(*segment), mail, seed * 16 + t, keys);
            for (u64 i = 0; i < steps; ++i) trader.step();
            trader.give_all_back();
            has_given_back.arrive_and_wait();
            may_leave.arrive_and_wait();
            trader.leave();
            opened += trader.opened, refused += trader.refused, taken += trader.taken;
        });
    has_given_back.arrive_and_wait();
    require_disjoint(*look);
    require_no_grants_to_the_gone(*look);
    may_leave.arrive_and_wait();
    for (auto& thread : threads) thread.join();
    require_empty(*look);
    REQUIRE(opened > taken / 20, "%" PRIu64 " opened of %" PRIu64, opened.load(), taken.load());
    std::printf("trade: %" PRIu64 " taken, %" PRIu64 " opened, %" PRIu64 " stale\n", taken.load(), opened.load(),
                refused.load());
}

PeerState state_at(Attachment& by, u32 slot) { return state_of(by.peer(slot).identity.load(order::identity.acquire)); }

void a_reused_pid_does_not_pass_for_the_dead() {
    auto by = Attachment::join(create(pool_shape(NBYTES, BLOCKS), "pool"), "survivor");
    Pool pool(*by);
    u32 slot = forge_peer(*by, make_identity(PeerState::live, ::getpid(), own_start() - 1));
    Extent extent;
    REQUIRE(pool.try_take(100, extent), "no room");  // refreshes: sees the peer, and that it is not who it says
    REQUIRE(state_at(*by, slot) == PeerState::dead, "a process of another start time passes for the peer");
    pool.release(extent.block, extent.generation);
    require_empty(*by);
}

void a_lock_of_the_dead_is_taken_over_and_the_entries_rebuilt() {
    auto by = Attachment::join(create(pool_shape(NBYTES, BLOCKS), "pool"), "survivor");
    Pool pool(*by);
    const Geometry& g = by->segment().geometry();
    std::vector<Letter> letters;
    for (u64 key = 1; key <= 20; ++key) {
        Letter letter{{}, key};
        REQUIRE(pool.try_take(1000 * key, letter.extent), "no room");
        fill(by->segment().write_at(g.pool_data + letter.extent.offset), letter.extent.nbytes, key);
        letters.push_back(letter);
    }
    u32 slot = forge_peer(*by, identity_of_the_dead());
    Entry* entries = by->segment().at<Entry>(g.entries);  // as a death within memmove leaves them: doubled, or missing
    entries[5] = entries[4];
    entries[9] = {~0ull, ~0ull, ~0u, 0};
    pool.header().entry_count.store(17, RELAXED);
    pool.header().lock.store((slot + 1) | 1u << 9, RELAXED);
    for (Letter& letter : letters) pool.block(letter.extent.block).lock.store((slot + 1) | 1u << 9, RELAXED);
    u64 recoveries = pool.stats().recoveries;
    Letter more{{}, 21};
    REQUIRE(pool.try_take(5000, more.extent), "no room");
    REQUIRE(pool.stats().recoveries > recoveries, "nothing was recovered");
    REQUIRE(pool.stats().blocks == 21, "%" PRIu64 " blocks", pool.stats().blocks);
    require_disjoint(*by);
    pool.release(more.extent.block, more.extent.generation);
    for (Letter& letter : letters) {
        check_filled(*by, letter);
        pool.release(letter.extent.block, letter.extent.generation);
    }
    require_empty(*by);
}

void a_return_that_nobody_was_told_of_is_found() {
    auto by = Attachment::join(create(pool_shape(NBYTES, BLOCKS), "pool"), "survivor");
    Pool pool(*by);
    Extent whole, none;
    REQUIRE(pool.try_take(NBYTES, whole), "no room");
    u32 slot = forge_peer(*by, identity_of_the_dead());
    // The dead one held the last lease; it died between saying so in the block and moving the count of returns.
    pool.held(whole.block)[by->slot()].store(0, RELAXED);
    pool.block(whole.block).state.store(static_cast<u32>(BlockState::returned), RELAXED);
    pool.block(whole.block).lock.store((slot + 1) | 1u << 9, RELAXED);
    by->resync();
    REQUIRE(state_at(*by, slot) == PeerState::dead, "not reaped");
    REQUIRE(pool.try_take(NBYTES, none), "a block that came back is not found");
    pool.release(none.block, none.generation);
    require_empty(*by);
}

void what_the_dead_held_comes_back() {
    auto by = Attachment::join(create(pool_shape(NBYTES, BLOCKS), "pool"), "survivor");
    Pool pool(*by);
    Extent mine, other;
    REQUIRE(pool.try_take(1000, mine) && pool.try_take(2000, other), "no room");
    u32 slot = forge_peer(*by, identity_of_the_dead());
    pool.held(other.block)[by->slot()].store(0, RELAXED);
    pool.held(other.block)[slot].store(3, RELAXED);
    pool.held(mine.block)[slot].store(1, RELAXED);
    pool.grants(mine.block, slot)[by->slot()].store(7, RELAXED);
    pool.grants(mine.block, by->slot())[slot].store(9, RELAXED);
    pool.block(mine.block).grant_units.store(16, RELAXED);
    by->resync();
    REQUIRE(state_at(*by, slot) == PeerState::dead, "not reaped");
    REQUIRE(pool.stats().blocks == 1, "%" PRIu64 " blocks", pool.stats().blocks);
    REQUIRE(by->peer(slot).reaped_blocks.value() == 2, "%" PRIu64 " blocks", by->peer(slot).reaped_blocks.value());
    pool.release(mine.block, mine.generation);
    require_empty(*by);
}

}  // namespace

int main(int argc, char** argv) {
    Arguments arguments(argc, argv);
    std::printf("pool: seed %" PRIu64 "\n", arguments.seed);
    std::fflush(stdout);
    a_reused_pid_does_not_pass_for_the_dead();
    a_lock_of_the_dead_is_taken_over_and_the_entries_rebuilt();
    what_the_dead_held_comes_back();
    a_return_that_nobody_was_told_of_is_found();
    u64 rounds = arguments.is_quick ? 2 : 10 * arguments.scale;
    for (u64 i = 0; i < rounds; ++i) trade(arguments.seed + i, arguments.is_quick ? 10'000 : 100'000);
    return 0;
}
