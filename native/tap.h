// tap.h: looks at the records of a channel as they pass, from outside: it joins nothing, writes nothing, waits for
// no peer, and none waits for it. So what it reads may be overwritten meanwhile: it copies first and asks afterwards
// whether what it copied was still a record, by the rules that the sender writes by; what may be torn is missed.
// Leaves to channel.h and pool.h: where things lie.
#pragma once
#include "channel.h"

namespace penstock {

// A record that was found, and not yet copied.
struct TappedRecord {
    u32 lane = 0;
    u64 sequence = 0;
    u64 committed_ns = 0;
    u64 nbytes = 0;
    bool is_spilled = false;
    bool is_gone = false;  // spilled, and its block has been given back
    SpilledRef ref{};
    u64 end = 0;  // position of the next one
};

class Tap {
   public:
    // From what is committed next on; is_from_start: from the oldest record that some receiver still keeps room for.
    Tap(std::shared_ptr<Segment> segment, bool is_from_start)
        : channel_(Attachment::observe(std::move(segment))),
          most_need_(round_up(sizeof(Record) + std::max<u64>(channel_.g.shape.inline_limit, sizeof(SpilledRef)),
                              RECORD_ALIGN)) {
        for (u32 i = 0; i < channel_.g.shape.lanes; ++i) {
            Start start = is_from_start ? oldest(i) : newest(i);
            lanes_.push_back({.position = start.position, .sequence = start.sequence});
        }
    }

    // The next record of a lane, the lanes in turn. False: there is none now. Throws CorruptRecord, and then goes on
    // with what comes after.
    bool find(TappedRecord& out) {
        for (u32 k = 1; k <= channel_.g.shape.lanes; ++k) {
            u32 i = (last_lane_ + k) % channel_.g.shape.lanes;
            if (find_in(i, out)) return true;
        }
        return false;
    }
    // Copies what find() found (nullptr: passes it). False: it was overwritten, or its block given back, before the
    // copy was whole. A record in the ring is then one that was missed. Throws where the block cannot be read.
    bool copy(const TappedRecord& record, u8* to) {
        last_lane_ = record.lane;
        if (record.is_spilled || to == nullptr) {
            bool is_whole = !record.is_gone && to != nullptr && copy_block(record.ref, to);
            pass(record);  // not if copying throws: then it is still the next one
            return is_whole;
        }
        u64 position = lanes_[record.lane].position;
        copy_words(to, ring_at(record.lane, position) + sizeof(Record), record.nbytes);
        if (!is_untouched(record.lane, position)) {
            go_on_at(record.lane, oldest(record.lane));
            return false;
        }
        pass(record);
        return true;
    }
    // Records that were overwritten before they were read. Exact where the next record after them has been read; else
    // by what the lane counts, which is one ahead while a record is being committed.
    u64 missed() const {
        u64 many = missed_;
        for (const LaneView& view : lanes_)
            if (view.is_adrift) many += lost(view, view.sequence_there);
        return many;
    }
    const char* name() const { return channel_.name(); }

   private:
    static constexpr int TRIES = 8;  // an honest lane has one skip between two records, and laps us not that often

    struct LaneView {
        u64 position = 0;        // of the next record to read
        u64 sequence = 0;        // that it has, if none was missed
        bool is_adrift = false;  // records were missed: how many, the next one will tell
        u64 lost_position = 0;   // where that began
        u64 sequence_there = 0;  // of the next record, by what the lane counts
    };
    struct Start {
        u64 position;
        u64 sequence;
    };

    const u8* ring_at(u32 lane, u64 position) const {
        return channel_.by->segment().read_at(channel_.ring_offset(lane, position));
    }
    // Word by word, each of them whole: a sender may be writing there.
    static void copy_words(void* to, const u8* from, u64 nbytes) {
        u8* at = static_cast<u8*>(to);
        const u64* words = reinterpret_cast<const u64*>(from);
        for (; nbytes >= sizeof(u64); nbytes -= sizeof(u64), at += sizeof(u64)) {
            u64 word = __atomic_load_n(words++, __ATOMIC_RELAXED);
            std::memcpy(at, &word, sizeof word);
        }
        if (nbytes == 0) return;
        u64 word = __atomic_load_n(words, __ATOMIC_RELAXED);  // records are padded: this lies within
        std::memcpy(at, &word, nbytes);
    }

    // What was copied from `position` on is what had been committed there. To be asked after the copy.
    //
    // A sender writes over the record at p when it writes at p + lane_nbytes or beyond. It does so before it moves
    // committed, but not without bounds: beyond committed by at most one record, and what it skips to begin a lap with
    // it; and never farther than lane_nbytes beyond what a counted receiver has released. Both only grow. So either of
    // them, read after the copy, bounds what was written before it.
    bool is_untouched(u32 i, u64 position) const {
        fence(order::tap.acquire);  // the copy was made before this
        u64 lane_nbytes = channel_.g.shape.lane_nbytes;
        u64 committed = channel_.lane(i).committed.load(order::publish.acquire);
        u64 left = lane_nbytes - (committed & (lane_nbytes - 1));
        u64 reach = most_need_ <= left ? most_need_ : left + most_need_;
        u64 behind = committed - position;
        if (behind <= lane_nbytes && behind + reach <= lane_nbytes) return true;
        for (u32 r = 0; r < channel_.g.shape.receivers; ++r) {
            Cursor& cursor = channel_.cursor(i, r);
            if (mode_of(cursor.mode.load(order::mode.acquire)) != CursorMode::counted) continue;
            u64 held_nbytes = committed - cursor.released.load(order::room.acquire);
            if (held_nbytes <= lane_nbytes && held_nbytes >= behind)
                return true;  // else: not one of ours, see Sender::least_released
        }
        return false;
    }
    Start newest(u32 i) const {
        Start start{};
        for (int tries = 0; tries < TRIES; ++tries) {  // both of one moment, if it can be had
            start.position = channel_.lane(i).committed.load(order::publish.acquire);
            start.sequence = channel_.lane(i).sequence.load(order::tap.acquire);
            if (channel_.lane(i).committed.load(RELAXED) == start.position) break;
        }
        return start;
    }
    // Where a record is known to begin, as far back as we may read: records do not say where the one before them is.
    Start oldest(u32 i) const {
        Start released[MAX_RECEIVERS];
        u32 many = 0;
        for (u32 r = 0; r < channel_.g.shape.receivers; ++r) {
            Cursor& cursor = channel_.cursor(i, r);
            if (mode_of(cursor.mode.load(order::mode.acquire)) != CursorMode::counted) continue;
            u64 position = cursor.released.load(order::room.acquire);
            released[many++] = {position, cursor.sequence.load(RELAXED)};
        }
        Start start = newest(i);
        u64 committed = start.position, furthest = 0;
        for (u32 k = 0; k < many; ++k) {
            u64 behind = committed - released[k].position;
            if (behind > channel_.g.shape.lane_nbytes || behind <= furthest) continue;
            furthest = behind;
            start = released[k];
        }
        return start;
    }
    void go_on_at(u32 i, Start start) {
        LaneView& view = lanes_[i];
        if (!view.is_adrift) view.lost_position = view.position;
        view.is_adrift = true;
        view.position = start.position;
        view.sequence_there = start.sequence;
    }
    // No more than there was room for, whatever the numbers say.
    static u64 lost(const LaneView& view, u64 sequence) {
        return std::min(sequence - view.sequence, (view.position - view.lost_position) / RECORD_ALIGN);
    }

    bool find_in(u32 i, TappedRecord& out) {
        LaneView& view = lanes_[i];
        u64 lane_nbytes = channel_.g.shape.lane_nbytes;
        for (int tries = 0; tries < TRIES; ++tries) {
            u64 committed = channel_.lane(i).committed.load(order::publish.acquire);
            u64 ahead = committed - view.position;
            if (ahead == 0) return false;
            Record record{};  // a local copy: what was checked is what is used
            bool is_lane = (committed | view.position) % RECORD_ALIGN == 0 && ahead <= NEVER / 2, is_record = false;
            u64 need = 0;
            if (is_lane && ahead <= lane_nbytes) {
                copy_words(&record, ring_at(i, view.position), sizeof record);
                need = round_up(sizeof(Record) + static_cast<u64>(record.length), RECORD_ALIGN);
                u64 left = lane_nbytes - (view.position & (lane_nbytes - 1));
                is_record = record.position == view.position && need <= ahead && need <= left && has_its_length(record);
            }
            out = {i, record.sequence, record.committed_ns, record.length, false, false, {}, view.position + need};
            RecordKind kind = static_cast<RecordKind>(record.kind);
            if (is_record && kind == RecordKind::bytes) return true;  // copy() asks whether it is untouched
            if (is_record && kind == RecordKind::spilled)
                copy_words(&out.ref, ring_at(i, view.position) + sizeof(Record), sizeof out.ref);
            if (is_lane && !is_untouched(i, view.position)) {
                go_on_at(i, oldest(i));
                continue;
            }
            if (!is_record) {
                u64 position = view.position;
                go_on_at(i, newest(i));
                throw Error(Fault::record_corrupt,
                            format("lane %u of '%s' at position %llu: not a record (position %llu, length %u, kind "
                                   "%u): a process has overwritten it",
                                   i, channel_.name(), static_cast<unsigned long long>(position),
                                   static_cast<unsigned long long>(record.position), record.length, record.kind));
            }
            if (kind == RecordKind::skip) {
                view.position = out.end;
                continue;
            }
            out.is_spilled = true;
            out.is_gone = !is_there(out.ref);
            out.nbytes = out.ref.nbytes;
            return true;
        }
        return false;
    }
    bool has_its_length(const Record& record) const {
        switch (static_cast<RecordKind>(record.kind)) {
            case RecordKind::bytes: return record.length <= channel_.g.shape.inline_limit;
            case RecordKind::spilled: return record.length == sizeof(SpilledRef);
            case RecordKind::skip: return true;
            default: return false;
        }
    }
    void pass(const TappedRecord& record) {
        LaneView& view = lanes_[record.lane];
        if (view.is_adrift) missed_ += lost(view, record.sequence);
        view.is_adrift = false;
        view.position = record.end;
        view.sequence = record.sequence + 1;
    }

    // ── what lies in the pool ──
    bool is_live(const SpilledRef& ref) const {
        const Block& block = channel_.pool.block(ref.block);
        return static_cast<BlockState>(block.state.load(order::block.acquire)) == BlockState::live &&
               block.generation.load(RELAXED) == ref.generation;
    }
    bool is_there(const SpilledRef& ref) const {
        if (ref.block >= channel_.g.shape.max_blocks || !is_live(ref)) return false;
        const Block& block = channel_.pool.block(ref.block);
        u64 offset = block.offset.load(RELAXED), nbytes = block.nbytes.load(RELAXED);
        u64 whole = channel_.pool.nbytes();
        return nbytes <= whole && offset <= whole - nbytes && ref.offset >= offset && ref.nbytes <= nbytes &&
               ref.offset - offset <= nbytes - ref.nbytes && channel_.pool.is_claimed(ref.offset, ref.nbytes);
    }
    // Read as a file, and not through the mapping: a page that was given back to the machine meanwhile reads as zeros,
    // and does not come back for our sake.
    bool copy_block(const SpilledRef& ref, u8* to) const {
        for (u64 done = 0; done < ref.nbytes;) {
            ssize_t n = ::pread(channel_.by->segment().fd(), to + done, ref.nbytes - done,
                                static_cast<off_t>(channel_.g.pool_data + ref.offset + done));
            if (n < 0 && errno != EINTR) throw os_error(format("tapping '%s'", name()), "pread", errno);
            if (n == 0) return false;
            if (n > 0) done += static_cast<u64>(n);
        }
        fence(order::tap.acquire);  // the copy was made before this
        return is_live(ref);
    }

    Channel channel_;
    u64 most_need_;  // of one record
    std::vector<LaneView> lanes_;
    u64 missed_ = 0;
    u32 last_lane_ = 0;
};

}  // namespace penstock
