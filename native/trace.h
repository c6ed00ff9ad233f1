// trace.h: what the ends of a channel do, and when, for a tracer outside of it. Each end writes its events into a ring
// of its own, which has no other writer, and waits for no tracer: what a tracer has not read in time is overwritten.
//
//   end                                               tracer
//   fence                  release (order trace)      written = cursor       acquire (order trace)
//   event, word by word                               copy, word by word
//   cursor = written + 1   release (order trace)      fence                  acquire (order trace)
//                                                     cursor again: is the copy older than the ring?
//
// A tracer that sees a word of event n sees a cursor of n or more after its fence. While the cursor is n, event n may
// be half written, where event n - TRACE_EVENTS lay: so that one is missed, too.
#pragma once
#include <algorithm>
#include <vector>

#include "segment.h"

namespace penstock {

inline constexpr u64 TRACE_NS = 2'000'000'000;       // a tracer that ends, however it does, is followed for so long
inline constexpr u64 MAX_TRACE_NS = 10'000'000'000;  // a time farther ahead was not written by a tracer

// The events of one end: the lanes' senders first, then the receivers.
class TraceRing {
   public:
    TraceRing(std::shared_ptr<Segment> segment, u32 end)
        : segment_(std::move(segment)), end_(end), until_(segment_->header().traced_until) {}

    // All that an end pays that is not traced.
    bool is_wanted() const { return __builtin_expect(until_.load(RELAXED) != 0, 0); }
    void add(TraceKind kind, u64 since_ns, u64 ns, u64 number, u64 nbytes = 0, u32 index = 0, u64 how = 0) {
        u8* mapped = is_on(ns) ? segment_->trace_mapping() : nullptr;
        if (mapped == nullptr) return;
        TraceEvent event{since_ns,
                         ns,
                         number,
                         static_cast<u32>(std::min<u64>(nbytes, ~0u)),
                         kind,
                         static_cast<u8>(std::min<u64>(how, 255)),
                         static_cast<u8>(index),
                         0};
        u64 words[TRACE_WORDS];
        std::memcpy(words, &event, sizeof event);
        const Geometry& g = segment_->geometry();
        auto& cursor = reinterpret_cast<TraceCursor*>(mapped + (g.trace_cursor(end_) - g.trace))->written;
        u64 written = cursor.load(RELAXED);
        auto* to = reinterpret_cast<Shared<u64>*>(mapped + (g.trace_ring(end_) - g.trace)) +
                   written % TRACE_EVENTS * TRACE_WORDS;
        fence(order::trace.release);  // the cursor is there before this event is
        for (u64 i = 0; i < TRACE_WORDS; ++i) to[i].store(words[i], RELAXED);
        cursor.store(written + 1, order::trace.release);
    }

    // That this process has the end, or has closed it.
    void mark(TraceKind kind) {
        if (!is_wanted()) return;
        u64 now = now_ns();
        add(kind, now, now, static_cast<u64>(::getpid()));
    }
    // Of a wait that is over and not in wait(): of an event loop, or after an interruption.
    void end_wait(Waits& waits, u64 now, u32 index, u32 how) {
        u64 since = waits.since_ns.load(RELAXED);
        if (since == 0) return;
        waits.since_ns.store(0, RELAXED);
        add(TraceKind::waited, std::min(since, now), now, 0, 0, index, how | WAIT_SLEPT);
    }

   private:
    bool is_on(u64 now) {
        u64 until = until_.load(RELAXED);
        if (until > now && until - now <= MAX_TRACE_NS) return true;
        if (until != 0) until_.compare_exchange_strong(until, 0, RELAXED);
        return false;
    }

    std::shared_ptr<Segment> segment_;
    u32 end_;
    Shared<u64>& until_;
};

// One call of wait(): nothing, if the end is not traced.
class TracedWait {
   public:
    TracedWait(TraceRing& ring, const Waits& waits) : ring_(ring), waits_(waits), is_traced_(ring.is_wanted()) {
        if (!is_traced_) return;
        u64 since = waits.since_ns.load(RELAXED);  // of a wait that goes on after an interruption, which has slept
        has_slept_ = since != 0;
        since_ns_ = has_slept_ ? since : now_ns();
        parks_ = waits.parks.value();
    }
    bool is_traced() const { return is_traced_; }
    void end(bool is_timed_out, u32 index = NO_INDEX, u32 how = 0) {
        if (!is_traced_) return;
        if (has_slept_ || waits_.parks.value() != parks_) how |= WAIT_SLEPT;
        if (is_timed_out) how |= WAIT_TIMED_OUT;
        u64 now = now_ns();
        ring_.add(TraceKind::waited, std::min(since_ns_, now), now, 0, 0, index, how);
    }

   private:
    TraceRing& ring_;
    const Waits& waits_;
    bool is_traced_, has_slept_ = false;
    u64 since_ns_ = 0, parks_ = 0;
};

// What a tracer reads. It claims the pages of the part for events, and maps it.
class TraceReader {
   public:
    explicit TraceReader(std::shared_ptr<Segment> segment) : segment_(std::move(segment)), g_(segment_->geometry()) {
        if (g_.channel == 0)
            throw Error(Fault::value, format("expected a channel, got segment '%s'", segment_->name().c_str()));
        segment_->require_writable();
        std::string what = "events of '" + segment_->name() + "'";
        claim_pages(segment_->fd(), g_.trace, segment_->trace_nbytes(), what.c_str());
        mapped_ = segment_->trace_mapping();
        if (mapped_ == nullptr) throw os_error(what, "mmap", errno);
        for (u32 end = 0; end < ends(); ++end) next_.push_back(cursor(end).load(order::trace.acquire));
    }

    u32 ends() const { return g_.shape.lanes + g_.shape.receivers; }
    // The ends write events until TRACE_NS from now. False: they did not until now, so events may lack.
    bool extend() {
        Shared<u64>& until = segment_->header().traced_until;
        u64 now = now_ns(), current = until.load(RELAXED);
        bool was_on = current > now;
        while (current < now + TRACE_NS || current > now + MAX_TRACE_NS)
            if (until.compare_exchange_strong(current, now + TRACE_NS, RELAXED)) break;
        return was_on;
    }
    // The events of an end since the last call, which are valid as far as this can be seen; how many.
    u64 read(u32 end, TraceEvent* to) {
        u64 written = cursor(end).load(order::trace.acquire), next = next_[end];
        next_[end] = written;
        if (written - next > NEVER / 2) return 0;  // an end counts upwards: this is none of ours
        u64 first = written - std::min(written - next, TRACE_EVENTS);
        copy(end, first, written, to);
        fence(order::trace.acquire);  // the copy was made before this
        u64 then = cursor(end).load(RELAXED);
        u64 oldest = then + 1 > TRACE_EVENTS ? then + 1 - TRACE_EVENTS : 0;
        u64 begin = std::clamp(oldest, first, written), now = now_ns();
        missed_ += begin - next;
        u64 many = 0;
        for (u64 i = begin; i < written; ++i) {
            if (is_event(end, to[i - first], now))
                to[many++] = to[i - first];
            else
                ++corrupt_;
        }
        return many;
    }
    u64 missed() const { return missed_; }
    u64 corrupt() const { return corrupt_; }
    const Segment& segment() const { return *segment_; }

   private:
    Shared<u64>& cursor(u32 end) const {
        return reinterpret_cast<TraceCursor*>(mapped_ + (g_.trace_cursor(end) - g_.trace))->written;
    }
    void copy(u32 end, u64 first, u64 last, TraceEvent* to) const {
        auto* ring = reinterpret_cast<const Shared<u64>*>(mapped_ + (g_.trace_ring(end) - g_.trace));
        for (; first < last; ++first, ++to) {
            u64 words[TRACE_WORDS];
            for (u64 i = 0; i < TRACE_WORDS; ++i) words[i] = ring[first % TRACE_EVENTS * TRACE_WORDS + i].load(RELAXED);
            std::memcpy(to, words, sizeof words);
        }
    }
    bool is_event(u32 end, const TraceEvent& event, u64 now) const {
        bool is_sender = end < g_.shape.lanes;
        if (event.since_ns > event.ns || event.ns > now) return false;
        switch (event.kind) {
            case TraceKind::opened:
            case TraceKind::closed: return true;
            case TraceKind::sent: return is_sender;
            case TraceKind::taken: return !is_sender && event.index < g_.shape.lanes;
            case TraceKind::waited: return event.index == NO_INDEX || (is_sender && event.index < g_.shape.receivers);
            default: return false;
        }
    }

    std::shared_ptr<Segment> segment_;
    const Geometry& g_;
    u8* mapped_ = nullptr;
    std::vector<u64> next_;  // of each end
    u64 missed_ = 0, corrupt_ = 0;
};

}  // namespace penstock
