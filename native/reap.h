// reap.h: what a peer that died, or left, gives back: its lock, its ends, its leases and grants, in this order.
// Many may do this for one peer at the same time. Ends change by compare-and-swap from exactly the word of that peer;
// counts change under the block's lock after a look whether the slot is still that peer's.
#pragma once
#include "channel.h"
#include "store.h"

namespace penstock {

inline void wake_everybody(Attachment& by) {
    const Geometry& g = by.segment().geometry();
    if (g.pool != 0) ring_all(by.segment().at<PoolHeader>(g.pool)->memory);
    if (g.shape.buckets != 0) ring_all(by.segment().at<StoreHeader>(g.store)->filled);
    if (g.channel != 0) {
        ring_all(by.segment().at<ChannelHeader>(g.channel)->bell);
        for (u32 i = 0; i < g.shape.lanes; ++i) ring_all(by.segment().at<Lane>(g.lanes)[i].room);
    }
    for (u32 p = 0; p < g.shape.max_peers; ++p)
        if (by.is_live(p)) by.wake_async(p);
}

// Marks the ends of the peer in `slot` dead, or finds those of one that is leaving, and wakes nobody. Returns its
// receivers, a bit each. A dead end is marked first, for nobody can take it while its peer is dying; one that is left
// is closed last, for it can.
inline u64 mark_ends(Attachment& by, u32 slot, u64 identity, EndState ends_become) {
    const Geometry& g = by.segment().geometry();
    if (g.channel == 0) return 0;
    u32 epoch = by.peer(slot).epoch.load(order::epoch.acquire) & EPOCH_MASK;
    auto is_still = [&] { return by.peer(slot).identity.load(order::identity.acquire) == identity; };
    if (!is_still()) return 0;  // the epoch was read after the identity: it may be a successor's
    End end{};
    // True, and which it was: this end is that peer's, and to be cleaned up after. One that is closed has been.
    auto was_its = [&](Shared<u64>& word) {
        u64 seen = word.load(order::end.acquire);
        end = end_of(seen);
        if (end.slot != slot || end.peer_epoch != epoch || !is_still()) return false;
        if (end.state != EndState::live) return end.state == EndState::dead;
        if (ends_become == EndState::closed) return true;
        end.state = EndState::dead;
        return word.compare_exchange_strong(seen, make_word(end), order::end.acq_rel) || seen == make_word(end);
    };
    u64 receivers = 0;
    ChannelHeader& head = *by.segment().at<ChannelHeader>(g.channel);
    Lane* lanes = by.segment().at<Lane>(g.lanes);
    for (u32 r = 0; r < g.shape.receivers; ++r) {
        if (!was_its(by.segment().at<ReceiverSlot>(g.receivers)[r].word)) continue;
        receivers |= 1ull << r;
        for (u32 i = 0; i < g.shape.lanes; ++i) {
            put_out(by.segment().at<Cursor>(g.cursors)[i * g.shape.receivers + r].mode, end.epoch);
        }
        by.segment().at<ReceiverSlot>(g.receivers)[r].waits.since_ns.store(0, RELAXED);
        // Bits that are not ours: whoever clears them rings everybody afterwards (wake_everybody).
        head.bell.parked.fetch_and(~(1ull << r), order::bell.seq_cst);
        head.bell.parked_async.fetch_and(~(1ull << r), order::bell.seq_cst);
    }
    PENSTOCK_POINT("reap.half");
    for (u32 i = 0; i < g.shape.lanes; ++i) {
        if (!was_its(lanes[i].word)) continue;
        lanes[i].room.parked.store(0, order::bell.seq_cst);
        lanes[i].room.parked_async.store(0, order::bell.seq_cst);
        lanes[i].waits.since_ns.store(0, RELAXED);
        head.ready.fetch_or(1ull << i, order::ready.release);  // it may have died between committing and saying so
    }
    by.segment().header().changes.fetch_add(1, order::changes.acq_rel);
    PENSTOCK_POINT("reap.marked");
    return receivers;
}

inline void reap_holdings(Attachment& by, u32 slot, u64 identity, EndState ends_become) {
    const Geometry& g = by.segment().geometry();
    if (g.pool == 0) return;
    Pool pool(by);
    u32 peer_epoch = by.peer(slot).epoch.load(order::epoch.acquire), epoch = peer_epoch & EPOCH_MASK;
    auto is_still = [&] { return by.peer(slot).identity.load(order::identity.acquire) == identity; };
    if (!is_still()) return;  // the epoch was read after the identity: it may be a successor's
    bool is_leaving = ends_become == EndState::closed;
    auto close_it = [&](Shared<u64>& word, EndState from) {
        u64 seen = word.load(order::end.acquire);
        End end = end_of(seen);
        if (end.slot != slot || end.peer_epoch != epoch || end.state != from) return;
        end.state = EndState::closed;
        word.compare_exchange_strong(seen, make_word(end), order::end.acq_rel);
    };
    if (!is_leaving) by.peer(slot).reaped_ns.store(now_ns(), RELAXED);
    pool.recover_lock(slot, peer_epoch);
    u64 dead_receivers = mark_ends(by, slot, identity, ends_become);
    if (g.shape.buckets != 0) Store(by).drop_filling(slot, peer_epoch, is_still);
    Counter left_blocks, left_nbytes;  // in peace: nobody is told
    Counter& blocks = is_leaving ? left_blocks : by.peer(slot).reaped_blocks;
    Counter& nbytes = is_leaving ? left_nbytes : by.peer(slot).reaped_nbytes;
    auto is_committed = [&](u32 lane, u64 position) {
        return g.channel == 0 || lane >= g.shape.lanes ||
               position < by.segment().at<Lane>(g.lanes)[lane].committed.load(order::publish.acquire);
    };
    for (u32 index = 0; index < g.shape.max_blocks; ++index)
        pool.give_back(index, slot, peer_epoch, dead_receivers, is_still, is_committed, blocks, nbytes);
    if (is_leaving && g.channel != 0) {
        for (u32 r = 0; r < g.shape.receivers; ++r)
            close_it(by.segment().at<ReceiverSlot>(g.receivers)[r].word, EndState::live);
        for (u32 i = 0; i < g.shape.lanes; ++i) close_it(by.segment().at<Lane>(g.lanes)[i].word, EndState::live);
    }
    if (g.channel != 0)  // it closed in peace, and what could still write died with it
        for (u32 i = 0; i < g.shape.lanes; ++i) close_it(by.segment().at<Lane>(g.lanes)[i].word, EndState::closing);
    // It may have died between giving a block back and saying so.
    if (ends_become == EndState::dead) pool.announce_return();
}

}  // namespace penstock
