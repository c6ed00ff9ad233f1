// reap.h: what a peer that died, or left, gives back: its lock, its ends, its leases and grants, in this order.
// Many may do this for one peer at the same time. Ends change by compare-and-swap from exactly the word of that peer;
// counts change under the block's lock after a look whether the slot is still that peer's.
#pragma once
#include "describe.h"
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

// Marks the ends of the peer in `slot` dead, or finds those of one that is leaving, and wakes none. Returns its
// receivers, a bit each. A dead end is marked first, for none can take it while its peer is dying; one that is left
// is closed last, for it can.
inline u64 mark_ends(Attachment& by, u32 slot, u64 identity, EndState ends_become) {
    const Geometry& g = by.segment().geometry();
    if (g.channel == 0) return 0;
    u32 epoch = by.peer(slot).epoch.load(order::epoch.acquire) & EPOCH_MASK;
    auto is_still = [&] { return by.peer(slot).identity.load(order::identity.acquire) == identity; };
    if (!is_still()) return 0;  // the epoch was read after the identity: it may be a successor's
    End end{};
    // True, and which it was: this end is that peer's, and to be cleaned up after. One that is closed has been, and so
    // has one that failed and is not kept.
    auto was_its = [&](Shared<u64>& word, Shared<u64>* keeper = nullptr) {
        u64 current = word.load(order::end.acquire);
        end = end_of(current);
        if (end.slot != slot || end.peer_epoch != epoch || !is_still()) return false;
        if (end.state == EndState::failed) return keeper != nullptr && keeper->load(order::end.acquire) == current;
        if (end.state != EndState::live) return end.state == EndState::dead;
        if (ends_become == EndState::closed) return true;
        end.state = EndState::dead;
        return word.compare_exchange_strong(current, make_word(end), order::end.acq_rel) || current == make_word(end);
    };
    u64 receivers = 0;
    ChannelHeader& head = *by.segment().at<ChannelHeader>(g.channel);
    Lane* lanes = by.segment().at<Lane>(g.lanes);
    for (u32 r = 0; r < g.shape.receivers; ++r) {
        ReceiverSlot& receiver = by.segment().at<ReceiverSlot>(g.receivers)[r];
        if (!was_its(receiver.word, &receiver.keeper)) continue;
        receivers |= 1ull << r;
        for (u32 i = 0; i < g.shape.lanes; ++i) {
            put_out(by.segment().at<Cursor>(g.cursors)[i * g.shape.receivers + r].mode, end.epoch);
        }
        receiver.waits.since_ns.store(0, RELAXED);
        // Bits that are not ours: a peer that clears them rings all bells afterwards (wake_everybody).
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

// A peer that has died, or leaves, and where what it held is counted.
struct DeadPeer {
    u32 slot = 0;
    u32 epoch = 0;      // of the peer in that slot
    u64 identity = 0;   // that peer's; another's in the slot: it has been reaped, and the slot taken again
    u64 receivers = 0;  // of a channel, that died with it: a bit each
    Counter* blocks = nullptr;
    Counter* nbytes = nullptr;
    bool is_still_there(Attachment& by) const {
        return by.peer(slot).identity.load(order::identity.acquire) == identity;
    }
};

// Gives back what that peer holds of one block, what it granted and was granted; clears the receivers that died with
// it; withdraws a record that it never committed. What it held is counted under the block's lock, so the sums are
// complete once every block has been looked at, by however many reapers: so they are no result of this function.
inline void Pool::give_back(u32 index, const DeadPeer& dead) {
    Block& block = this->block(index);
    auto is_committed = [&](u32 lane, u64 position) {
        return geometry_.channel == 0 || lane >= geometry_.shape.lanes ||
               position < attachment_.segment().at<Lane>(geometry_.lanes)[lane].committed.load(order::publish.acquire);
    };
    bool is_last = false;
    {
        if (attachment_.take_over(block.lock, dead.slot, dead.epoch)) {
            recover_block(index);
        } else if (static_cast<BlockState>(block.state.load(order::block.acquire)) != BlockState::live) {
            return;
        } else if (attachment_.lock(block.lock, now_ns() + REAP_NS)) {
            recover_block(index);
        }
        Unlock unlock{attachment_, block.lock};
        if (static_cast<BlockState>(block.state.load(RELAXED)) != BlockState::live || !dead.is_still_there(attachment_))
            return;
        bool was_held = !is_unheld(index);
        if (held(index)[dead.slot].load(RELAXED) != 0) {
            held(index)[dead.slot].store(0, RELAXED);
            dead.blocks->add();
            dead.nbytes->add(block.nbytes.load(RELAXED));
        }
        if (geometry_.shape.has_grants != 0 && block.grant_units.load(RELAXED) != 0) {
            for (u32 p = 0; p < geometry_.shape.max_peers; ++p) {
                grants(index, dead.slot)[p].store(0, RELAXED);
                grants(index, p)[dead.slot].store(0, RELAXED);
            }
            recount(index);
        }
        u64 pending = block.pending.load(RELAXED);
        if (pending != 0) {
            pending &= ~dead.receivers;
            if (block.taker.load(RELAXED) == dead.slot &&
                !is_committed(block.pending_lane.load(RELAXED), block.pending_position.load(RELAXED)))
                pending = 0;
            block.pending.store(pending, RELAXED);
        }
        is_last = return_if_last(index) &&
                  (was_held || block.store_state.load(RELAXED) == static_cast<u32>(StoreState::none));
    }
    if (is_last) announce_return();
}

inline void reap_holdings(Attachment& by, u32 slot, u64 identity, EndState ends_become) {
    const Geometry& g = by.segment().geometry();
    if (g.pool == 0) return;
    Pool pool(by);
    bool is_leaving = ends_become == EndState::closed;
    Counter left_blocks, left_nbytes;  // in peace: nothing is said of it
    PeerSlot& peer = by.peer(slot);
    DeadPeer dead{.slot = slot,
                  .epoch = peer.epoch.load(order::epoch.acquire),
                  .identity = identity,
                  .blocks = is_leaving ? &left_blocks : &peer.reaped_blocks,
                  .nbytes = is_leaving ? &left_nbytes : &peer.reaped_nbytes};
    if (!dead.is_still_there(by)) return;  // the epoch was read after the identity: it may be a successor's
    auto close_end = [&](Shared<u64>& word) {
        u64 current = word.load(order::end.acquire);
        End end = end_of(current);
        if (end.slot != slot || end.peer_epoch != (dead.epoch & EPOCH_MASK) || end.state != EndState::live) return;
        end.state = EndState::closed;
        word.compare_exchange_strong(current, make_word(end), order::end.acq_rel);
    };
    if (!is_leaving) peer.reaped_ns.store(now_ns(), RELAXED);
    pool.recover_lock(slot, dead.epoch);
    dead.receivers = mark_ends(by, slot, identity, ends_become);
    if (g.shape.buckets != 0) Store(by).drop_filling(slot, dead.epoch, [&] { return dead.is_still_there(by); });
    for (u32 index = 0; index < g.shape.max_blocks; ++index) pool.give_back(index, dead);
    if (g.channel != 0) {
        if (is_leaving) {
            for (u32 r = 0; r < g.shape.receivers; ++r) close_end(by.segment().at<ReceiverSlot>(g.receivers)[r].word);
            for (u32 i = 0; i < g.shape.lanes; ++i) close_end(by.segment().at<Lane>(g.lanes)[i].word);
        }
        // It closed in peace, and what could still write died with it.
        for (u32 i = 0; i < g.shape.lanes; ++i) {
            Shared<u64>& keeper = by.segment().at<Lane>(g.lanes)[i].keeper;
            u64 current = keeper.load(RELAXED);
            End end = end_of(current);
            if (current != 0 && end.slot == slot && end.peer_epoch == (dead.epoch & EPOCH_MASK))
                keeper.compare_exchange_strong(current, 0, order::room.acq_rel);
        }
        for (u32 r = 0; r < g.shape.receivers; ++r) {  // it failed, and views held its records until now
            Shared<u64>& keeper = by.segment().at<ReceiverSlot>(g.receivers)[r].keeper;
            u64 current = keeper.load(order::end.acquire);
            End end = end_of(current);
            if (current != 0 && end.slot == slot && end.peer_epoch == (dead.epoch & EPOCH_MASK))
                keeper.compare_exchange_strong(current, 0, order::end.acq_rel);
        }
    }
    // It may have died between giving a block back and saying so.
    if (ends_become == EndState::dead) pool.announce_return();
}

}  // namespace penstock
