// stress.cpp: records of random sizes, through rings, broadcasts and inboxes, with threads or processes at the ends.
// Every record says which lane it is of, which one it is and how long, and carries bytes that follow from that. Ends
// have an Attachment and mappings of their own each, as processes have. Some channels begin just before position 2^32
// or 2^63, so that every number on the way is seen to cross it.
//
//   stress                       about 2*10^7 records
//   stress --quick               about 2*10^5
//   stress --scale 50            10^9
//   stress --threads             threads only (what ThreadSanitizer can watch)
//
// ThreadSanitizer sees addresses: a write through the write mapping and a read through the read mapping are two places
// to it, so it does not see a record's bytes race. It sees the control region, which a process maps once: here all
// threads share one mapping of it under ThreadSanitizer, and have one each otherwise. Bytes are watched by checksums.
#include "testing.h"

using namespace testing;

namespace {

constexpr u64 WATCHDOG_NS = 60'000'000'000;

struct Head {
    u64 number;
    u32 lane;
    u32 nbytes;
};

struct Plan {
    const char* name;
    ChannelStyle style;
    u32 lanes, receivers;
    u64 lane_nbytes, inline_limit;
    u64 records;  // per lane
    u64 start;    // position of the first record
    u32 spill_one_in;
};

u64 size_of(const Plan& plan, u32 lane, u64 number) {
    Random random(number * 64 + lane);
    if (plan.spill_one_in != 0 && random.one_in(plan.spill_one_in))
        return plan.inline_limit + random.below(4 * plan.inline_limit);
    if (random.one_in(4)) return random.below(plan.inline_limit - sizeof(Head) + 1);
    return random.below(128);
}

void send_all(const std::shared_ptr<Segment>& segment, const Plan& plan, u32 lane) {
    Sender sender(Attachment::join(segment, "sender"), static_cast<int>(lane));
    std::vector<u8> bytes(6 * plan.inline_limit);
    for (u64 number = 0; number < plan.records; ++number) {
        Head head{number, lane, static_cast<u32>(size_of(plan, lane, number))};
        fill(bytes.data(), head.nbytes, number * 64 + lane);
        Part parts[] = {{&head, sizeof head}, {bytes.data(), head.nbytes}};
        u64 deadline = now_ns() + WATCHDOG_NS;
        while (!sender.try_send(parts, 2, sizeof head + head.nbytes))
            REQUIRE(sender.wait(deadline) != Woken::deadline, "%s: %s", plan.name, sender.timeout(WATCHDOG_NS).what());
    }
}

void receive_all(const std::shared_ptr<Segment>& segment, const Plan& plan, u32 index) {
    auto receiver = std::make_shared<Receiver>(Attachment::join(segment, "receiver"), static_cast<int>(index));
    Pool& pool = receiver->channel().pool;
    std::vector<u64> next(plan.lanes, 0);
    struct Held {
        FoundRecord record;
        u64 id, key;
        Head head;
    };
    std::deque<Held> held;
    Random random(index);
    auto check = [&](const FoundRecord& record, const Head& head) {
        REQUIRE(is_filled(record.at + sizeof head, head.nbytes, head.number * 64 + head.lane),
                "%s: record %" PRIu64 " of lane %u is torn", plan.name, head.number, head.lane);
    };
    auto let_go = [&] {
        check(held.front().record, held.front().head);  // still what it was
        if (held.front().record.is_spilled)
            pool.release(held.front().record.extent.block, held.front().record.extent.generation);
        else
            receiver->release_record(held.front().record.lane, held.front().id);
        held.pop_front();
    };
    for (u64 total = plan.records * plan.lanes; total > 0; --total) {
        FoundRecord record;
        u64 deadline = now_ns() + WATCHDOG_NS;
        while (!receiver->try_find(record)) {
            if (!held.empty())
                let_go();  // the sender may wait for the very room that we hold
            else
                REQUIRE(receiver->wait(deadline) != Woken::deadline, "%s: %s", plan.name,
                        receiver->timeout(WATCHDOG_NS).what());
        }
        Head head;
        REQUIRE(record.nbytes >= sizeof head, "%s: a record of %" PRIu64 " bytes", plan.name, record.nbytes);
        std::memcpy(&head, record.at, sizeof head);
        REQUIRE(head.lane == record.lane && head.lane < plan.lanes, "%s: lane %u, found in %u", plan.name, head.lane,
                record.lane);
        REQUIRE(head.number == next[head.lane] && record.sequence == head.number,
                "%s: record %" PRIu64 " (sequence %" PRIu64 ") of lane %u where %" PRIu64 " was due", plan.name,
                head.number, record.sequence, head.lane, next[head.lane]);
        REQUIRE(record.nbytes == sizeof head + head.nbytes && head.nbytes == size_of(plan, head.lane, head.number),
                "%s: %" PRIu64 " bytes, said to be %u", plan.name, record.nbytes, head.nbytes);
        ++next[head.lane];
        check(record, head);
        if (random.one_in(16)) {
            held.push_back({record, receiver->lease(record), 0, head});
        } else {
            receiver->accept(record);
        }
        while (held.size() > 4 || (!held.empty() && random.one_in(4))) let_go();
    }
    while (!held.empty()) let_go();
    FoundRecord record;
    for (u64 deadline = now_ns() + WATCHDOG_NS;;) {  // and then the end, in peace
        try {
            REQUIRE(!receiver->try_find(record), "%s: one record too many", plan.name);
            REQUIRE(receiver->wait(deadline) != Woken::deadline, "%s: no end", plan.name);
        } catch (const Error& error) {
            REQUIRE(error.fault == Fault::end_of_channel, "%s: %s", plan.name, error.what());
            return;
        }
    }
}

void play(const Plan& plan, bool is_threads) {
    u64 began = now_ns();
    auto segment = create(channel_shape(plan.style, plan.lanes, plan.receivers, plan.lane_nbytes, plan.inline_limit,
                                        64 * plan.inline_limit, 64),
                          plan.name);
    const Geometry& g = segment->geometry();
    for (u32 i = 0; i < plan.lanes; ++i) {
        segment->at<Lane>(g.lanes)[i].committed.store(plan.start, RELAXED);
        for (u32 r = 0; r < plan.receivers; ++r)
            segment->at<Cursor>(g.cursors)[i * plan.receivers + r].released.store(plan.start, RELAXED);
    }
    std::vector<std::function<void(const std::shared_ptr<Segment>&)>> ends;
    for (u32 r = 0; r < plan.receivers; ++r) ends.push_back([&, r](auto& own) { receive_all(own, plan, r); });
    for (u32 i = 0; i < plan.lanes; ++i) ends.push_back([&, i](auto& own) { send_all(own, plan, i); });
    if (is_threads) {
        std::vector<std::thread> threads;
        for (auto& end : ends) threads.emplace_back([&] { end(WATCHES_THREADS ? segment : map_again(*segment)); });
        for (auto& thread : threads) thread.join();
    } else {
        std::vector<pid_t> children;
        for (auto& end : ends) {
            children.push_back(::fork());
            if (children.back() != 0) continue;
            ::prctl(PR_SET_PDEATHSIG, SIGKILL);
            end(map_again(*segment));
            ::_exit(0);
        }
        bool is_good = true;
        for (pid_t child : children) {
            int status = 0;
            ::waitpid(child, &status, 0);
            is_good = is_good && WIFEXITED(status) && WEXITSTATUS(status) == 0;
        }
        REQUIRE(is_good, "%s: a process ended badly", plan.name);
    }
    auto by = Attachment::join(segment, "look");
    PoolStats stats = Pool(*by).stats();
    REQUIRE(stats.blocks == 0 && stats.holders.empty(), "%s: %" PRIu64 " blocks left", plan.name, stats.blocks);
    std::printf("%-28s %s %10" PRIu64 " records in %6.2f s\n", plan.name, is_threads ? "threads  " : "processes",
                plan.records * plan.lanes * plan.receivers, static_cast<double>(now_ns() - began) / 1e9);
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    Arguments arguments(argc, argv);
    bool is_threads_only = WATCHES_THREADS || !knows_others_start();
    for (const auto& word : arguments.rest) is_threads_only = is_threads_only || word == "--threads";
    u64 unit = (arguments.is_quick ? 1'000 : 100'000) * arguments.scale;
    constexpr u64 K = 1024;
    const Plan plans[] = {
        {"ring", ChannelStyle::ring, 1, 1, 64 * K, 4 * K, 30 * unit, 0, 200},
        {"ring, tiny", ChannelStyle::ring, 1, 1, 4 * K, 256, 20 * unit, 0, 50},
        {"ring, across 2^32", ChannelStyle::ring, 1, 1, 16 * K, 2 * K, 10 * unit, (1ull << 32) - 64 * K, 100},
        {"ring, across 2^63", ChannelStyle::ring, 1, 1, 16 * K, 2 * K, 10 * unit, (1ull << 63) - 64 * K, 100},
        {"ring, everything spilled", ChannelStyle::ring, 1, 1, 4 * K, 64, 3 * unit, 0, 1},
        {"broadcast to 4", ChannelStyle::broadcast, 1, 4, 64 * K, 4 * K, 8 * unit, 0, 200},
        {"broadcast, across 2^63", ChannelStyle::broadcast, 1, 4, 16 * K, 1 * K, 3 * unit, (1ull << 63) - 64 * K, 50},
        {"broadcast to 8", ChannelStyle::broadcast, 1, 8, 64 * K, 4 * K, 2 * unit, 0, 0},
        {"inbox from 4", ChannelStyle::inbox, 4, 1, 64 * K, 4 * K, 6 * unit, 0, 200},
        {"inbox, across 2^32", ChannelStyle::inbox, 4, 1, 16 * K, 1 * K, 3 * unit, (1ull << 32) - 64 * K, 50},
    };
    for (const Plan& plan : plans) {
        if (!is_threads_only) play(plan, false);
        Plan less = plan;
        if (!is_threads_only) less.records /= 4;
        play(less, true);
    }
    return 0;
}
