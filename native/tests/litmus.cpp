// litmus.cpp: the races that the protocol is about, each as a table: outcome | allowed or forbidden | why. A race is
// run many times with delays at random places; every outcome is counted; a forbidden one is a failure.
#include <array>

#include "testing.h"

using namespace testing;

namespace {

constexpr u64 WATCHDOG_NS = 30'000'000'000;

struct Outcome {
    const char* name;
    bool is_allowed;
    const char* why;
    std::atomic<u64> count{0};
};

template <size_t N>
void report(const char* race, std::array<Outcome, N>& outcomes) {
    std::printf("%s\n", race);
    bool is_good = true;
    for (Outcome& outcome : outcomes) {
        bool is_bad = !outcome.is_allowed && outcome.count.load() != 0;
        std::printf("  %-34s %-9s %10" PRIu64 "  %s%s\n", outcome.name, outcome.is_allowed ? "allowed" : "forbidden",
                    outcome.count.load(), outcome.why, is_bad ? "   <== HAPPENED" : "");
        is_good = is_good && !is_bad;
    }
    std::fflush(stdout);
    REQUIRE(is_good, "a forbidden outcome of: %s", race);
}

void dawdle(Random& random) {
    if (random.one_in(3)) ::sched_yield();
    for (u64 many = random.below(200); many > 0; --many) pause_cpu();
}

// order::publish: one sender, R receivers; a record is its number, repeated, and a sum.
void publish(u32 receivers, u64 records) {
    enum { whole, torn, stale, again, skipped };
    std::array<Outcome, 5> outcomes{{{"whole, and the next", true, "committed after it was written"},
                                     {"torn", false, "acquire of committed sees all that was written before"},
                                     {"stale (of an earlier lap)", false, "room is given after the record was read"},
                                     {"one again", false, "a position is passed once"},
                                     {"one skipped", false, "a position is passed by its record's length"}}};
    auto segment = create(channel_shape(receivers == 1 ? ChannelStyle::ring : ChannelStyle::broadcast, 1, receivers,
                                        4096, 512, 64 << 10, 8),
                          "publish");
    std::vector<std::thread> threads;
    for (u32 r = 0; r < receivers; ++r)
        threads.emplace_back([&, r] {
            auto own = WATCHES_THREADS ? segment : map_again(*segment);
            auto receiver = std::make_shared<Receiver>(Attachment::join(own, "receiver"), static_cast<int>(r));
            u64 words[64];
            for (u64 next = 0; next < records;) {
                FoundRecord record;
                while (!receiver->try_find(record))
                    REQUIRE(receiver->wait(now_ns() + WATCHDOG_NS) != Woken::deadline, "stuck at %" PRIu64, next);
                std::memcpy(words, record.at, record.nbytes);
                receiver->accept(record);
                bool is_whole = record.nbytes == 8 * (2 + words[0] % 60);
                u64 sum = 0;
                for (u64 i = 0; is_whole && i + 1 < record.nbytes / 8; ++i)
                    sum += words[i], is_whole = words[i] == words[0];
                is_whole = is_whole && words[record.nbytes / 8 - 1] == ~sum;
                int what = !is_whole              ? torn
                           : words[0] == next     ? whole
                           : words[0] + 1 == next ? again
                           : words[0] < next      ? stale
                                                  : skipped;
                outcomes[static_cast<size_t>(what)].count.fetch_add(1, RELAXED);
                next = words[0] + 1;
            }
        });
    {
        auto own = WATCHES_THREADS ? segment : map_again(*segment);
        Sender sender(Attachment::join(own, "sender"), 0);
        u64 words[64];
        for (u64 number = 0; number < records; ++number) {
            u64 many = 1 + number % 60, sum = 0;
            for (u64 i = 0; i < many; ++i) sum += words[i] = number;
            words[many] = ~sum;
            Part part{words, 8 * (many + 1)};
            while (!sender.try_send(&part, 1, part.nbytes))
                REQUIRE(sender.wait(now_ns() + WATCHDOG_NS) != Woken::deadline, "stuck at %" PRIu64, number);
        }
        for (auto& thread : threads) thread.join();
    }
    report(format("publish, 1 sender and %u receivers", receivers).c_str(), outcomes);
}

// order::bell: the waiter sets its bit in `parked`, looks for a record again, and sleeps; the ringer publishes a
// record, then reads `parked`. A lost wake-up would end with the waiter's own look-up, LOOK_UP_NS later, which wait()
// reports as an interruption.
void bell(u64 rounds, u64 seed) {
    enum { spun, woken, late, slept_on };
    std::array<Outcome, 4> outcomes{{{"seen without sleeping", true, "the second look, or the spin, saw it"},
                                     {"woken", true, "the ringer saw the bit"},
                                     {"looked up before it was published", true, "the ringer was late, not the bell"},
                                     {"slept on what was published", false, "one of both sees the other's store"}}};
    auto segment = create(channel_shape(ChannelStyle::ring, 1, 1, 4096, 512, 64 << 10, 8), "bell");
    Bell& bell = segment->at<ChannelHeader>(segment->geometry().channel)->bell;
    Shared<u64> published{0}, published_ns{0}, turn{0};
    std::thread waiter([&] {
        Spinner spinner(Latency::eco);
        Waits waits{};
        Random random(seed);
        for (u64 round = 1; round <= rounds; ++round) {
            turn.store(round, std::memory_order_release);
            dawdle(random);
            for (;;) {
                u64 parks = waits.parks.value();
                Woken why = wait(bell, 1, now_ns() + WATCHDOG_NS, spinner, waits, nullptr,
                                 [&] { return published.load(std::memory_order_acquire) == round; });
                REQUIRE(why != Woken::deadline, "stuck in round %" PRIu64, round);
                if (why == Woken::ready) {
                    ++outcomes[waits.parks.value() == parks ? spun : woken].count;
                    break;
                }
                bool is_out = published.load(std::memory_order_acquire) == round;
                bool is_long = is_out && now_ns() - published_ns.load(RELAXED) > LOOK_UP_NS / 2;
                ++outcomes[is_long ? slept_on : late].count;
            }
        }
    });
    Random random(seed + 1);
    for (u64 round = 1; round <= rounds; ++round) {
        while (turn.load(std::memory_order_acquire) != round) ::sched_yield();
        dawdle(random);
        if (random.one_in(8)) ::usleep(static_cast<useconds_t>(random.below(200)));
        published_ns.store(now_ns(), RELAXED);
        published.store(round, std::memory_order_release);
        ring(bell);
    }
    waiter.join();
    report("bell, a waiter and a ringer", outcomes);
}

// order::ready: in an inbox the bit of a lane is set after its record is committed, and cleared before the last look.
void ready(u32 lanes, u64 records) {
    enum { noticed, overlooked };
    std::array<Outcome, 2> outcomes{{{"found", true, "the bit was set, or the last look saw it"},
                                     {"committed, and not looked for", false, "cleared first, looked at after"}}};
    auto segment = create(channel_shape(ChannelStyle::inbox, lanes, 1, 4096, 512, 64 << 10, 8, lanes + 2), "ready");
    std::vector<std::thread> threads;
    for (u32 i = 0; i < lanes; ++i)
        threads.emplace_back([&, i] {
            auto own = WATCHES_THREADS ? segment : map_again(*segment);
            Sender sender(Attachment::join(own, "sender"), static_cast<int>(i));
            Random random(i);
            for (u64 number = 0; number < records; ++number) {
                Part part{&number, sizeof number};
                while (!sender.try_send(&part, 1, part.nbytes))
                    REQUIRE(sender.wait(now_ns() + WATCHDOG_NS) != Woken::deadline, "stuck at %" PRIu64, number);
                if (random.one_in(4)) dawdle(random);
            }
        });
    auto own = WATCHES_THREADS ? segment : map_again(*segment);
    auto receiver = std::make_shared<Receiver>(Attachment::join(own, "receiver"), 0);
    std::vector<u64> next(lanes, 0);
    for (u64 left = lanes * records; left > 0; --left) {
        FoundRecord record;
        while (!receiver->try_find(record))
            if (receiver->wait(now_ns() + 2'000'000'000) == Woken::deadline) {
                bool is_there = false;
                for (u32 i = 0; i < lanes; ++i)
                    is_there = is_there || receiver->channel().lane(i).sequence.load(RELAXED) > next[i];
                if (is_there) ++outcomes[overlooked].count;
                if (outcomes[overlooked].count > 5) report("ready", outcomes);
            }
        ++next[record.lane];
        receiver->accept(record);
        ++outcomes[noticed].count;
    }
    for (auto& thread : threads) thread.join();
    report(format("ready, %u senders and a receiver", lanes).c_str(), outcomes);
}

// A lock whose holder may die: at most one is inside; who takes it over from the dead is told so, and is the only one.
void robust_lock(u32 lockers, u64 rounds) {
    enum { alone, together, repaired, repaired_twice, never };
    std::array<Outcome, 5> outcomes{
        {{"alone inside", true, "one compare-and-swap from 0, or from a dead holder's word"},
         {"two inside", false, "likewise"},
         {"told of the dead holder", true, "what it protects must be repaired"},
         {"told twice", false, "the word names the new holder at once"},
         {"never told", false, "the word still names the dead one"}}};
    for (u64 round = 0; round < rounds; ++round) {
        auto segment = create(pool_shape(64 << 10, 8), "lock");
        auto first = Attachment::join(segment, "first");
        Shared<u32>& word = Pool(*first).block(0).lock;
        if (WATCHES_THREADS) {  // whose runtime lets no child of a process with threads have threads
            word.store((forge_peer(*first, identity_of_the_dead()) + 1) | 1u << 9, RELAXED);
        } else {
            pid_t child = ::fork();
            if (child == 0) {  // takes the lock and dies with it
                auto by = Attachment::join(segment, "dies");
                by->lock(word, now_ns() + WATCHDOG_NS);
                ::kill(::getpid(), SIGKILL);
            }
            ::waitpid(child, nullptr, 0);
        }
        std::atomic<u32> inside{0}, repairs{0};
        std::vector<std::thread> threads;
        for (u32 i = 0; i < lockers; ++i)
            threads.emplace_back([&, i] {
                auto own = WATCHES_THREADS ? segment : map_again(*segment);
                auto by = Attachment::join(own, "locker");
                Shared<u32>& same = Pool(*by).block(0).lock;
                Random random(round * 64 + i);
                for (int k = 0; k < 200; ++k) {
                    if (by->lock(same, now_ns() + WATCHDOG_NS)) repairs.fetch_add(1);
                    ++outcomes[inside.fetch_add(1) == 0 ? alone : together].count;
                    if (random.one_in(16)) dawdle(random);
                    inside.fetch_sub(1);
                    by->unlock(same);
                }
            });
        for (auto& thread : threads) thread.join();
        // It may have been reaped, which repairs, before anybody asked for the lock.
        bool is_reaped = repairs.load() == 0 && Pool(*first).stats().recoveries != 0;
        ++outcomes[repairs.load() == 1 || is_reaped ? repaired : repairs.load() == 0 ? never : repaired_twice].count;
    }
    report(format("robust lock, %u lockers after a dead holder", lockers).c_str(), outcomes);
}

// A receiver that follows another asks the sender to be counted. One that was asked, and died before it had done it,
// leaves the asking to be seen by the next: else that one sends to nobody, and waits for nobody.
void a_receiver_is_admitted_though_the_sender_it_asked_died(ChannelStyle style) {
    auto segment = create(channel_shape(style, 1, 1, 4096, 512, 64 << 10, 8), "asked");
    Lane& lane = segment->at<Lane>(segment->geometry().lanes)[0];
    auto by = Attachment::join(segment, "receiver");
    std::make_shared<Receiver>(by, 0)->close();
    auto receiver = std::make_shared<Receiver>(by, 0);
    REQUIRE(lane.joining.exchange(0, RELAXED) == 1,
            "it has not asked");  // what admit() does first; then that sender died
    Sender sender(Attachment::join(segment, "next"), 0);
    for (u64 number = 0; number < 3; ++number) {
        Part part{&number, sizeof number};
        REQUIRE(sender.try_send(&part, 1, part.nbytes), "no room");
    }
    for (u64 number = 0; number < 3; ++number) {
        FoundRecord record;
        REQUIRE(receiver->try_find(record), "record %" PRIu64 " was sent to nobody", number);
        REQUIRE(std::memcmp(record.at, &number, sizeof number) == 0, "not record %" PRIu64, number);
        receiver->accept(record);
    }
}

}  // namespace

int main(int argc, char** argv) {
    Arguments arguments(argc, argv);
    u64 unit = (arguments.is_quick ? 1 : 30) * arguments.scale;
    for (ChannelStyle style : {ChannelStyle::ring, ChannelStyle::broadcast, ChannelStyle::inbox})
        a_receiver_is_admitted_though_the_sender_it_asked_died(style);
    robust_lock(4, arguments.is_quick ? 5 : 40 * arguments.scale);  // early: it forks
    for (u32 receivers : {1u, 2u, 8u}) publish(receivers, 20'000 * unit / receivers);
    bell(5'000 * unit, arguments.seed);
    ready(3, 5'000 * unit);
    ready(64, 200 * unit);
    return 0;
}
