// tap.cpp: what an onlooker may see of records that are overwritten while it looks. First each way in which a copy can
// be torn, one by one, between finding a record and copying it; then at full speed, with senders, receivers and taps
// that dawdle. Every record says which it is, and carries bytes that follow from that: a torn one is seen.
#include "tap.h"

#include <algorithm>

#include "testing.h"

using namespace testing;

namespace {

constexpr u64 WATCHDOG_NS = 60'000'000'000;
constexpr u64 LANE_NBYTES = 4096, INLINE_LIMIT = 256;

struct Head {
    u64 number;
    u32 lane;
    u32 nbytes;
};

// As another process would look: whatever the tap writes is a fault.
std::shared_ptr<Segment> look_at(const std::shared_ptr<Segment>& segment) {
    if (WATCHES_THREADS) return segment;  // which sees addresses, so all share one mapping
    int fd = ::fcntl(segment->fd(), F_DUPFD_CLOEXEC, 0);
    REQUIRE(fd >= 0, "dup: %s", std::strerror(errno));
    return Segment::adopt(fd, false, true);
}

struct Play {
    std::shared_ptr<Segment> segment =
        create(channel_shape(ChannelStyle::ring, 1, 1, LANE_NBYTES, INLINE_LIMIT, 64 << 10, 8), "tap");
    std::shared_ptr<Attachment> by = Attachment::join(segment, "ends");
    Sender sender{by, 0};
    std::shared_ptr<Receiver> receiver = std::make_shared<Receiver>(by, 0);
    Tap tap{look_at(segment), false};
    u64 sent = 0, received = 0;

    bool try_send(u64 nbytes) {
        std::vector<u8> bytes(nbytes);
        fill(bytes.data(), nbytes, sent);
        Part part{bytes.data(), nbytes};
        if (!sender.try_send(&part, 1, nbytes)) return false;
        ++sent;
        return true;
    }
    void send(u64 nbytes, u64 many = 1) {
        for (; many > 0; --many) REQUIRE(try_send(nbytes), "no room for record %" PRIu64, sent);
    }
    void receive(u64 many = 1) {
        for (; many > 0; --many, ++received) {
            FoundRecord record;
            REQUIRE(receiver->try_find(record), "no record %" PRIu64, received);
            receiver->accept(record);
        }
    }
    // Everything there is, each of it whole; how many. (What was found and then lost is not counted.)
    u64 look() {
        u64 many = 0;
        std::vector<u8> bytes;
        for (TappedRecord record; tap.find(record);) {
            bytes.resize(record.nbytes + 1);
            if (!tap.copy(record, bytes.data())) continue;
            REQUIRE(is_filled(bytes.data(), record.nbytes, record.sequence), "record %" PRIu64 " is torn",
                    record.sequence);
            ++many;
        }
        return many;
    }
};

void what_a_receiver_has_still_to_read_is_not_missed() {
    Play play;
    while (play.try_send(100)) {}  // full to the brim: the next one would go where the first one lies
    REQUIRE(play.look() == play.sent && play.tap.missed() == 0, "%" PRIu64 " missed", play.tap.missed());
}

// After so many records have been seen, the sender begins to write one at the beginning of the next lap.
void what_the_sender_writes_over_before_it_moves_committed_is_missed(u64 seen_before, bool is_found_before) {
    constexpr u64 RECORDS = 63;  // of 64 bytes each: the place that is left is too short, and skipped
    Play play;
    TappedRecord record;
    u8 bytes[INLINE_LIMIT];
    play.send(8, seen_before);
    REQUIRE(play.look() == seen_before, "not all of them");
    play.send(8, RECORDS - seen_before);
    play.receive(RECORDS);
    if (is_found_before) REQUIRE(play.tap.find(record) && record.sequence == seen_before, "not the next one");
    Reservation* room = play.sender.try_reserve(INLINE_LIMIT);
    REQUIRE(room != nullptr, "no room");
    std::memset(room->at, 0x5a, INLINE_LIMIT);  // behind the header, which comes last; and committed is where it was
    u64 lost = seen_before * 64 < sizeof(Record) + INLINE_LIMIT ? RECORDS - seen_before : 0;
    if (is_found_before) REQUIRE(play.tap.copy(record, bytes) == (lost == 0), "%" PRIu64 " seen before", seen_before);
    u64 rest = RECORDS - seen_before - (is_found_before && lost == 0 ? 1 : 0);
    REQUIRE(play.look() == rest - lost && play.tap.missed() == lost, "%" PRIu64 " missed", play.tap.missed());
    play.sender.abort();
    play.send(8);
    REQUIRE(play.look() == 1 && play.tap.missed() == lost, "%" PRIu64 " missed", play.tap.missed());
}

void what_may_be_written_over_at_any_moment_is_missed_and_not_waited_for() {
    Play play;
    play.send(8, 63);
    play.receive(63);
    TappedRecord record;
    u8 bytes[INLINE_LIMIT];
    REQUIRE(play.tap.find(record) && !play.tap.copy(record, bytes), "it may be written over while we look");
    REQUIRE(!play.tap.find(record) && play.tap.missed() == 63, "%" PRIu64 " missed", play.tap.missed());
}

void a_tap_that_was_lapped_goes_on_where_a_receiver_is() {
    Play play;
    for (int lap = 0; lap < 5; ++lap) {
        play.send(100, 20);
        play.receive(lap == 4 ? 10 : 20);
    }
    REQUIRE(play.look() == 10 && play.tap.missed() == 90, "%" PRIu64 " missed", play.tap.missed());
}

void a_long_record_is_seen_until_its_last_receiver_has_it() {
    Play play;
    play.send(1000);
    play.send(2000);
    TappedRecord record;
    std::vector<u8> bytes(2000);
    REQUIRE(play.tap.find(record) && record.is_spilled && !record.is_gone && record.nbytes == 1000, "not the first");
    REQUIRE(play.tap.copy(record, bytes.data()) && is_filled(bytes.data(), 1000, 0), "not as it was sent");
    REQUIRE(play.tap.find(record) && !record.is_gone && record.nbytes == 2000, "not the second");
    play.receive(2);
    REQUIRE(!play.tap.copy(record, bytes.data()), "of a block that was given back");
    play.send(2000);  // into the same memory
    play.receive();
    play.send(8);
    REQUIRE(play.tap.find(record) && record.is_spilled && record.is_gone && record.sequence == 2, "it is there still");
    REQUIRE(!play.tap.copy(record, nullptr) && play.look() == 1 && play.tap.missed() == 0,
            "it stopped at what is gone");
}

void the_block_of_another_record_is_not_taken_for_the_one_before_it() {
    Play play;
    TappedRecord record;
    std::vector<u8> bytes(1000);
    play.send(1000);
    REQUIRE(play.tap.find(record) && !record.is_gone, "not there");
    play.receive();
    for (int i = 0; i < 8; ++i) {  // until the same block is live again, in the same place
        play.send(1000);
        if (i < 7) play.receive();
    }
    REQUIRE(static_cast<BlockState>(Pool(*play.by).block(record.ref.block).state.load(RELAXED)) == BlockState::live,
            "not live");
    REQUIRE(!play.tap.copy(record, bytes.data()), "bytes of record 8 as those of record 0");
}

// ── at full speed ──
struct Plan {
    const char* name;
    ChannelStyle style;
    u32 lanes, receivers;
    u64 lane_nbytes, inline_limit;
    u64 records;  // per lane
    u64 start;    // position of the first record
    u32 spill_one_in;
};

void dawdle(Random& random) {
    if (random.one_in(3)) ::sched_yield();
    for (u64 many = random.below(300); many > 0; --many) pause_cpu();
}

u64 size_of(const Plan& plan, u32 lane, u64 number) {
    Random random(number * 64 + lane);
    if (plan.spill_one_in != 0 && random.one_in(plan.spill_one_in))
        return plan.inline_limit + random.below(4 * plan.inline_limit);
    return random.below(random.one_in(4) ? plan.inline_limit - sizeof(Head) + 1 : 128);
}

struct Counts {
    u64 whole = 0, gone = 0, missed = 0;
};

// Reads until it has seen, or missed, everything.
Counts tap_all(Tap& tap, const Plan& plan, u64 seed, u32 rest_one_in) {
    Counts counts;
    Random random(seed);
    std::vector<u8> bytes(6 * plan.inline_limit);
    std::vector<u64> next(plan.lanes, 0);
    u64 total = plan.records * plan.lanes;
    for (u64 deadline = now_ns() + WATCHDOG_NS; counts.whole + counts.gone + tap.missed() != total;) {
        REQUIRE(now_ns() < deadline, "%s: %" PRIu64 " whole, %" PRIu64 " gone and %" PRIu64 " missed are not %" PRIu64,
                plan.name, counts.whole, counts.gone, tap.missed(), total);
        TappedRecord record;
        if (!tap.find(record)) {
            ::sched_yield();
            continue;
        }
        if (random.one_in(rest_one_in)) dawdle(random);  // what was found may be overwritten
        REQUIRE(record.nbytes <= bytes.size(), "%s: a record of %" PRIu64 " bytes", plan.name, record.nbytes);
        bool is_whole = tap.copy(record, bytes.data());
        if (!is_whole && !record.is_spilled) continue;
        REQUIRE(record.sequence >= next[record.lane], "%s: record %" PRIu64 " of lane %u where %" PRIu64 " was due",
                plan.name, record.sequence, record.lane, next[record.lane]);
        next[record.lane] = record.sequence + 1;
        ++(is_whole ? counts.whole : counts.gone);
        if (!is_whole) continue;
        Head head;
        std::memcpy(&head, bytes.data(), sizeof head);
        REQUIRE(head.number == record.sequence && head.lane == record.lane &&
                    record.nbytes == sizeof head + head.nbytes && head.nbytes == size_of(plan, head.lane, head.number),
                "%s: record %" PRIu64 " of lane %u is torn: it says number %" PRIu64 ", lane %u, %u bytes", plan.name,
                record.sequence, record.lane, head.number, head.lane, head.nbytes);
        REQUIRE(is_filled(bytes.data() + sizeof head, head.nbytes, head.number * 64 + head.lane),
                "%s: record %" PRIu64 " of lane %u is torn", plan.name, head.number, head.lane);
    }
    counts.missed = tap.missed();
    return counts;
}

void play(const Plan& plan, u64 seed) {
    auto segment = create(channel_shape(plan.style, plan.lanes, plan.receivers, plan.lane_nbytes, plan.inline_limit,
                                        64 * plan.inline_limit, 64),
                          plan.name);
    const Geometry& g = segment->geometry();
    for (u32 i = 0; i < plan.lanes; ++i) {
        segment->at<Lane>(g.lanes)[i].committed.store(plan.start, RELAXED);
        for (u32 r = 0; r < plan.receivers; ++r)
            segment->at<Cursor>(g.cursors)[i * plan.receivers + r].released.store(plan.start, RELAXED);
    }
    auto own = [&] { return WATCHES_THREADS ? segment : map_again(*segment); };
    constexpr u32 RESTS[] = {1u << 30, 64, 2};  // one that keeps up if it can, and two that do not
    std::vector<std::unique_ptr<Tap>> taps;     // from before the first record on
    for (size_t t = 0; t < std::size(RESTS); ++t) taps.push_back(std::make_unique<Tap>(look_at(segment), t % 2 == 0));
    std::vector<Counts> counts(taps.size());
    std::vector<std::thread> threads;
    for (size_t t = 0; t < taps.size(); ++t)
        threads.emplace_back([&, t] { counts[t] = tap_all(*taps[t], plan, seed + t, RESTS[t]); });
    for (u32 r = 0; r < plan.receivers; ++r)
        threads.emplace_back([&, r] {
            auto receiver = std::make_shared<Receiver>(Attachment::join(own(), "receiver"), static_cast<int>(r));
            Random random(seed ^ r);
            u32 pause_one_in = static_cast<u32>(std::min<u64>(5000, plan.records * plan.lanes / 32));
            for (u64 left = plan.records * plan.lanes; left > 0; --left) {
                FoundRecord record;
                while (!receiver->try_find(record))
                    REQUIRE(receiver->wait(now_ns() + WATCHDOG_NS) != Woken::deadline, "%s: stuck", plan.name);
                receiver->accept(record);
                if (random.one_in(pause_one_in))
                    ::usleep(1000);  // now and then the ring is full, and the taps catch up
            }
        });
    for (u32 i = 0; i < plan.lanes; ++i)
        threads.emplace_back([&, i] {
            Sender sender(Attachment::join(own(), "sender"), static_cast<int>(i));
            std::vector<u8> bytes(6 * plan.inline_limit);
            for (u64 number = 0; number < plan.records; ++number) {
                Head head{number, i, static_cast<u32>(size_of(plan, i, number))};
                fill(bytes.data(), head.nbytes, number * 64 + i);
                Part parts[] = {{&head, sizeof head}, {bytes.data(), head.nbytes}};
                while (!sender.try_send(parts, 2, sizeof head + head.nbytes))
                    REQUIRE(sender.wait(now_ns() + WATCHDOG_NS) != Woken::deadline, "%s: stuck", plan.name);
            }
        });
    for (auto& thread : threads) thread.join();
    Counts sum;
    for (const Counts& part : counts) sum.whole += part.whole, sum.gone += part.gone, sum.missed += part.missed;
    std::printf("%-24s %8" PRIu64 " records, %zu taps: %" PRIu64 " whole, %" PRIu64 " gone, %" PRIu64 " missed\n",
                plan.name, plan.records * plan.lanes, taps.size(), sum.whole, sum.gone, sum.missed);
    std::fflush(stdout);
    REQUIRE(sum.whole != 0, "%s: nothing was seen", plan.name);
}

}  // namespace

int main(int argc, char** argv) {
    Arguments arguments(argc, argv);
    what_a_receiver_has_still_to_read_is_not_missed();
    for (u64 seen_before = 0; seen_before < 8; ++seen_before)
        for (bool is_found_before : {false, true})
            what_the_sender_writes_over_before_it_moves_committed_is_missed(seen_before, is_found_before);
    what_may_be_written_over_at_any_moment_is_missed_and_not_waited_for();
    a_tap_that_was_lapped_goes_on_where_a_receiver_is();
    a_long_record_is_seen_until_its_last_receiver_has_it();
    the_block_of_another_record_is_not_taken_for_the_one_before_it();
    u64 unit = (arguments.is_quick ? 2'000 : 60'000) * arguments.scale;
    constexpr u64 K = 1024;
    const Plan plans[] = {
        {"ring", ChannelStyle::ring, 1, 1, 64 * K, 4 * K, 10 * unit, 0, 200},
        {"ring, tiny", ChannelStyle::ring, 1, 1, 4 * K, 256, 10 * unit, 0, 50},
        {"ring, records of a quarter", ChannelStyle::ring, 1, 1, 4 * K, 1 * K, 10 * unit, 0, 0},
        {"ring, across 2^63", ChannelStyle::ring, 1, 1, 16 * K, 2 * K, 5 * unit, (1ull << 63) - 64 * K, 100},
        {"ring, everything spilled", ChannelStyle::ring, 1, 1, 4 * K, 64, 2 * unit, 0, 1},
        {"broadcast to 4", ChannelStyle::broadcast, 1, 4, 16 * K, 1 * K, 4 * unit, 0, 100},
        {"inbox from 4", ChannelStyle::inbox, 4, 1, 16 * K, 1 * K, 2 * unit, 0, 100},
    };
    for (const Plan& plan : plans) play(plan, arguments.seed);
    return 0;
}
