// receiver.h: the end that reads. It copies a record out, or leases it where it lies.
#pragma once
#include <optional>

#include "channel.h"
#include "trace.h"

namespace penstock {

// A record that was found and not yet accepted. `at` points into a mapping that cannot be written through.
struct FoundRecord {
    u32 lane = 0;
    u64 end = 0;
    u64 sequence = 0;
    u64 committed_ns = 0;
    const u8* at = nullptr;
    u64 nbytes = 0;
    bool is_spilled = false;
    Extent extent{};
};

class Receiver : public std::enable_shared_from_this<Receiver> {
   public:
    // index: which receiver; -1: the first that is free.
    Receiver(std::shared_ptr<Attachment> by, int index)
        : channel_(std::move(by)), spinner_(static_cast<Latency>(channel_.g.shape.latency)) {
        bool was_expected = false;
        auto take = [&] {
            for (EndState state : {EndState::expected, EndState::closed, EndState::dead, EndState::failed})
                for (u32 r = 0; r < channel_.g.shape.receivers; ++r) {
                    u64 before;
                    if ((index >= 0 && static_cast<u32>(index) != r) ||
                        end_of(channel_.receiver(r).word.load(order::end.acquire)).state != state)
                        continue;
                    if (!channel_.claim(channel_.receiver(r).word, true, before, epoch_, &channel_.receiver(r).keeper))
                        continue;
                    channel_.receiver(r).ended.store(before, RELAXED);
                    was_expected = state == EndState::expected;
                    index_ = r;
                    return true;
                }
            return false;
        };
        auto is_due = [&](u32 r) {
            return channel_.is_being_reaped(end_of(channel_.receiver(r).word.load(order::end.acquire))) ||
                   channel_.receiver(r).keeper.load(order::end.acquire) != 0;
        };
        if (!channel_.take_end(take, channel_.g.shape.receivers, index, is_due)) {
            u32 r = index < 0 ? 0 : static_cast<u32>(index);
            if (r >= channel_.g.shape.receivers)
                throw Error(Fault::value, format("expected a receiver of '%s' below %u, got %d", name(),
                                                 channel_.g.shape.receivers, index));
            throw Error(Fault::value,
                        format("receiver %u of '%s' is taken: %s", r, name(),
                               channel_.describe(end_of(channel_.receiver(r).word.load(order::end.acquire))).c_str()));
        }
        PENSTOCK_POINT("receiver.claimed");
        slot_ = &channel_.receiver(index_);
        trace_.emplace(channel_.segment, channel_.g.shape.lanes + index_);
        trace_->mark(TraceKind::opened);
        lanes_.resize(channel_.g.shape.lanes);
        u64 ready = 0;
        for (u32 i = 0; i < channel_.g.shape.lanes; ++i) {
            Cursor& cursor = channel_.cursor(i, index_);
            if (was_expected) {
                cursor.mode.store(make_mode(CursorMode::counted, epoch_), order::mode.release);
                lanes_[i].position = cursor.released.load(RELAXED);
                cursor.read.store(lanes_[i].position, RELAXED);
                lanes_[i].is_counted = true;
                ready |= 1ull << i;
            } else {
                cursor.mode.store(make_mode(CursorMode::joining, epoch_), order::mode.release);
                ask_to_join(i);
            }
            lanes_[i].sender_epoch = end_of(channel_.lane(i).word.load(order::end.acquire)).epoch;
        }
        if (channel_.is_inbox() && ready != 0) channel_.head.ready.fetch_or(ready, order::ready.release);
        seen_changes_ = channel_.changes() - 1;
        channel_.changed();
        for (u32 i = 0; i < channel_.g.shape.lanes; ++i) channel_.ring_room(i, nullptr);
    }
    ~Receiver() {
        if (!abandon()) channel_.leave_open();
    }
    bool abandon() { return channel_.abandon(*this); }

    const char* name() const { return channel_.name(); }
    u32 index() const { return index_; }
    u32 source() const { return source_; }
    Channel& channel() { return channel_; }
    bool is_closed() const { return is_closing_.load(RELAXED); }
    EndMutex& mutex() { return mutex_; }

    // The next record, if there is one. It stays where it is until accept() or lease(). Throws EndOfChannel, PeerDied.
    // deadline: for a lock that a stopped peer may hold; Timeout names it.
    bool try_find(FoundRecord& out, u64 deadline = NEVER) {
        require_open();
        obstacle_.clear();
        channel_.by->refresh();
        if (!channel_.is_inbox()) {
            if (find_in(0, out, deadline)) return true;
        } else {
            // Not only when nothing is ready: senders that never pause would keep a death to themselves.
            if (__builtin_expect(channel_.changes() != seen_changes_, 0)) look_at_ends();
            for (u64 ready; (ready = channel_.head.ready.load(order::ready.acquire) & lanes_mask()) != 0;) {
                u64 later = last_lane_ >= 63 ? 0 : ready & ~((2ull << last_lane_) - 1);
                u32 i = static_cast<u32>(
                    __builtin_ctzll(later != 0 ? later : ready));  // in turn: no sender starves another
                last_lane_ = i;
                if (find_in(i, out, deadline)) return true;
                channel_.head.ready.fetch_and(~(1ull << i),
                                              order::ready.acquire);  // cleared before the last look
                if ((lanes_[i].is_counted || was_admitted(i)) &&
                    channel_.lane(i).committed.load(order::publish.acquire) != lanes_[i].position)
                    channel_.head.ready.fetch_or(1ull << i, order::ready.release);
            }
        }
        channel_.by->require_group();  // after the last record
        look_at_ends();
        return false;
    }
    // Copy mode: the bytes at found.at have been copied (or are not wanted); the sender may have the room.
    void accept(const FoundRecord& record) {
        if (record.is_spilled) channel_.pool.release(record.extent.block, record.extent.generation);
        PENSTOCK_POINT("receive.copied");
        pass(record, false);
    }
    // View mode. A spilled record becomes a lease of its block (give it to Pool::release); any other keeps its place in
    // the ring until release_record(lane, id): the sender's room then waits for it.
    u64 lease(const FoundRecord& record) { return pass(record, !record.is_spilled); }
    void release_record(u32 lane, u64 id) {
        std::lock_guard guard(leases_mutex_);
        auto& leases = lanes_[lane].leases;
        for (auto& lease : leases)
            if (lease.id == id) lease.is_released = true;
        give_back_front(lane, true);
        if (is_closed_ && !is_any_leased()) let_go();
    }

    // A lock was in the way of the last try: try again soon, for its holder rings no bell.
    bool is_locked_out() const { return !obstacle_.empty(); }
    Woken wait(u64 deadline) {
        for (u32 i = 0; i < channel_.g.shape.lanes;
             ++i)  // all is read: a sender that wanted more room than that has it now
            if (channel_.lane(i).room.parked.load(RELAXED) != 0) channel_.ring_room(i, &slot_->waits.wakes);
        TracedWait traced(*trace_, slot_->waits);
        Woken woken = penstock::wait(
            channel_.head.bell, 1ull << index_, deadline, spinner_, slot_->waits, &channel_.lane(last_lane_).cpu,
            [this] { return is_awaited(); }, [this](u64 parked) { hand_on(parked); });
        if (woken != Woken::interrupted) traced.end(woken == Woken::deadline);
        return woken;
    }
    bool arm() {
        require_open();
        if (is_locked_out()) return true;
        for (u32 i = 0; i < channel_.g.shape.lanes; ++i) {
            Bell& room = channel_.lane(i).room;
            if ((room.parked.load(RELAXED) | room.parked_async.load(RELAXED)) != 0)
                channel_.ring_room(i, &slot_->waits.wakes);
        }
        if (slot_->waits.since_ns.load(RELAXED) == 0) slot_->waits.since_ns.store(now_ns(), RELAXED);
        channel_.head.bell.parked_async.fetch_or(1ull << index_, order::bell.seq_cst);
        fence(order::bell.seq_cst);
        return is_awaited();
    }
    void disarm(bool is_over) {
        channel_.head.bell.parked_async.fetch_and(~(1ull << index_), order::bell.seq_cst);
        if (!is_over) return;
        if (trace_->is_wanted()) trace_->end_wait(slot_->waits, now_ns(), NO_INDEX, WAIT_TIMED_OUT);
        slot_->waits.since_ns.store(0, RELAXED);
    }

    Error timeout(u64 waited_ns);  // describe.h: says which sender has been silent for longest

    void begin_close() {
        is_closing_.store(true, RELAXED);  // the bell orders it
        if (channel_.is_ours()) ring_all(channel_.head.bell);
    }
    // failure: it does not end in peace. The sender gets PeerDied with this text at once; the records that views
    // still show keep their room, and no other receiver takes this place, until the last of the views is dropped.
    void close(const std::string* failure = nullptr) {
        begin_close();
        if (!channel_.is_ours()) return;  // before the mutex: in a child its holder does not exist
        std::lock_guard guard(mutex_);
        std::lock_guard leases_guard(leases_mutex_);
        if (is_closed_) return;
        PENSTOCK_POINT("close.begun");
        is_closed_ = true;
        trace_->mark(TraceKind::closed);
        if (failure != nullptr) fail(*failure);
        if (!is_any_leased()) let_go();
    }

    // Closes the end after EndOfChannel. Further calls, also of other threads that share this end, throw EndOfChannel.
    void exhaust() {
        is_exhausted_.store(true, RELAXED);  // before is_closing_, which the bell orders
        close();
    }

   private:
    static constexpr u64 PATIENCE_NS = 200'000;  // about the time in which a quarter of the ring is read

    struct RingLease {
        u64 id;
        u64 end;
        u64 sequence;
        bool is_released;
    };
    struct LaneView {
        u64 position = 0;      // of the next record to read
        u32 sender_epoch = 0;  // of the sender that this receiver believes to be there
        bool is_counted = false;
        bool is_told = false;  // that this sender ended
        std::deque<RingLease> leases;
    };

    void require_open() {
        if (is_exhausted_.load(RELAXED))
            throw Error(Fault::end_of_channel, format("receiver %u of '%s' has reached the end", index_, name()));
        if (is_closing_.load(RELAXED))
            throw Error(Fault::closed, format("receiver %u of '%s' is closed", index_, name()));
        channel_.require_ours();
    }
    u64 lanes_mask() const { return channel_.g.shape.lanes == 64 ? NEVER : (1ull << channel_.g.shape.lanes) - 1; }
    void ask_to_join(u32 i) {
        channel_.lane(i).joining.fetch_or(1ull << index_, order::joining.acq_rel);
        channel_.ring_room(i, nullptr);
    }
    Error corrupt(u32 lane, const Record& record);  // describe.h

    bool find_in(u32 i, FoundRecord& out, u64 deadline) {
        LaneView& view = lanes_[i];
        Lane& lane = channel_.lane(i);
        if (__builtin_expect(!view.is_counted, 0) && !was_admitted(i)) return false;
        for (;;) {
            u64 committed = lane.committed.load(order::publish.acquire);
            u64 ahead = committed - view.position;
            if (ahead == 0) return false;
            u64 lane_nbytes = channel_.g.shape.lane_nbytes;
            Record record;  // a local copy: what was checked is what is used
            std::memcpy(&record, channel_.by->segment().read_at(channel_.ring_offset(i, view.position)), sizeof record);
            u64 need = round_up(sizeof(Record) + static_cast<u64>(record.length), RECORD_ALIGN);
            u64 left = lane_nbytes - (view.position & (lane_nbytes - 1));
            if (ahead > lane_nbytes || record.position != view.position || need > ahead || need > left)
                throw corrupt(i, record);
            if (__builtin_expect(record.epoch != static_cast<u16>(view.sender_epoch), 0)) meet_sender(i, record.epoch);
            RecordKind kind = static_cast<RecordKind>(record.kind);
            if (kind == RecordKind::skip) {
                view.position += need;
                // At once: no record may follow, and the next one may need this room.
                keep_or_give_back(i, view.position, record.sequence - 1, false);
                continue;
            }
            PENSTOCK_POINT("receive.found");
            out.lane = i;
            out.sequence = record.sequence;
            out.committed_ns = record.committed_ns;
            out.end = view.position + need;
            out.at = channel_.by->segment().read_at(channel_.ring_offset(i, view.position)) + sizeof(Record);
            out.nbytes = record.length;
            out.is_spilled = kind == RecordKind::spilled;
            if (out.is_spilled) {
                SpilledRef ref;
                if (record.length != sizeof ref) throw corrupt(i, record);
                std::memcpy(&ref, out.at, sizeof ref);
                out.extent = {ref.block, ref.generation, ref.offset, ref.nbytes};
                try {
                    channel_.pool.open_pending(out.extent, index_, deadline);
                } catch (const Error& error) {
                    if (error.fault == Fault::timeout) obstacle_ = error.text;
                    if (error.fault == Fault::stale_ref) pass(out, false);  // this record is lost; the next one is not
                    throw;
                }
                PENSTOCK_POINT("receive.opened");
                out.at = channel_.by->segment().read_at(channel_.g.pool_data + ref.offset);
                out.nbytes = ref.nbytes;
            } else if (kind != RecordKind::bytes) {
                throw corrupt(i, record);
            }
            return true;
        }
    }
    u64 pass(const FoundRecord& record, bool is_leased) {
        LaneView& view = lanes_[record.lane];
        view.position = record.end;
        channel_.cursor(record.lane, index_).read.store(record.end, RELAXED);
        source_ = record.lane;
        if (trace_->is_wanted()) trace_take(record);
        slot_->waits.records.count();
        slot_->waits.nbytes.count(record.nbytes);
        u64 behind = channel_.lane(record.lane).committed.load(RELAXED) - record.end;
        slot_->waits.furthest_nbytes.raise(behind);
        return keep_or_give_back(record.lane, record.end, record.sequence, is_leased);
    }
    [[gnu::noinline]] void trace_take(const FoundRecord& record) {
        u64 now = now_ns();
        trace_->end_wait(slot_->waits, now, NO_INDEX, 0);
        trace_->add(TraceKind::taken, record.committed_ns, now, record.sequence, record.nbytes, record.lane);
    }
    u64 keep_or_give_back(u32 lane, u64 end, u64 sequence, bool is_leased) {
        auto& leases = lanes_[lane].leases;
        if (!is_leased && leases.empty()) {
            give_back(lane, end, sequence, false);
            return 0;
        }
        std::lock_guard guard(leases_mutex_);
        leases.push_back({++last_lease_, end, sequence, !is_leased});
        give_back_front(lane, false);
        return last_lease_;
    }
    void give_back_front(u32 lane, bool is_late) {
        auto& leases = lanes_[lane].leases;
        u64 end = 0, sequence = 0;
        while (!leases.empty() && leases.front().is_released) {
            end = leases.front().end;
            sequence = leases.front().sequence;
            leases.pop_front();
        }
        if (end != 0) give_back(lane, end, sequence, is_late);
    }
    // is_late: of a lease, perhaps while we sleep; then a sender is woken for any room, however little.
    void give_back(u32 lane, u64 end, u64 sequence, bool is_late) {
        Cursor& cursor = channel_.cursor(lane, index_);
        cursor.sequence.store(sequence + 1, RELAXED);
        cursor.released.store(end, order::room.release);  // the record was read before this
        PENSTOCK_POINT("receive.released");
        Bell& room = channel_.lane(lane).room;
        fence(order::bell.seq_cst);
        if (__builtin_expect((room.parked.load(RELAXED) | room.parked_async.load(RELAXED)) == 0, 1)) return;
        // A sender that has just gone to sleep wants a good part of the ring, so that it does not wake for every
        // record; one that sleeps for long is a sender that waits for us.
        u64 since = channel_.lane(lane).waits.since_ns.load(RELAXED);
        bool is_waited_for = is_late || (since != 0 && now_ns() - since > PATIENCE_NS);
        if (is_waited_for || static_cast<i64>(end - room.wake_position.load(RELAXED)) >= 0)
            channel_.ring_room(lane, &slot_->waits.wakes);
    }
    bool was_admitted(u32 i) {
        Cursor& cursor = channel_.cursor(i, index_);
        if (mode_of(cursor.mode.load(order::mode.acquire)) != CursorMode::counted) return false;
        lanes_[i].position = cursor.released.load(order::room.acquire);
        cursor.read.store(lanes_[i].position, RELAXED);
        lanes_[i].sender_epoch = end_of(channel_.lane(i).word.load(order::end.acquire)).epoch;
        lanes_[i].is_counted = true;
        return true;
    }
    // A record of a sender that we did not know: if the one before died, the caller is told so first, once.
    void meet_sender(u32 i, u16 epoch) {
        LaneView& view = lanes_[i];
        End before = end_of(channel_.lane(i).ended.load(RELAXED));
        // The only way to another sender of a ring or broadcast is a death; an inbox's lane may have changed hands in
        // peace.
        bool died = !view.is_told && view.sender_epoch != 0;
        if (channel_.is_inbox()) died = died && has_died(before.state) && before.epoch == view.sender_epoch;
        u32 current = end_of(channel_.lane(i).word.load(order::end.acquire)).epoch;
        view.sender_epoch = (current & 0xffff) == epoch ? current : (current & 0xff0000) | epoch;
        view.is_told = false;
        if (died && channel_.g.shape.sender_death == 0) throw channel_.died("sender", i, before);
    }
    void look_at_ends() {
        if (!channel_.is_inbox()) return look_at_sender();
        u32 changes = channel_.changes();
        if (changes == seen_changes_) return;
        bool is_all_ended = true;
        for (u32 i = 0; i < channel_.g.shape.lanes; ++i) {
            LaneView& view = lanes_[i];
            End end = end_of(channel_.lane(i).word.load(order::end.acquire));
            if (end.state == EndState::expected || end.state == EndState::live) is_all_ended = false;
            if (!has_died(end.state) || (view.is_told && view.sender_epoch == end.epoch)) continue;
            if ((view.is_counted || was_admitted(i)) &&
                channel_.lane(i).committed.load(order::publish.acquire) != view.position) {
                channel_.head.ready.fetch_or(1ull << i, order::ready.release);  // what it had committed comes first
                return;
            }
            view.sender_epoch = end.epoch;
            view.is_told = true;
            if (channel_.g.shape.sender_death == 0)
                throw channel_.died("sender", i, end);  // there may be more to tell: seen_changes_ stays
        }
        if (is_all_ended) {
            if (channel_.head.ready.load(order::ready.acquire) != 0) return;
            throw Error(Fault::end_of_channel,
                        format("all %u senders of '%s' have closed or died", channel_.g.shape.lanes, name()));
        }
        seen_changes_ = changes;
    }
    void look_at_sender() {
        LaneView& view = lanes_[0];
        u32 changes = channel_.changes();
        End end = end_of(channel_.lane(0).word.load(order::end.acquire));
        if (__builtin_expect(end.state == EndState::live || end.state == EndState::expected, 1)) {
            if (!view.is_counted) ask_to_join(0);
            bool is_another = end.state == EndState::live && end.epoch != view.sender_epoch && view.is_counted;
            if (is_another && channel_.lane(0).committed.load(order::publish.acquire) == view.position)
                meet_sender(0, static_cast<u16>(end.epoch));
            seen_changes_ = changes;
            return;
        }
        if (view.is_counted && channel_.lane(0).committed.load(order::publish.acquire) != view.position)
            return;  // read first
        if (end.state == EndState::closed)
            throw Error(Fault::end_of_channel, format("the sender of '%s' has closed", name()));
        view.is_told = true;
        view.sender_epoch = end.epoch;
        throw channel_.died("sender", 0, end);
    }
    bool is_awaited() {
        if (is_closing_.load(RELAXED) || channel_.by->is_stale() || channel_.by->is_group_broken() ||
            channel_.changes() != seen_changes_)
            return true;
        if (channel_.is_inbox()) return (channel_.head.ready.load(order::ready.acquire) & lanes_mask()) != 0;
        if (lanes_[0].is_counted) return channel_.lane(0).committed.load(order::publish.acquire) != lanes_[0].position;
        return mode_of(channel_.cursor(0, index_).mode.load(order::mode.acquire)) == CursorMode::counted;
    }
    // A ringer wakes few, and those wake the rest: one each, of those that are asleep and have something to read. A
    // receiver that has read everything is not woken, so a wake-up cannot go round for nothing.
    void hand_on(u64 parked) {
        u64 behind = 0;
        for (; parked != 0; parked &= parked - 1) {
            u32 r = static_cast<u32>(__builtin_ctzll(parked));
            if (r >= channel_.g.shape.receivers) break;
            for (u32 i = 0; i < channel_.g.shape.lanes; ++i)
                if (channel_.cursor(i, r).read.load(RELAXED) != channel_.lane(i).committed.load(order::publish.acquire))
                    behind |= 1ull << r;
        }
        if (behind != 0 && futex_wake(&channel_.head.bell.rings, 1, fold(behind)) > 0) slot_->waits.wakes.count();
    }
    bool is_any_leased() const {
        for (auto& view : lanes_)
            if (!view.leases.empty()) return true;
        return false;
    }
    u64 word(EndState state) const { return make_word({state, channel_.by->slot(), channel_.by->epoch(), epoch_}); }
    void fail(const std::string& failure) {
        write_failure(slot_->failure, epoch_, failure);
        slot_->keeper.store(word(EndState::failed), order::end.release);
        PENSTOCK_POINT("fail.written");
        u64 expected = word(EndState::live);
        slot_->word.compare_exchange_strong(expected, word(EndState::failed), order::end.acq_rel);
        channel_.changed();
        ring_rooms();
        channel_.by->announce_failure();
    }
    void ring_rooms() {
        for (u32 i = 0; i < channel_.g.shape.lanes; ++i)
            if (ring_all(channel_.lane(i).room) != 0)
                channel_.by->wake_async(end_of(channel_.lane(i).word.load(order::end.acquire)).slot);
    }
    // Leaves the channel: its room and its records are waited for no longer.
    void let_go() {
        if (!channel_.is_ours() || !channel_.by) return;
        for (u32 i = 0; i < channel_.g.shape.lanes; ++i) put_out(channel_.cursor(i, index_).mode, epoch_);
        channel_.head.bell.parked_async.fetch_and(~(1ull << index_), order::bell.seq_cst);
        slot_->waits.since_ns.store(0, RELAXED);
        // Closed last: from then on the place may be another's.
        auto finish = [index = index_, slot = slot_, live = word(EndState::live), closed = word(EndState::closed),
                       failed = word(EndState::failed)](Attachment& by) {
            if (!Pool(by).drop_receiver(index)) return false;
            u64 expected = live, keeper = failed;
            slot->word.compare_exchange_strong(expected, closed, order::end.acq_rel);
            slot->keeper.compare_exchange_strong(keeper, 0, order::end.acq_rel);
            return true;
        };
        if (!finish(*channel_.by)) channel_.by->put_off(finish);
        channel_.changed();
        ring_rooms();
        channel_.let_go();
    }

    Channel channel_;
    ReceiverSlot* slot_ = nullptr;
    u32 index_ = 0;
    u32 epoch_ = 0;
    Spinner spinner_;
    std::optional<TraceRing> trace_;  // once the index is known
    EndMutex mutex_;
    std::mutex leases_mutex_;
    Atomic<bool> is_closing_{false};
    Atomic<bool> is_exhausted_{false};
    bool is_closed_ = false;
    u32 seen_changes_ = 0;
    u32 last_lane_ = 0;
    u32 source_ = 0;
    u64 last_lease_ = 0;
    std::string obstacle_;  // the lock that was in the way of the last try, and its holder
    std::vector<LaneView> lanes_;
};

}  // namespace penstock
