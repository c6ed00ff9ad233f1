// trace.cpp: the events of an end are those of what it did, whole and in order, whatever a tracer misses; nothing is
// written when no tracer asks. First one by one; then at full speed, with tracers that dawdle.
#include "trace.h"

#include "testing.h"

using namespace testing;

namespace {

constexpr u64 WATCHDOG_NS = 60'000'000'000;
constexpr u64 LANE_NBYTES = 4096, INLINE_LIMIT = 256;

std::shared_ptr<Segment> other_mapping(const std::shared_ptr<Segment>& segment) {
    return WATCHES_THREADS ? segment : map_again(*segment);  // TSan sees addresses, so all share one mapping
}
u64 pages_of(const Segment& segment) {
    struct stat status{};
    REQUIRE(::fstat(segment.fd(), &status) == 0, "fstat: %s", std::strerror(errno));
    return static_cast<u64>(status.st_blocks);
}

struct Play {
    std::shared_ptr<Segment> segment =
        create(channel_shape(ChannelStyle::broadcast, 1, 2, LANE_NBYTES, INLINE_LIMIT, 64 << 10, 8), "trace");
    TraceReader reader{other_mapping(segment)};
    std::vector<TraceEvent> events = std::vector<TraceEvent>(TRACE_EVENTS);

    std::vector<TraceEvent> read(u32 end) {
        u64 many = reader.read(end, events.data());
        return {events.begin(), events.begin() + static_cast<i64>(many)};
    }
    void set_until(u64 until) { segment->header().traced_until.store(until, RELAXED); }
    u64 until() const { return segment->header().traced_until.load(RELAXED); }
};
struct Ends {
    std::shared_ptr<Attachment> by;
    Sender sender;
    std::shared_ptr<Receiver> receivers[2];
    explicit Ends(Play& play)
        : by(Attachment::join(play.segment, "ends")),
          sender(by, 0),
          receivers{std::make_shared<Receiver>(by, 0), std::make_shared<Receiver>(by, 1)} {}
    bool try_send(u64 nbytes) {
        std::vector<u8> bytes(nbytes);
        Part part{bytes.data(), nbytes};
        return sender.try_send(&part, 1, nbytes);
    }
    void receive(u32 r) {
        FoundRecord record;
        REQUIRE(receivers[r]->try_find(record), "no record");
        receivers[r]->accept(record);
    }
};

void the_events_of_a_scene_are_exactly_what_happened() {
    Play play;
    play.reader.extend();
    u64 began = now_ns(), deadline = 0;
    {
        Ends ends(play);
        REQUIRE(ends.try_send(8) && ends.try_send(1000), "no room");
        ends.receive(0);
        ends.receive(0);
        ends.receive(1);
        FoundRecord record;
        REQUIRE(!ends.receivers[0]->try_find(record), "a third record");
        deadline = now_ns() + 2'000'000;
        REQUIRE(ends.receivers[0]->wait(deadline) == Woken::deadline, "a record");
    }
    u64 ended = now_ns();
    auto sent = play.read(0), first = play.read(1), second = play.read(2);
    auto is = [](const TraceEvent& event, TraceKind kind, u64 number, u32 nbytes, u8 how, u8 index) {
        return event.kind == kind && event.number == number && event.nbytes == nbytes && event.how == how &&
               event.index == index;
    };
    u64 pid = static_cast<u64>(::getpid());
    REQUIRE(sent.size() == 4 && first.size() == 5 && second.size() == 3, "%zu, %zu and %zu events", sent.size(),
            first.size(), second.size());
    REQUIRE(is(sent[0], TraceKind::opened, pid, 0, 0, 0) && is(sent[1], TraceKind::sent, 0, 8, 0, 0) &&
                is(sent[2], TraceKind::sent, 1, 1000, 0, 0) && is(sent[3], TraceKind::closed, pid, 0, 0, 0),
            "the sender's");
    REQUIRE(is(first[0], TraceKind::opened, pid, 0, 0, 0) && is(first[1], TraceKind::taken, 0, 8, 0, 0) &&
                is(first[2], TraceKind::taken, 1, 1000, 0, 0) &&
                is(first[3], TraceKind::waited, 0, 0, WAIT_SLEPT | WAIT_TIMED_OUT, NO_INDEX) &&
                is(first[4], TraceKind::closed, pid, 0, 0, 0),
            "the first receiver's");
    REQUIRE(is(second[1], TraceKind::taken, 0, 8, 0, 0), "the second receiver's");
    REQUIRE(first[1].since_ns == sent[1].since_ns && first[2].since_ns == sent[2].since_ns, "another time of sending");
    // The wait may begin late, and then is shorter than 2 ms, but it does not end before the deadline.
    REQUIRE(first[3].since_ns >= deadline - 2'000'000 && first[3].ns >= deadline, "a shorter wait");
    for (const auto& events : {sent, first, second})
        for (size_t i = 0; i < events.size(); ++i)
            REQUIRE(events[i].ns >= (i == 0 ? began : events[i - 1].ns) && events[i].ns <= ended &&
                        events[i].since_ns <= events[i].ns,
                    "the times of event %zu", i);
    REQUIRE(play.reader.missed() == 0 && play.reader.corrupt() == 0 && play.read(0).empty(), "there is more");
}

void a_sender_that_waits_says_which_receiver_is_in_its_way() {
    Play play;
    Ends ends(play);
    play.reader.extend();
    u64 many = 0;
    while (ends.try_send(100)) ++many;
    for (u64 i = 0; i < many; ++i) ends.receive(0);  // the other one has read nothing
    REQUIRE(ends.sender.wait(now_ns() + 1'000'000) == Woken::deadline, "there is room");
    auto sent = play.read(0);
    REQUIRE(sent.size() == many + 1 && sent.back().kind == TraceKind::waited && sent.back().index == 1 &&
                sent.back().how == (WAIT_SLEPT | WAIT_TIMED_OUT),
            "%zu events, the last of kind %d, for %d", sent.size(), static_cast<int>(sent.back().kind),
            sent.back().index);
}

void a_wait_of_an_event_loop_ends_with_its_record() {
    Play play;
    Ends ends(play);
    play.reader.extend();
    ends.receivers[0]->arm();
    ends.receivers[0]->disarm(false);
    REQUIRE(ends.try_send(8), "no room");
    ends.receive(0);
    ends.receivers[0]->disarm(true);
    auto events = play.read(1);
    REQUIRE(events.size() == 2 && events[0].kind == TraceKind::waited && events[0].how == WAIT_SLEPT &&
                events[1].kind == TraceKind::taken && events[0].ns == events[1].ns,
            "%zu events", events.size());
    ends.receivers[1]->arm();
    ends.receivers[1]->disarm(true);  // given up
    events = play.read(2);
    REQUIRE(events.size() == 1 && events[0].how == (WAIT_SLEPT | WAIT_TIMED_OUT), "not given up");
}

void nothing_is_written_and_no_page_is_taken_while_no_tracer_asks() {
    auto segment =
        create(channel_shape(ChannelStyle::broadcast, 1, 2, LANE_NBYTES, INLINE_LIMIT, 64 << 10, 8), "trace");
    u64 before = pages_of(*segment);
    {
        Sender sender(Attachment::join(segment, "sender"), 0);
        u8 byte = 0;
        Part part{&byte, 1};
        REQUIRE(sender.try_send(&part, 1, 1), "no room");
    }
    REQUIRE(pages_of(*segment) == before, "%" PRIu64 " blocks more", pages_of(*segment) - before);
    TraceReader reader(other_mapping(segment));
    REQUIRE((pages_of(*segment) - before) * 512 == segment->trace_nbytes(), "not all claimed");
    std::vector<TraceEvent> events(TRACE_EVENTS);
    for (u32 end = 0; end < reader.ends(); ++end) REQUIRE(reader.read(end, events.data()) == 0, "an event");
}

void tracing_ends_when_its_time_has_passed_and_the_word_is_cleared() {
    Play play;
    Ends ends(play);
    REQUIRE(!play.reader.extend() && play.reader.extend(), "it was on before");
    REQUIRE(play.until() > now_ns() && play.until() <= now_ns() + TRACE_NS, "until another time");
    for (u64 passed : {now_ns(), now_ns() - 1, u64{1}, now_ns() + MAX_TRACE_NS + 1'000'000'000, NEVER}) {
        play.set_until(passed);
        REQUIRE(ends.try_send(8), "no room");
        REQUIRE(play.until() == 0 && play.read(0).empty(), "it goes on until %" PRIu64, passed);
    }
    REQUIRE(!play.reader.extend(), "it was on");
    REQUIRE(ends.try_send(8) && play.read(0).size() == 1, "it is off");
}

void two_tracers_read_the_same_and_neither_ends_the_other() {
    Play play;
    Ends ends(play);
    play.reader.extend();
    {
        TraceReader other(other_mapping(play.segment));
        REQUIRE(other.extend(), "it was off");
        u64 until = play.until();
        play.set_until(now_ns() + 5'000'000'000);  // another one is ahead: it is not moved back
        REQUIRE(other.extend() && play.until() > until, "moved back");
        REQUIRE(ends.try_send(8), "no room");
        std::vector<TraceEvent> events(TRACE_EVENTS);
        REQUIRE(other.read(0, events.data()) == 1, "not read by the second");
    }
    REQUIRE(ends.try_send(8) && play.read(0).size() == 2, "not read by the first");
}

void what_was_overwritten_is_missed_and_the_rest_is_whole() {
    Play play;
    TraceRing ring(play.segment, 1);
    play.reader.extend();
    u64 now = now_ns();
    for (u64 written = 0, round = 1; round < 5; ++round) {
        u64 before = play.reader.missed(), many = round * TRACE_EVENTS / 2 + round;
        for (u64 i = 0; i < many; ++i, ++written) ring.add(TraceKind::taken, now, now, written);
        auto events = play.read(1);
        u64 readable = std::min(many, TRACE_EVENTS - 1);  // where the oldest one lies, the next may be written
        REQUIRE(events.size() == readable && play.reader.missed() - before == many - readable, "%zu events",
                events.size());
        for (u64 i = 0; i < readable; ++i) REQUIRE(events[i].number == written - readable + i, "event %" PRIu64, i);
    }
}

void what_is_no_event_is_counted_and_not_returned() {
    Play play;
    play.reader.extend();
    TraceRing sender(play.segment, 0), receiver(play.segment, 1);
    u64 now = now_ns();
    sender.add(TraceKind::taken, now, now, 0);                 // of a receiver
    sender.add(static_cast<TraceKind>(77), now, now, 0);       // no kind
    sender.add(TraceKind::waited, now, now, 0, 0, 2);          // there is no such receiver
    sender.add(TraceKind::sent, now + 1, now, 0);              // before it began
    sender.add(TraceKind::sent, now, now + 1'000'000'000, 0);  // to come
    receiver.add(TraceKind::sent, now, now, 0);
    receiver.add(TraceKind::taken, now, now, 0, 0, 1);  // there is no such lane
    REQUIRE(play.read(0).empty() && play.read(1).empty() && play.reader.corrupt() == 7, "%" PRIu64,
            play.reader.corrupt());
    const Geometry& g = play.segment->geometry();
    auto* cursor = reinterpret_cast<TraceCursor*>(play.segment->trace_mapping() + (g.trace_cursor(0) - g.trace));
    for (u64 written : {u64{0}, NEVER, NEVER / 2, u64{1} << 40, u64{5}}) {
        cursor->written.store(written, RELAXED);
        REQUIRE(play.read(0).size() < TRACE_EVENTS, "more than there is room for");
    }
}

// ── at full speed ──
void a_tracer_never_returns_a_torn_event(u64 many, u64 seed) {
    auto segment = create(channel_shape(ChannelStyle::ring, 1, 1, LANE_NBYTES, INLINE_LIMIT, 64 << 10, 8), "trace");
    constexpr u64 TRACERS = 3;
    std::atomic<bool> is_over{false};
    std::atomic<u64> whole{0}, missed{0};
    std::vector<std::thread> threads;
    std::vector<std::unique_ptr<TraceReader>> readers;
    for (u64 t = 0; t < TRACERS; ++t) readers.push_back(std::make_unique<TraceReader>(other_mapping(segment)));
    readers[0]->extend();
    for (u64 t = 0; t < TRACERS; ++t)
        threads.emplace_back([&, t] {
            TraceReader& reader = *readers[t];
            Random random(seed + t);
            std::vector<TraceEvent> events(TRACE_EVENTS);
            u64 next = 0, events_read = 0;
            for (bool is_last = false; !is_last;) {
                is_last = is_over.load();
                reader.extend();
                u64 got = reader.read(1, events.data());
                for (u64 i = 0; i < got; ++i, ++events_read) {
                    u64 number = events[i].number;
                    REQUIRE(number >= next && events[i].nbytes == static_cast<u32>(number * 2654435761) &&
                                events[i].since_ns == 1 + number && events[i].how == static_cast<u8>(number),
                            "event %" PRIu64 " is torn", number);
                    next = number + 1;
                }
                if (t != 0 && random.one_in(t == 1 ? 64 : 2)) ::usleep(static_cast<unsigned>(random.below(300)));
            }
            REQUIRE(events_read + reader.missed() == many && reader.corrupt() == 0,
                    "%" PRIu64 " seen and %" PRIu64 " missed are not %" PRIu64, events_read, reader.missed(), many);
            whole += events_read, missed += reader.missed();
        });
    TraceRing ring(other_mapping(segment), 1);
    Random random(seed);
    for (u64 number = 0; number < many; ++number) {
        ring.add(TraceKind::taken, 1 + number, now_ns(), number, static_cast<u32>(number * 2654435761), 0,
                 static_cast<u8>(number));
        if (random.one_in(5000)) ::usleep(200);
    }
    is_over = true;
    for (auto& thread : threads) thread.join();
    std::printf("at full speed %" PRIu64 " events, %" PRIu64 " tracers: %" PRIu64 " whole, %" PRIu64 " missed\n", many,
                TRACERS, whole.load(), missed.load());
    REQUIRE(whole.load() != 0, "nothing was seen");
}

// What an event costs an end, and what a look at the word costs an end that is not traced. For people to read.
void print_costs() {
    constexpr u64 MANY = 200'000;
    auto segment = create(channel_shape(ChannelStyle::ring, 1, 1, 64 << 10, INLINE_LIMIT, 64 << 10, 8), "trace");
    auto by = Attachment::join(segment, "ends");
    Sender sender(by, 0);
    auto receiver = std::make_shared<Receiver>(by, 0);
    TraceReader reader(segment);
    std::vector<TraceEvent> events(TRACE_EVENTS);
    u64 least[2] = {NEVER, NEVER};
    for (int round = 0; round < 16; ++round) {
        bool is_on = round % 2 == 1;
        segment->header().traced_until.store(0, RELAXED);
        if (is_on) reader.extend();
        u64 began = now_ns();
        for (u64 i = 0; i < MANY; ++i) {
            Part part{&i, sizeof i};
            FoundRecord record;
            REQUIRE(sender.try_send(&part, 1, sizeof i) && receiver->try_find(record), "no room");
            receiver->accept(record);
        }
        least[is_on] = std::min(least[is_on], (now_ns() - began) / (MANY / 1000));
        for (u32 end = 0; end < reader.ends(); ++end) reader.read(end, events.data());
    }
    std::printf("a record, sent and taken: %.1f ns, traced %.1f ns\n", static_cast<double>(least[0]) / 1e3,
                static_cast<double>(least[1]) / 1e3);
}

}  // namespace

int main(int argc, char** argv) {
    Arguments arguments(argc, argv);
    the_events_of_a_scene_are_exactly_what_happened();
    a_sender_that_waits_says_which_receiver_is_in_its_way();
    a_wait_of_an_event_loop_ends_with_its_record();
    nothing_is_written_and_no_page_is_taken_while_no_tracer_asks();
    tracing_ends_when_its_time_has_passed_and_the_word_is_cleared();
    two_tracers_read_the_same_and_neither_ends_the_other();
    what_was_overwritten_is_missed_and_the_rest_is_whole();
    what_is_no_event_is_counted_and_not_returned();
    a_tracer_never_returns_a_torn_event((arguments.is_quick ? 200'000 : 5'000'000) * arguments.scale, arguments.seed);
    print_costs();
    return 0;
}
