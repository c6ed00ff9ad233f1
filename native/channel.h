// channel.h: what both ends of every channel see: lanes, cursors, receivers, and what is told of an end that went.
#pragma once
#include <deque>
#include <iterator>

#include "pool.h"

namespace penstock {

// Of one end, among the threads of its process. Recursive, for handlers of signals: see Turn.
using EndMutex = std::recursive_timed_mutex;

struct Part {
    const void* at;
    u64 nbytes;
};

inline u32 make_mode(CursorMode mode, u32 epoch) { return static_cast<u32>(mode) | (epoch & EPOCH_MASK) << 2; }
inline CursorMode mode_of(u32 mode) { return static_cast<CursorMode>(mode & 3); }

// A receiver of this epoch, or one before it, is counted no longer. The sender may be admitting it at this moment.
inline void put_out(Shared<u32>& mode, u32 epoch) {
    u32 current = mode.load(order::mode.acquire);
    while (((epoch - (current >> 2)) & EPOCH_MASK) < EPOCH_MASK / 2 && current != make_mode(CursorMode::out, epoch))
        if (mode.compare_exchange_weak(current, make_mode(CursorMode::out, epoch), order::mode.acq_rel)) break;
    fence(order::pend.seq_cst);  // out, then look for what is still pending
}

inline void write_failure(Failure& failure, u32 epoch, const std::string& text) {
    u64 words[FAILURE_NBYTES / sizeof(u64)]{};
    u32 nbytes = static_cast<u32>(std::min<size_t>(text.size(), FAILURE_NBYTES));
    std::memcpy(words, text.data(), nbytes);
    failure.epoch.store(0, order::end.release);
    for (size_t i = 0; i < std::size(words); ++i) failure.text[i].store(words[i], order::end.release);
    failure.nbytes.store(nbytes, order::end.release);
    failure.epoch.store(epoch, order::end.release);
}
// What the end of this epoch failed of; empty: it did not, or another end has failed in its place since.
inline std::string read_failure(const Failure& failure, u32 epoch) {
    if (failure.epoch.load(order::end.acquire) != epoch) return "";
    u64 words[FAILURE_NBYTES / sizeof(u64)];
    for (size_t i = 0; i < std::size(words); ++i) words[i] = failure.text[i].load(order::end.acquire);
    u32 nbytes = std::min(failure.nbytes.load(order::end.acquire), FAILURE_NBYTES);
    if (failure.epoch.load(order::end.acquire) != epoch) return "";
    return std::string(reinterpret_cast<const char*>(words), nbytes);
}

// What becomes of an open end when its last reference goes. The bindings decide: C++ closes the end.
enum class Abandoned { close, fail, leave_open };
struct Abandonment {
    Abandoned what = Abandoned::close;
    std::string failure;
};
inline Abandonment (*on_abandoned)() = nullptr;
inline constexpr const char* GARBAGE = "garbage collected without closing";
// No Python function runs any more: the program is over, and drops what its last exception held, as SystemExit.
inline constexpr const char* GARBAGE_AT_END = "garbage collected without closing at the end of the program";
// How long a peer is kept after its end failed with this text: other peers may see its process end, and learn more.
inline u64 stay_of(const std::string& failure) {
    return failure == GARBAGE ? 50'000'000 : failure == GARBAGE_AT_END ? 1'000'000'000 : 0;
}

class Channel {
   public:
    static constexpr u64 COUNT_NS = 50'000'000;      // what a PeerDied waits for, so that it can say what the peer held
    static constexpr u64 REAPED_NS = 2'000'000'000;  // what opening an end waits until its dead owner has been reaped

    explicit Channel(std::shared_ptr<Attachment> by)
        : by(std::move(by)),
          segment(this->by->shared_segment()),
          forks(fork_generation()),
          g(this->by->segment().geometry()),
          pool(*this->by),
          head(*this->by->segment().at<ChannelHeader>(g.channel)) {
        if (g.shape.kind != static_cast<u32>(SegmentKind::channel))
            throw Error(Fault::layout_mismatch, "expected a channel, got another segment");
    }
    // Before anybody else sees the segment: every receiver is expected, and counted from the first record on.
    static void lay_out(Segment& segment) {
        const Geometry& g = segment.geometry();
        for (u32 lane = 0; lane < g.shape.lanes; ++lane)
            for (u32 r = 0; r < g.shape.receivers; ++r)
                segment.at<Cursor>(g.cursors)[lane * g.shape.receivers + r].mode.store(
                    make_mode(CursorMode::counted, 0), RELAXED);
    }

    bool is_ours() const { return forks == fork_generation(); }
    void require_ours() const {
        if (by) by->require_ours();
    }
    const char* name() const { return segment->name().c_str(); }
    // The end is closed: its place among the peers is given up as soon as its last lease is gone.
    void let_go() { by.reset(); }
    // The process is ending: the end stays open, so that peers see its death. The kernel takes the memory.
    void leave_open() { (void)new std::shared_ptr<Attachment>(std::move(by)); }
    // The last reference to an end goes: `on_abandoned` decides about an end that is still open. False: it must stay
    // so.
    template <class End>
    bool abandon(End& end) {
        Abandonment abandonment = on_abandoned == nullptr || end.is_closed() ? Abandonment{} : on_abandoned();
        if (abandonment.what == Abandoned::leave_open) return false;
        if (by) by->stay(stay_of(abandonment.failure));
        end.close(abandonment.what == Abandoned::fail ? &abandonment.failure : nullptr);
        return true;
    }

    Lane& lane(u32 index) const { return segment->at<Lane>(g.lanes)[index]; }
    ReceiverSlot& receiver(u32 index) const { return segment->at<ReceiverSlot>(g.receivers)[index]; }
    Cursor& cursor(u32 lane, u32 receiver) const {
        return segment->at<Cursor>(g.cursors)[lane * g.shape.receivers + receiver];
    }
    u64 ring_offset(u32 lane, u64 position) const {
        return g.data + lane * g.shape.lane_nbytes + (position & (g.shape.lane_nbytes - 1));
    }
    bool is_inbox() const { return g.shape.style == static_cast<u32>(ChannelStyle::inbox); }
    u32 changes() const { return segment->header().changes.load(order::changes.acquire); }
    void changed() { segment->header().changes.fetch_add(1, order::changes.acq_rel); }

    // Wakes the receivers that these bits stand for through their event loops.
    void wake_receivers(u64 bits) {
        for (; bits != 0; bits &= bits - 1) {
            u32 r = static_cast<u32>(__builtin_ctzll(bits));
            if (r < g.shape.receivers) by->wake_async(end_of(receiver(r).word.load(order::end.acquire)).slot);
        }
    }
    void ring_room(u32 index, Counter* wakes) {
        if (ring(lane(index).room, wakes, 1) != 0)
            by->wake_async(end_of(lane(index).word.load(order::end.acquire)).slot);
    }
    // Whether the peer that had this end still has its slot.
    bool is_known(End end) const {
        return end.slot < g.shape.max_peers &&
               (by->peer(end.slot).epoch.load(order::epoch.acquire) & EPOCH_MASK) == end.peer_epoch;
    }
    // describe.h:
    std::string describe(End end) const;
    // may_wait: for up to COUNT_NS, until what it held has been counted, or stay_of().
    Error died(const char* role, u32 index, End end, bool may_wait = true) const;
    void await_count(End end, u64 stay_ns) const;
    // An end is claimed by one compare-and-swap of its word; an end of a peer that is being reaped is not yet free, and
    // neither is a receiver that has failed and is kept.
    bool claim(Shared<u64>& word, bool may_follow_closed, u64& before, u32& epoch, Shared<u64>* keeper = nullptr) {
        before = word.load(order::end.acquire);
        End end = end_of(before);
        if (end.state == EndState::live) return false;
        if (end.state == EndState::closed && !may_follow_closed) return false;
        if (end.state == EndState::failed && keeper != nullptr && keeper->load(order::end.acquire) != 0) return false;
        if (has_died(end.state) && end.slot < g.shape.max_peers) {
            PeerSlot& peer = by->peer(end.slot);
            if (state_of(peer.identity.load(order::identity.acquire)) == PeerState::dying &&
                (peer.epoch.load(order::epoch.acquire) & EPOCH_MASK) == end.peer_epoch)
                return false;
        }
        epoch = (end.epoch + 1) & EPOCH_MASK;
        u64 expected = before;
        return word.compare_exchange_strong(expected, make_word({EndState::live, by->slot(), by->epoch(), epoch}),
                                            order::end.acq_rel);
    }

    // Whether the owner of an end has died, so that the end is free as soon as that peer has been reaped.
    bool is_being_reaped(End end) const {
        if (!is_known(end)) return false;
        u64 identity = by->peer(end.slot).identity.load(order::identity.acquire);
        if (has_died(end.state)) return state_of(identity) == PeerState::dying;
        return end.state == EndState::live && look_at(identity).liveness == Liveness::gone;
    }
    // Returns whether `take` has claimed an end, index or any of `count`, within REAPED_NS while is_due(i) for one: it
    // is being reaped.
    template <class Take, class IsDue>
    bool take_end(Take&& take, u32 count, int index, IsDue&& is_due_at) const {
        if (take()) return true;
        for (u64 until = now_ns() + REAPED_NS;; ::usleep(200)) {
            bool is_due = false, is_late = now_ns() >= until;
            for (u32 i = 0; i < count && !is_due; ++i)
                is_due = (index < 0 || static_cast<u32>(index) == i) && is_due_at(i);
            if (take()) return true;  // after the look: the peer may have been reaped since the attempt before
            if (!is_due || is_late) return false;
        }
    }

    std::shared_ptr<Attachment> by;
    std::shared_ptr<Segment> segment;
    u64 forks;
    const Geometry& g;
    Pool pool;
    ChannelHeader& head;
};

}  // namespace penstock
