// sender.h: the end that writes. One sender per lane, so committing is one store, and a sender that dies wedges nobody.
#pragma once
#include "channel.h"

namespace penstock {

class Sender {
   public:
    // index: which lane; -1: the first that is free.
    Sender(std::shared_ptr<Attachment> by, int index)
        : ch_(std::move(by)), spinner_(static_cast<Latency>(ch_.g.shape.latency)) {
        u64 before = 0;
        auto may_take = [&](u32 i, EndState wanted) {
            return end_of(ch_.lane(i).word.load(order::end.acquire)).state == wanted &&
                   ch_.claim(ch_.lane(i).word, ch_.is_inbox(), before, epoch_);
        };
        bool is_taken = false;
        for (EndState wanted : {EndState::expected, EndState::closed, EndState::dead})
            for (u32 i = 0; i < ch_.g.shape.lanes && !is_taken; ++i)
                if (index < 0 || static_cast<u32>(index) == i) {
                    is_taken = may_take(i, wanted);
                    if (is_taken) index_ = i;
                }
        if (!is_taken) {
            u32 i = index < 0 ? 0 : static_cast<u32>(index);
            if (i >= ch_.g.shape.lanes)
                throw Error(Fault::value,
                            format("'%s' has %u senders: there is no sender %d", name(), ch_.g.shape.lanes, index));
            End end = end_of(ch_.lane(i).word.load(order::end.acquire));
            const char* how = end.state == EndState::closed    ? " and closed"
                              : end.state == EndState::closing ? " and closed, but views of its reservation can still "
                                                                 "write: drop them first"
                                                               : "";
            throw Error(Fault::value,
                        format("sender %u of '%s' is taken%s: %s", i, name(), how, ch_.describe(end).c_str()));
        }
        lane_ = &ch_.lane(index_);
        lane_->ended.store(before, RELAXED);
        committed_ = lane_->committed.load(order::publish.acquire);
        // Receivers may have asked a sender that died before it had let them in.
        for (u32 r = 0; r < ch_.g.shape.receivers; ++r)
            if (mode_of(ch_.cursor(index_, r).mode.load(order::mode.acquire)) == CursorMode::joining)
                lane_->joining.fetch_or(1ull << r, order::joining.acq_rel);
        seen_changes_ = ch_.changes() - 1;
        ch_.changed();
        // Whoever died before we came is not our news.
        for (u32 r = 0; r < ch_.g.shape.receivers; ++r) {
            End end = end_of(ch_.receiver(r).word.load(order::end.acquire));
            told_.push_back(end.state == EndState::dead || end.epoch == 0 ? end.epoch : end.epoch - 1);
        }
    }
    ~Sender() { close(); }

    const char* name() const { return ch_.name(); }
    u32 index() const { return index_; }
    Channel& channel() { return ch_; }
    bool is_closed() const { return is_closing_.load(RELAXED); }
    EndMutex& mutex() { return mutex_; }

    // Room for one record of so many bytes, to be written at the address that is returned; nullptr: none now, and
    // wait() knows what for. Nobody sees it before commit(). Throws EndOfChannel, PeerDied, MemoryExhausted.
    // deadline: for locks that a stopped peer may hold; Timeout names it.
    u8* try_reserve(u64 nbytes, u64 deadline = NEVER) {
        require_open();
        obstacle_.clear();
        if (is_reserved_) throw Error(Fault::value, "a reservation is open: commit or abort it first");
        ch_.by->refresh();
        if (__builtin_expect(ch_.changes() != seen_changes_, 0)) look_at_ends();
        if (__builtin_expect(lane_->joining.load(order::joining.acquire) != 0, 0)) admit();
        if (!has_receivers_) refuse_without_receivers();
        bool is_spilled = nbytes > ch_.g.shape.inline_limit;
        u64 length = is_spilled ? sizeof(SpilledRef) : nbytes;
        need_ = round_up(sizeof(Record) + length, RECORD_ALIGN);
        u64 index = committed_ & (ch_.g.shape.lane_nbytes - 1);
        skip_ = index + need_ > ch_.g.shape.lane_nbytes ? ch_.g.shape.lane_nbytes - index : 0;
        waits_for_memory_ = false;
        nbytes_ = nbytes;
        if (!has_room()) return nullptr;
        PENSTOCK_POINT("send.begun");
        start_ = ch_.by->segment().write_at(ch_.ring_offset(index_, committed_ + skip_));
        record_ = {committed_ + skip_,
                   0,
                   0,
                   static_cast<u32>(length),
                   static_cast<u16>(is_spilled ? RecordKind::spilled : RecordKind::bytes),
                   static_cast<u16>(epoch_)};
        u8* to = start_ + sizeof(Record);
        if (is_spilled) {
            returns_seen_ = ch_.pool.returns();
            if (!unless_locked([&] { return ch_.pool.try_take(nbytes, spilled_, deadline); })) {
                waits_for_memory_ = true;
                lane_->exhaustions.count();
                return nullptr;
            }
            PENSTOCK_POINT("send.spilled");
            to = ch_.by->segment().write_at(ch_.g.pool_data + spilled_.offset);
        }
        is_reserved_ = true;
        return to;
    }
    // Makes the record visible, to all receivers at once. Throws Timeout before it, and may be called again.
    void commit(u64 deadline = NEVER) {
        bool is_spilled = static_cast<RecordKind>(record_.kind) == RecordKind::spilled;
        if (is_spilled) {
            SpilledRef ref{spilled_.block, spilled_.generation, spilled_.offset, spilled_.nbytes};
            std::memcpy(start_ + sizeof(Record), &ref, sizeof ref);
            auto mask = [this] {
                u64 bits = 0;
                for (u32 r = 0; r < ch_.g.shape.receivers; ++r)
                    if (mode_of(ch_.cursor(index_, r).mode.load(order::mode.acquire)) == CursorMode::counted)
                        bits |= 1ull << r;
                return bits;
            };
            unless_locked([&] { return ch_.pool.pend(spilled_, index_, record_.position, deadline, mask), true; });
            PENSTOCK_POINT("send.pending");
        }
        u64 sequence = lane_->sequence.load(RELAXED);
        u64 now = now_ns();
        if (skip_ != 0) {
            Record skip{committed_,
                        now,
                        sequence,
                        static_cast<u32>(skip_ - sizeof(Record)),
                        static_cast<u16>(RecordKind::skip),
                        static_cast<u16>(epoch_)};
            std::memcpy(ch_.by->segment().write_at(ch_.ring_offset(index_, committed_)), &skip, sizeof skip);
        }
        record_.committed_ns = now;
        record_.sequence = sequence;
        std::memcpy(start_, &record_, sizeof record_);
        lane_->sequence.store(sequence + 1, RELAXED);
        lane_->last_ns.store(now, RELAXED);
        lane_->cpu.store(current_cpu(), RELAXED);
        PENSTOCK_POINT("send.written");
        committed_ = record_.position + need_;
        lane_->committed.store(committed_,
                               order::publish.release);  // the record is written before this
        PENSTOCK_POINT("send.committed");
        if (ch_.is_inbox()) ch_.head.ready.fetch_or(1ull << index_, order::ready.release);
        PENSTOCK_POINT("ready.set");
        u64 in_loops = ring(ch_.head.bell, &lane_->waits.wakes);
        PENSTOCK_POINT("send.rung");
        if (__builtin_expect(in_loops != 0, 0)) ch_.wake_receivers(in_loops);
        if (is_spilled) {
            ch_.pool.release(spilled_.block, spilled_.generation);
            lane_->spills.count();
        }
        is_reserved_ = false;
        lane_->waits.records.count();
        lane_->waits.nbytes.count(nbytes_);
        u64 in_flight = committed_ - least_released_;
        lane_->waits.furthest_nbytes.raise(in_flight);
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
        if (static_cast<RecordKind>(record_.kind) == RecordKind::spilled)
            ch_.pool.release(spilled_.block, spilled_.generation);
        if (is_closed_) let_go(EndState::closing);
    }
    // One record out of several parts. False: no room now.
    bool try_send(const Part* parts, size_t n, u64 total, u64 deadline = NEVER) {
        u8* to = try_reserve(total, deadline);
        if (to == nullptr) return false;
        for (size_t i = 0; i < n; ++i) {
            std::memcpy(to, parts[i].at, parts[i].nbytes);
            to += parts[i].nbytes;
        }
        try {
            commit(deadline);
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
        if (waits_for_memory_)
            return ch_.pool.wait_for_return(returns_seen_, deadline, spinner_, lane_->waits, is_closing_);
        u64 enough = std::max(skip_ + need_, std::min(ch_.g.shape.lane_nbytes / 4, committed_ - least_released_));
        lane_->room.wanted.store(committed_ + enough - ch_.g.shape.lane_nbytes, RELAXED);
        return penstock::wait(lane_->room, 1, deadline, spinner_, lane_->waits, nullptr,
                              [this] { return is_awaited(); });
    }
    // The same for an event loop: says that this end waits; true: no need to, try again.
    bool arm() {
        require_open();
        if (is_locked_out()) return true;
        lane_->waits_for_memory.store(waits_for_memory_ ? 1 : 0, RELAXED);
        if (lane_->waits.since_ns.load(RELAXED) == 0) lane_->waits.since_ns.store(now_ns(), RELAXED);
        if (waits_for_memory_) {
            ch_.pool.header().memory.parked_async.fetch_or(1ull << (ch_.by->slot() % 64), order::bell.seq_cst);
            fence(order::bell.seq_cst);
            return ch_.pool.returns() != returns_seen_ || ch_.by->is_stale() || is_closing_.load(RELAXED);
        }
        lane_->room.wanted.store(committed_ + skip_ + need_ - ch_.g.shape.lane_nbytes, RELAXED);
        lane_->room.parked_async.fetch_or(1, order::bell.seq_cst);
        fence(order::bell.seq_cst);
        return is_awaited();
    }
    void disarm(bool is_over) {
        lane_->room.parked_async.fetch_and(~1ull, order::bell.seq_cst);
        if (is_over) lane_->waits.since_ns.store(0, RELAXED);
    }

    // Says who is in the way. Called when a deadline has passed.
    Error timeout(u64 waited_ns) {
        require_open();
        lane_->refused.count();
        if (is_locked_out()) return Error(Fault::timeout, obstacle_);
        if (waits_for_memory_) {
            Error full = ch_.pool.exhausted(nbytes_);
            full.fault = Fault::timeout;
            full.text = format("no room for a record within %s: ", in_seconds(waited_ns).c_str()) + full.text;
            return full;
        }
        u64 least = NEVER;
        u32 slowest = 0;
        for (u32 r = 0; r < ch_.g.shape.receivers; ++r) {
            Cursor& cursor = ch_.cursor(index_, r);
            if (mode_of(cursor.mode.load(RELAXED)) != CursorMode::counted || cursor.released.load(RELAXED) >= least)
                continue;
            least = cursor.released.load(RELAXED);
            slowest = r;
        }
        if (least == NEVER) return Error(Fault::timeout, format("'%s' has no receiver", name()));
        Record oldest{};
        std::memcpy(&oldest, ch_.by->segment().read_at(ch_.ring_offset(index_, least)), sizeof oldest);
        u64 behind_ns = oldest.position == least ? now_ns() - oldest.committed_ns : waited_ns;
        u64 records = lane_->sequence.load(RELAXED) - ch_.cursor(index_, slowest).sequence.load(RELAXED);
        End end = end_of(ch_.receiver(slowest).word.load(order::end.acquire));
        std::string who =
            end.state == EndState::expected ? std::string("which has not attached yet") : ch_.describe(end);
        return Error(Fault::timeout,
                     format("'%s' is full for %s: receiver %u, %s, is %llu records (%s) behind, the oldest for %s",
                            name(), in_seconds(waited_ns).c_str(), slowest, who.c_str(),
                            static_cast<unsigned long long>(records), in_units(committed_ - least).c_str(),
                            in_seconds(behind_ns).c_str()))
            .with("receiver", slowest)
            .with("pid", end.state == EndState::live && end.slot < ch_.g.shape.max_peers
                             ? pid_of(ch_.by->peer(end.slot).identity.load(order::identity.acquire))
                             : 0)
            .with("records_behind", static_cast<i64>(records))
            .with("nbytes_behind", static_cast<i64>(committed_ - least))
            .with("ns_behind", static_cast<i64>(behind_ns));
    }

    // Ends the lane in peace: receivers read what is there, then EndOfChannel. May be called from another thread than
    // the one that waits, which then gets Closed. Returns false while such a thread is still inside; call again.
    void begin_close() {
        is_closing_.store(true, RELAXED);  // the bell orders it
        if (!ch_.is_ours()) return;
        ring_all(lane_->room);
        ring_all(ch_.pool.header().memory);
    }
    void close() {
        begin_close();
        if (!ch_.is_ours()) return;  // before the mutex: in a child its holder does not exist
        std::lock_guard guard(mutex_);
        if (is_closed_) return;
        PENSTOCK_POINT("close.begun");
        abort();
        is_closed_ = true;
        if (is_reserved_) return become(EndState::live, EndState::closing);
        let_go(EndState::live);
    }

   private:
    void become(EndState from, EndState to) {
        u64 word = make_word({from, ch_.by->slot(), ch_.by->epoch(), epoch_});
        lane_->word.compare_exchange_strong(word, make_word({to, ch_.by->slot(), ch_.by->epoch(), epoch_}),
                                            order::end.acq_rel);
        if (ch_.is_inbox()) ch_.head.ready.fetch_or(1ull << index_, order::ready.release);
        ch_.changed();
        ch_.wake_receivers(ring_all(ch_.head.bell));
    }
    // From here on the lane may have another sender.
    void let_go(EndState from) {
        become(from, EndState::closed);
        ch_.let_go();
    }
    void require_open() {
        if (is_closing_.load(RELAXED))
            throw Error(Fault::closed, format("sender %u of '%s' is closed", index_, name()));
        ch_.require_ours();
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
    bool has_room() {
        u64 limit = ch_.g.shape.lane_nbytes;
        if (committed_ + skip_ + need_ - least_released_ <= limit) return true;
        least_released_ = least_released();
        return committed_ + skip_ + need_ - least_released_ <= limit;
    }
    u64 least_released() const {
        u64 least = committed_;
        for (u32 r = 0; r < ch_.g.shape.receivers; ++r) {
            Cursor& cursor = ch_.cursor(index_, r);
            if (mode_of(cursor.mode.load(order::mode.acquire)) != CursorMode::counted) continue;
            u64 released = cursor.released.load(order::room.acquire);  // read before it is overwritten
            if (committed_ - released <= ch_.g.shape.lane_nbytes)
                least = std::min(least, released);  // else: not one of ours
        }
        fence(order::tap.release);  // released before it is overwritten
        return least;
    }
    bool is_awaited() {
        return is_closing_.load(RELAXED) || ch_.changes() != seen_changes_ || ch_.by->is_stale() ||
               lane_->joining.load(RELAXED) != 0 || has_room();
    }
    // Receivers that came while the channel runs are counted from the next record on. The sender does it, so that there
    // is no record of which it is not clear who gets it.
    void admit() {
        u64 joining = lane_->joining.exchange(0, order::joining.acq_rel);
        for (; joining != 0; joining &= joining - 1) {
            u32 r = static_cast<u32>(__builtin_ctzll(joining));
            if (r >= ch_.g.shape.receivers) continue;
            Cursor& cursor = ch_.cursor(index_, r);
            u32 mode = cursor.mode.load(order::mode.acquire);
            if (mode_of(mode) != CursorMode::joining) continue;
            cursor.released.store(committed_, RELAXED);
            cursor.sequence.store(lane_->sequence.load(RELAXED), RELAXED);
            cursor.mode.compare_exchange_strong(mode, make_mode(CursorMode::counted, mode >> 2), order::mode.acq_rel);
            has_receivers_ = true;
        }
        ch_.wake_receivers(ring_all(ch_.head.bell));
    }
    void look_at_ends() {
        u32 changes = ch_.changes();
        bool is_any = false;
        u32 dead = NONE;
        End who{};
        for (u32 r = 0; r < ch_.g.shape.receivers; ++r) {
            CursorMode mode = mode_of(ch_.cursor(index_, r).mode.load(order::mode.acquire));
            if (mode != CursorMode::out) is_any = true;
            // It may not have asked yet; a record sent now, with nobody counted, would be lost without a word.
            if (mode == CursorMode::joining) lane_->joining.fetch_or(1ull << r, order::joining.acq_rel);
            End end = end_of(ch_.receiver(r).word.load(order::end.acquire));
            if (end.state == EndState::live) end = end_of(ch_.receiver(r).ended.load(RELAXED));
            if (end.state != EndState::dead || end.epoch <= told_[r] || dead != NONE) continue;
            dead = r;
            who = end;
        }
        has_receivers_ = is_any;
        least_released_ = least_released();
        if (dead != NONE) {
            told_[dead] = who.epoch;
            if (ch_.g.shape.receiver_death == 0) throw ch_.died("receiver", dead, who);  // there may be more to tell
        }
        if (dead == NONE) seen_changes_ = changes;
    }
    [[noreturn]] void refuse_without_receivers() {
        for (u32 r = 0; r < ch_.g.shape.receivers; ++r) {
            End end = end_of(ch_.receiver(r).word.load(order::end.acquire));
            if (end.state == EndState::dead) throw ch_.died("receiver", r, end);
        }
        throw Error(Fault::end_of_channel, format("'%s' has no receiver left: all have closed", name()));
    }

    static constexpr u32 NONE = ~0u;
    Channel ch_;
    Lane* lane_ = nullptr;
    u32 index_ = 0;
    u32 epoch_ = 0;
    Spinner spinner_;
    EndMutex mutex_;
    Atomic<bool> is_closing_{false};
    bool is_closed_ = false;
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
    std::string obstacle_;  // the lock that was in the way of the last try, and who holds it
    u64 need_ = 0, skip_ = 0, nbytes_ = 0;
    u32 returns_seen_ = 0;
    u8* start_ = nullptr;
    Record record_{};
    Extent spilled_{};
};

}  // namespace penstock
