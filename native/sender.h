// sender.h: the end that writes. One sender per lane, so committing is one store, and a sender that dies wedges no
// other.
#pragma once
#include <optional>

#include "channel.h"
#include "trace.h"

namespace penstock {

// Room for one record, in the ring or the pool: filled at `at`, then committed or aborted.
struct Reservation {
    u64 position = 0;  // of the record
    u64 need = 0;      // of the ring, for the record and its header
    u64 skip = 0;      // of the ring, before it: what is left of a lap
    u64 length = 0;    // of what lies in the ring
    u64 nbytes = 0;    // of what is sent
    bool is_spilled = false;
    Extent spilled{};  // where it lies in the pool, if it does
    u8* record = nullptr;
    u8* at = nullptr;
};

class Sender {
   public:
    // index: which lane; -1: the first that is free.
    Sender(std::shared_ptr<Attachment> by, int index)
        : channel_(std::move(by)), spinner_(static_cast<Latency>(channel_.g.shape.latency)) {
        u64 before = 0;
        auto take = [&] {
            for (EndState state : {EndState::expected, EndState::closed, EndState::dead, EndState::failed})
                for (u32 i = 0; i < channel_.g.shape.lanes; ++i)
                    if ((index < 0 || static_cast<u32>(index) == i) &&
                        end_of(channel_.lane(i).word.load(order::end.acquire)).state == state &&
                        channel_.claim(channel_.lane(i).word, channel_.is_inbox(), before, epoch_)) {
                        index_ = i;
                        return true;
                    }
            return false;
        };
        auto is_due = [&](u32 i) {
            return channel_.is_being_reaped(end_of(channel_.lane(i).word.load(order::end.acquire)));
        };
        if (!channel_.take_end(take, channel_.g.shape.lanes, index, is_due)) {
            u32 i = index < 0 ? 0 : static_cast<u32>(index);
            if (i >= channel_.g.shape.lanes)
                throw Error(Fault::value, format("expected a sender of '%s' below %u, got %d", name(),
                                                 channel_.g.shape.lanes, index));
            End end = end_of(channel_.lane(i).word.load(order::end.acquire));
            std::string peer = channel_.describe(end);
            if (end.state == EndState::closed)
                throw Error(Fault::value, format("sender %u of '%s' was closed by %s and cannot be opened again", i,
                                                 name(), peer.c_str()));
            throw Error(Fault::value, format("sender %u of '%s' is taken: %s", i, name(), peer.c_str()));
        }
        lane_ = &channel_.lane(index_);
        trace_.emplace(channel_.segment, index_);
        trace_->mark(TraceKind::opened);
        lane_->ended.store(before, RELAXED);
        committed_ = lane_->committed.load(order::publish.acquire);
        // Receivers may have asked a sender that died before it had let them in.
        for (u32 r = 0; r < channel_.g.shape.receivers; ++r)
            if (mode_of(channel_.cursor(index_, r).mode.load(order::mode.acquire)) == CursorMode::joining)
                lane_->joining.fetch_or(1ull << r, order::joining.acq_rel);
        seen_changes_ = channel_.changes() - 1;
        channel_.changed();
        // A receiver that died before we came is not our news.
        for (u32 r = 0; r < channel_.g.shape.receivers; ++r) {
            End end = end_of(channel_.receiver(r).word.load(order::end.acquire));
            told_.push_back(has_died(end.state) || end.epoch == 0 ? end.epoch : end.epoch - 1);
        }
    }
    ~Sender() {
        if (!channel_.abandon(*this)) channel_.leave_open();
    }

    const char* name() const { return channel_.name(); }
    u32 index() const { return index_; }
    Channel& channel() { return channel_; }
    bool is_closed() const { return is_closing_.load(RELAXED); }
    EndMutex& mutex() { return mutex_; }

    // Room for one record of so many bytes; nullptr: none now, and wait() knows what for. No receiver sees it before
    // commit(). There is one at a time, and it is the sender's: good until it is committed or aborted. Throws
    // EndOfChannel, PeerDied, MemoryExhausted. deadline: for locks that a stopped peer may hold; Timeout names it.
    Reservation* try_reserve(u64 nbytes, u64 deadline = NEVER) {
        require_open();
        obstacle_.clear();
        if (is_reserved_) throw Error(Fault::value, "a reservation is open: commit or abort it first");
        channel_.by->refresh();
        channel_.by->require_group();
        if (__builtin_expect(channel_.changes() != seen_changes_, 0)) look_at_ends();
        if (__builtin_expect(lane_->joining.load(order::joining.acquire) != 0, 0)) admit();
        if (!has_receivers_) refuse_without_receivers();
        const u64 capacity = channel_.g.shape.lane_nbytes;
        Reservation& reservation = reservation_;
        // A lane keeps one room at most: while it does, its records lie in the pool.
        reservation.is_spilled = nbytes > channel_.g.shape.inline_limit || lane_->keeper.load(order::room.acquire) != 0;
        reservation.nbytes = nbytes;
        reservation.length = reservation.is_spilled ? sizeof(SpilledRef) : nbytes;
        reservation.need = round_up(sizeof(Record) + reservation.length, RECORD_ALIGN);
        u64 index = committed_ & (capacity - 1);
        reservation.skip = index + reservation.need > capacity ? capacity - index : 0;
        reservation.position = committed_ + reservation.skip;
        waits_for_memory_ = false;
        if (!has_room()) return nullptr;
        PENSTOCK_POINT("send.begun");
        reservation.record = channel_.by->segment().write_at(channel_.ring_offset(index_, reservation.position));
        reservation.at = reservation.record + sizeof(Record);
        if (reservation.is_spilled) {
            returns_seen_ = channel_.pool.returns();
            if (!unless_locked([&] { return channel_.pool.try_take(nbytes, reservation.spilled, deadline); })) {
                waits_for_memory_ = true;
                lane_->exhaustions.count();
                return nullptr;
            }
            PENSTOCK_POINT("send.spilled");
            reservation.at = channel_.by->segment().write_at(channel_.g.pool_data + reservation.spilled.offset);
        }
        is_reserved_ = true;
        return &reservation;
    }
    // Of the open reservation only the first `nbytes` are to be sent. Its room is the record's: what is left of a
    // ring's goes to the next record, of a block's it is free with the block.
    void shrink(u64 nbytes) {
        reservation_.nbytes = nbytes;
        if (reservation_.is_spilled) {
            reservation_.spilled.nbytes = nbytes;
            return;
        }
        reservation_.length = nbytes;
        reservation_.need = round_up(sizeof(Record) + nbytes, RECORD_ALIGN);
    }
    // Makes the record visible, to all receivers at once. Throws Timeout before it, and may be called again.
    void commit(const Reservation& reservation, u64 deadline = NEVER) {
        if (reservation.is_spilled) pend_spilled(reservation, deadline);
        u64 sequence = lane_->sequence.load(RELAXED), now = now_ns();
        skip_rest_of_lap(reservation, sequence, now);
        write_header(reservation.record, reservation.position, reservation.length,
                     reservation.is_spilled ? RecordKind::spilled : RecordKind::bytes, sequence, now);
        lane_->sequence.store(sequence + 1, RELAXED);
        lane_->last_ns.store(now, RELAXED);
        lane_->cpu.store(current_cpu(), RELAXED);
        PENSTOCK_POINT("send.written");
        publish(reservation.position + reservation.need);
        wake();
        if (trace_->is_wanted()) trace_send(sequence, now, reservation.nbytes);
        if (reservation.is_spilled) {
            channel_.pool.release(reservation.spilled.block, reservation.spilled.generation);
            lane_->spills.count();
        }
        is_reserved_ = false;
        lane_->waits.records.count();
        lane_->waits.nbytes.count(reservation.nbytes);
        lane_->waits.furthest_nbytes.raise(committed_ - least_released_);
    }
    // The record will never be seen. A room that views can still write into is kept until the last of them is dropped:
    // in the ring the next record would be overwritten, in the pool the next taker's block.
    void abort() {
        if (!is_reserved_) return;
        is_given_up_.store(true, order::views.seq_cst);
        finish_abort();
    }
    // A view of the reservation, which can write. None is added once the reservation has been given up.
    int views() const { return views_.load(RELAXED); }
    void add_view() { views_.fetch_add(1, order::views.seq_cst); }
    // True: it was the last one, and the room has been given up meanwhile: call finish_abort().
    bool drop_view() {
        return views_.fetch_sub(1, order::views.seq_cst) == 1 && is_given_up_.load(order::views.seq_cst);
    }
    void finish_abort() {
        if (!is_given_up_.load(order::views.seq_cst) || views_.load(order::views.seq_cst) != 0) return;
        PENSTOCK_POINT("abort.begun");
        is_given_up_.store(false, order::views.seq_cst);
        is_reserved_ = false;
        if (reservation_.is_spilled) channel_.pool.release(reservation_.spilled.block, reservation_.spilled.generation);
        if (!is_closed_) return;
        u64 ours = word(EndState::closed);
        if (lane_->keeper.compare_exchange_strong(ours, 0, order::room.acq_rel))  // the views wrote before this
            channel_.ring_room(index_, nullptr);
        channel_.let_go();
    }
    // One record out of several parts. False: no room now.
    bool try_send(const Part* parts, size_t n, u64 total, u64 deadline = NEVER) {
        Reservation* reservation = try_reserve(total, deadline);
        if (reservation == nullptr) return false;
        u8* to = reservation->at;
        for (size_t i = 0; i < n; ++i) {
            std::memcpy(to, parts[i].at, parts[i].nbytes);
            to += parts[i].nbytes;
        }
        try {
            commit(*reservation, deadline);
        } catch (...) {
            abort();
            throw;
        }
        return true;
    }

    // A lock was in the way of the last try: try again soon, for its holder rings no bell.
    bool is_locked_out() const { return !obstacle_.empty(); }
    // After a try that found no room: sleeps until another try may succeed.
    Woken wait(u64 deadline) {
        lane_->waits_for_memory.store(waits_for_memory_ ? 1 : 0, RELAXED);
        TracedWait traced(*trace_, lane_->waits);
        if (traced.is_traced()) in_the_way_ = slowest_receiver();
        Woken woken = waits_for_memory_
                          ? channel_.pool.wait_for_return(returns_seen_, deadline, spinner_, lane_->waits, is_closing_)
                          : wait_for_room(deadline);
        if (woken != Woken::interrupted) traced.end(woken == Woken::deadline, in_the_way_, how_it_waits());
        return woken;
    }
    // The same for an event loop: says that this end waits; true: no need to, try again.
    bool arm() {
        require_open();
        if (is_locked_out()) return true;
        lane_->waits_for_memory.store(waits_for_memory_ ? 1 : 0, RELAXED);
        if (lane_->waits.since_ns.load(RELAXED) == 0) lane_->waits.since_ns.store(now_ns(), RELAXED);
        if (trace_->is_wanted()) in_the_way_ = slowest_receiver();
        if (waits_for_memory_) {
            channel_.pool.header().memory.parked_async.fetch_or(1ull << (channel_.by->slot() % 64),
                                                                order::bell.seq_cst);
            fence(order::bell.seq_cst);
            return channel_.pool.returns() != returns_seen_ || channel_.by->is_stale() || is_closing_.load(RELAXED) ||
                   channel_.by->is_group_broken();
        }
        lane_->room.wake_position.store(reservation_.position + reservation_.need - channel_.g.shape.lane_nbytes,
                                        RELAXED);
        lane_->room.parked_async.fetch_or(1, order::bell.seq_cst);
        fence(order::bell.seq_cst);
        return is_awaited();
    }
    void disarm(bool is_over) {
        lane_->room.parked_async.fetch_and(~1ull, order::bell.seq_cst);
        if (!is_over) return;
        if (trace_->is_wanted()) trace_->end_wait(lane_->waits, now_ns(), in_the_way_, how_it_waits() | WAIT_TIMED_OUT);
        lane_->waits.since_ns.store(0, RELAXED);
    }

    Error timeout(u64 waited_ns);  // describe.h: says which receiver is in the way. Called when a deadline has passed.

    // Ends the lane in peace: receivers read what is there, then EndOfChannel. May be called from another thread than
    // the one that waits, which then gets Closed. Returns false while such a thread is still inside; call again.
    void begin_close() {
        is_closing_.store(true, RELAXED);  // the bell orders it
        if (!channel_.is_ours()) return;
        ring_all(lane_->room);
        ring_all(channel_.pool.header().memory);
    }
    // failure: it does not end in peace. Receivers read what is there, then PeerDied with this text.
    void close(const std::string* failure = nullptr) {
        begin_close();
        if (!channel_.is_ours()) return;  // before the mutex: in a child its holder does not exist
        std::lock_guard guard(mutex_);
        if (is_closed_) return;
        PENSTOCK_POINT("close.begun");
        abort();
        is_closed_ = true;
        trace_->mark(TraceKind::closed);
        if (is_reserved_ && !reservation_.is_spilled) keep_room();
        u64 expected = word(EndState::live);
        if (failure != nullptr) write_failure(lane_->failure, epoch_, *failure);
        lane_->word.compare_exchange_strong(expected, word(failure != nullptr ? EndState::failed : EndState::closed),
                                            order::end.acq_rel);
        // From here on the lane may have another sender.
        if (channel_.is_inbox()) channel_.head.ready.fetch_or(1ull << index_, order::ready.release);
        channel_.changed();
        channel_.wake_receivers(ring_all(channel_.head.bell));
        if (failure != nullptr) channel_.by->announce_failure();
        if (!is_reserved_) channel_.let_go();  // else with the last view: its block is ours until then
    }

   private:
    u64 word(EndState state) const { return make_word({state, channel_.by->slot(), channel_.by->epoch(), epoch_}); }
    // Views can still write into this room: receivers skip it, and no sender of this lane writes over it until
    // finish_abort(). The end's word makes both visible to the next one.
    void keep_room() {
        lane_->kept_position.store(reservation_.position, RELAXED);
        lane_->keeper.store(word(EndState::closed), RELAXED);
        PENSTOCK_POINT("close.kept");
        u64 sequence = lane_->sequence.load(RELAXED), now = now_ns();
        skip_rest_of_lap(reservation_, sequence, now);
        write_header(reservation_.record, reservation_.position, reservation_.need - sizeof(Record), RecordKind::skip,
                     sequence, now);
        publish(reservation_.position + reservation_.need);
    }
    void skip_rest_of_lap(const Reservation& reservation, u64 sequence, u64 now) {
        if (reservation.skip == 0) return;
        write_header(channel_.by->segment().write_at(channel_.ring_offset(index_, committed_)), committed_,
                     reservation.skip - sizeof(Record), RecordKind::skip, sequence, now);
    }
    void require_open() {
        if (is_closing_.load(RELAXED))
            throw Error(Fault::closed, format("sender %u of '%s' is closed", index_, name()));
        channel_.require_ours();
    }
    template <class Do>
    bool unless_locked(Do&& what) {
        try {
            return what();
        } catch (const Error& error) {
            if (error.fault == Fault::timeout) obstacle_ = error.text;
            throw;
        }
    }
    void write_header(u8* to, u64 position, u64 length, RecordKind kind, u64 sequence, u64 now) {
        Record record{
            position, now, sequence, static_cast<u32>(length), static_cast<u16>(kind), static_cast<u16>(epoch_)};
        std::memcpy(to, &record, sizeof record);
    }
    void pend_spilled(const Reservation& reservation, u64 deadline) {
        const Extent& spilled = reservation.spilled;
        SpilledRef ref{spilled.block, spilled.generation, spilled.offset, spilled.nbytes};
        std::memcpy(reservation.record + sizeof(Record), &ref, sizeof ref);
        auto counted_receivers = [this] {
            u64 bits = 0;
            for (u32 r = 0; r < channel_.g.shape.receivers; ++r)
                if (mode_of(channel_.cursor(index_, r).mode.load(order::mode.acquire)) == CursorMode::counted)
                    bits |= 1ull << r;
            return bits;
        };
        unless_locked([&] {
            channel_.pool.pend(spilled, index_, reservation.position, deadline, counted_receivers);
            return true;
        });
        PENSTOCK_POINT("send.pending");
    }
    void publish(u64 end) {
        committed_ = end;
        lane_->committed.store(end, order::publish.release);  // the record is written before this
        PENSTOCK_POINT("send.committed");
    }
    void wake() {
        if (channel_.is_inbox()) channel_.head.ready.fetch_or(1ull << index_, order::ready.release);
        PENSTOCK_POINT("ready.set");
        u64 in_loops = ring(channel_.head.bell, &lane_->waits.wakes);
        PENSTOCK_POINT("send.rung");
        if (__builtin_expect(in_loops != 0, 0)) {
            channel_.wake_receivers(in_loops);
            woken_in_loops_ += static_cast<u64>(__builtin_popcountll(in_loops));
        }
    }
    [[gnu::noinline]] void trace_send(u64 sequence, u64 sent_ns, u64 nbytes) {
        u64 before = std::exchange(woken_, lane_->waits.wakes.value() + woken_in_loops_);
        u64 woken = sequence == traced_next_ ? woken_ - before : 0;  // of sends that were not traced, nothing is known
        traced_next_ = sequence + 1;
        trace_->end_wait(lane_->waits, sent_ns, in_the_way_, how_it_waits());
        trace_->add(TraceKind::sent, sent_ns, now_ns(), sequence, nbytes, 0, woken);
    }
    Woken wait_for_room(u64 deadline) {
        const u64 capacity = channel_.g.shape.lane_nbytes;
        u64 enough =
            std::max(reservation_.skip + reservation_.need, std::min(capacity / 4, committed_ - least_released_));
        lane_->room.wake_position.store(committed_ + enough - capacity, RELAXED);
        return penstock::wait(lane_->room, 1, deadline, spinner_, lane_->waits, nullptr,
                              [this] { return is_awaited(); });
    }
    u32 how_it_waits() const { return lane_->waits_for_memory.load(RELAXED) != 0 ? WAIT_FOR_MEMORY : 0; }
    // Of the counted receivers, the one that has released least; NO_INDEX: none is counted.
    u32 slowest_receiver() const {
        u64 least = NEVER;
        u32 slowest = NO_INDEX;
        for (u32 r = 0; r < channel_.g.shape.receivers; ++r) {
            Cursor& cursor = channel_.cursor(index_, r);
            if (mode_of(cursor.mode.load(RELAXED)) != CursorMode::counted) continue;
            u64 released = cursor.released.load(RELAXED);
            if (released < least) least = released, slowest = r;
        }
        return slowest;
    }
    bool has_room() {
        const u64 capacity = channel_.g.shape.lane_nbytes, end = reservation_.position + reservation_.need;
        if (end - least_released_ <= capacity) return true;
        least_released_ = least_released();
        return end - least_released_ <= capacity;
    }
    u64 least_released() const {
        u64 least = committed_;
        for (u32 r = 0; r < channel_.g.shape.receivers; ++r) {
            Cursor& cursor = channel_.cursor(index_, r);
            if (mode_of(cursor.mode.load(order::mode.acquire)) != CursorMode::counted) continue;
            u64 released = cursor.released.load(order::room.acquire);  // read before it is overwritten
            if (committed_ - released <= channel_.g.shape.lane_nbytes)
                least = std::min(least, released);  // else: not one of ours
        }
        least = std::min(least, least_kept());
        fence(order::tap.release);  // released before it is overwritten
        return least;
    }
    // The room that a sender before this one keeps; NEVER: none is kept.
    u64 least_kept() const {
        if (lane_->keeper.load(order::room.acquire) == 0) return NEVER;
        u64 kept_position = lane_->kept_position.load(RELAXED);
        return committed_ - kept_position <= channel_.g.shape.lane_nbytes ? kept_position
                                                                          : NEVER;  // else: not one of ours
    }
    bool is_awaited() {
        return is_closing_.load(RELAXED) || channel_.changes() != seen_changes_ || channel_.by->is_stale() ||
               channel_.by->is_group_broken() || lane_->joining.load(RELAXED) != 0 || has_room();
    }
    // Receivers that came while the channel runs are counted from the next record on. The sender does it, so that there
    // is no record of which it is not clear which receivers get it.
    void admit() {
        u64 joining = lane_->joining.exchange(0, order::joining.acq_rel);
        for (; joining != 0; joining &= joining - 1) {
            u32 r = static_cast<u32>(__builtin_ctzll(joining));
            if (r >= channel_.g.shape.receivers) continue;
            Cursor& cursor = channel_.cursor(index_, r);
            u32 mode = cursor.mode.load(order::mode.acquire);
            if (mode_of(mode) != CursorMode::joining) continue;
            cursor.released.store(committed_, RELAXED);
            cursor.sequence.store(lane_->sequence.load(RELAXED), RELAXED);
            cursor.mode.compare_exchange_strong(mode, make_mode(CursorMode::counted, mode >> 2), order::mode.acq_rel);
            has_receivers_ = true;
        }
        channel_.wake_receivers(ring_all(channel_.head.bell));
    }
    void look_at_ends() {
        u32 changes = channel_.changes();
        bool is_any = false;
        u32 dead = NONE;
        End ended{};
        for (u32 r = 0; r < channel_.g.shape.receivers; ++r) {
            CursorMode mode = mode_of(channel_.cursor(index_, r).mode.load(order::mode.acquire));
            if (mode != CursorMode::out) is_any = true;
            // It may not have asked yet; a record sent now, with no receiver counted, would be lost without a word.
            if (mode == CursorMode::joining) lane_->joining.fetch_or(1ull << r, order::joining.acq_rel);
            End end = end_of(channel_.receiver(r).word.load(order::end.acquire));
            if (end.state == EndState::live) end = end_of(channel_.receiver(r).ended.load(RELAXED));
            if (!has_died(end.state) || end.epoch <= told_[r] || dead != NONE) continue;
            dead = r;
            ended = end;
        }
        has_receivers_ = is_any;
        least_released_ = least_released();
        if (dead != NONE) {
            told_[dead] = ended.epoch;
            if (channel_.g.shape.receiver_death == 0)
                throw channel_.died("receiver", dead, ended);  // there may be more to tell
        }
        if (dead == NONE) seen_changes_ = changes;
    }
    [[noreturn]] void refuse_without_receivers() {
        for (u32 r = 0; r < channel_.g.shape.receivers; ++r) {
            End end = end_of(channel_.receiver(r).word.load(order::end.acquire));
            if (has_died(end.state)) throw channel_.died("receiver", r, end);
        }
        throw Error(Fault::end_of_channel, format("'%s' has no receiver left: all have closed", name()));
    }

    static constexpr u32 NONE = ~0u;
    Channel channel_;
    Lane* lane_ = nullptr;
    u32 index_ = 0;
    u32 epoch_ = 0;
    Spinner spinner_;
    EndMutex mutex_;
    Atomic<bool> is_closing_{false};
    bool is_closed_ = false;
    std::optional<TraceRing> trace_;  // once the lane is known
    u32 in_the_way_ = NO_INDEX;       // while it is traced: the receiver that the last wait was for
    u64 woken_in_loops_ = 0, woken_ = 0, traced_next_ = 0;
    u64 committed_ = 0;
    u64 least_released_ = 0;
    u32 seen_changes_ = 0;
    bool has_receivers_ = true;
    std::vector<u32> told_;  // epochs of the dead receivers that the caller knows of
    // the reservation
    bool is_reserved_ = false;
    Atomic<int> views_{0};
    Atomic<bool> is_given_up_{false};
    bool waits_for_memory_ = false;
    std::string obstacle_;  // the lock that was in the way of the last try, and its holder
    u32 returns_seen_ = 0;
    Reservation reservation_{};  // the one that is open; else what the last try wanted
};

}  // namespace penstock
