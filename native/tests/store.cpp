// store.cpp: many threads of several processes put and get a few keys, at three times what the store has room for, and
// take out and abandon some. Whoever is given a block finds in it what belongs to its key, from the first look to the
// last; no key is there twice; in the end nobody holds anything, and the room is one piece again. Then the same with
// writers that are killed at any moment.
//
//   store                       about 10^6 operations, and 200 deaths
//   store --quick               about 10^5, and 30
#include "testing.h"

using namespace testing;

namespace {

constexpr u64 NBYTES = 1 << 20;
constexpr u32 BLOCKS = 128, PROCESSES = 4, THREADS = 4;
constexpr u64 WATCHDOG_NS = 60'000'000'000;

Shape store_shape(u32 buckets) {
    Shape shape = pool_shape(NBYTES, BLOCKS);
    shape.buckets = buckets;
    if (buckets > 1) shape.granule_nbytes = 16 << 10;  // it claims its pages as it fills
    return shape;
}
Key key_of(u64 name) {
    Key key;
    Random random(name);
    for (u64& word : key.words) word = random.next();
    return key;
}
// 90 keys of 0 to 70 KiB: about 3 MiB, of which 1 MiB has room.
constexpr u64 KEYS = 90;
u64 size_of(u64 name) { return Random(name + 1000).below(Random(name).one_in(4) ? 140 << 10 : 20 << 10); }

struct Tally {  // seen by all processes
    std::atomic<u64> hits{0}, fills{0}, waits{0}, exhaustions{0}, longest_ns{0};
};

void require_content(Attachment& by, const Extent& extent, u64 name) {
    const u8* at = by.segment().read_at(by.segment().geometry().pool_data + extent.offset);
    REQUIRE(extent.nbytes == size_of(name), "key %" PRIu64 ": %" PRIu64 " bytes", name, extent.nbytes);
    REQUIRE(is_filled(at, extent.nbytes, name), "key %" PRIu64 " is torn, or another's", name);
}

// True: out is a lease of what is there by now, written by us or by others. False: there is no room, for all is held.
bool have(Store& store, Attachment& by, u64 name, Extent& out, Tally& tally, Random& random) {
    Spinner spinner(Latency::eco);
    Waits waits{};
    Key key = key_of(name);
    for (u64 deadline = now_ns() + WATCHDOG_NS;;) {
        u32 fills_before = 0;
        Store::Begun begun;
        try {
            begun = store.begin(key, size_of(name), out, fills_before);
        } catch (const Error& error) {
            REQUIRE(error.fault == Fault::memory_exhausted, "%s", error.what());
            ++tally.exhaustions;
            return false;
        }
        if (begun == Store::Begun::hit) {
            ++tally.hits;
            return true;
        }
        if (begun == Store::Begun::fill) {
            ++tally.fills;
            fill(by.segment().write_at(by.segment().geometry().pool_data + out.offset), out.nbytes / 2, name);
            if (random.one_in(8)) ::usleep(100);  // so that others come to wait for it
            if (random.one_in(20)) {
                random.one_in(2) ? store.give_up(out)
                                 : (store.abandon(out), store.pool().release(out.block, out.generation));
                continue;
            }
            fill(by.segment().write_at(by.segment().geometry().pool_data + out.offset), out.nbytes, name);
            store.commit(out);
            return true;
        }
        ++tally.waits;
        REQUIRE(store.wait_for_fill(fills_before, deadline, spinner, waits) != Woken::deadline,
                "key %" PRIu64 " never came", name);
    }
}

// Nobody stands still for this. But what is there in two looks, in the same generation, was there in between too.
void require_single(Store& store) {
    auto once = store.stats().items, again = store.stats().items;
    std::erase_if(once, [&](const auto& item) {
        return std::none_of(again.begin(), again.end(), [&](const auto& other) {
            return other.block == item.block && other.generation == item.generation &&
                   std::memcmp(&other.key, &item.key, sizeof(Key)) == 0;
        });
    });
    for (size_t i = 0; i < once.size(); ++i)
        for (size_t j = 0; j < i; ++j)
            REQUIRE(std::memcmp(&once[i].key, &once[j].key, sizeof(Key)) != 0, "blocks %u and %u have one key",
                    once[i].block, once[j].block);
}

void trade(const std::shared_ptr<Attachment>& by, u64 seed, u64 operations, Tally& tally) {
    Random random(seed);
    Store store(*by);
    std::deque<std::pair<Extent, u64>> held;
    auto let_go = [&] {
        require_content(*by, held.front().first, held.front().second);  // still what it was
        store.pool().release(held.front().first.block, held.front().first.generation);
        held.pop_front();
    };
    for (u64 i = 0; i < operations; ++i) {
        u64 name = std::min(random.below(KEYS), random.below(KEYS)), began = now_ns();  // some are wanted more
        Extent extent;
        bool is_had = false;
        switch (random.below(40)) {
            case 0: {
                Key key = key_of(name);
                store.remove(random.one_in(50) ? nullptr : &key);
                break;
            }
            case 1: require_single(store); break;
            case 2:
            case 3:
            case 4:
            case 5:
            case 6:
            case 7: is_had = store.get(key_of(name), extent); break;
            default: is_had = have(store, *by, name, extent, tally, random);
        }
        u64 took = now_ns() - began, longest = tally.longest_ns.load();
        while (took > longest && !tally.longest_ns.compare_exchange_weak(longest, took)) {}
        if (is_had) {
            require_content(*by, extent, name);
            held.emplace_back(extent, name);
        }
        while (held.size() > 2 || (!held.empty() && random.one_in(2))) let_go();
    }
    while (!held.empty()) let_go();
}

// However a fill ends, the peer that waits for it goes on: no fill that others end would do that for it here.
void each_end_of_a_fill_ends_a_wait() {
    auto segment = create(store_shape(1), "store");
    auto writing = Attachment::join(segment, "writer"), waiting = Attachment::join(map_again(*segment), "waiter");
    Store writer(*writing), waiter(*waiting);
    const std::function<void(const Extent&)> ends[] = {
        [&](const Extent& extent) { writer.commit(extent), writer.pool().release(extent.block, extent.generation); },
        [&](const Extent& extent) { writer.abandon(extent), writer.pool().release(extent.block, extent.generation); },
        [&](const Extent& extent) { writer.give_up(extent); },
        [&](const Extent& extent) { writer.remove(nullptr), writer.pool().release(extent.block, extent.generation); },
    };
    u64 name = 0;
    for (const auto& end : ends) {
        Extent ours, awaited;
        u32 fills_before = 0;
        Key key = key_of(++name);
        REQUIRE(writer.begin(key, 4096, ours, fills_before) == Store::Begun::fill, "key %" PRIu64 " was there", name);
        REQUIRE(waiter.begin(key, 4096, awaited, fills_before) == Store::Begun::wait, "key %" PRIu64 " is free", name);
        Woken woken = Woken::interrupted;
        std::thread wait([&] {
            Spinner spinner(Latency::eco);
            Waits waits{};
            u64 deadline = now_ns() + 5'000'000'000;
            while (woken == Woken::interrupted) woken = waiter.wait_for_fill(fills_before, deadline, spinner, waits);
        });
        end(ours);
        wait.join();
        REQUIRE(woken == Woken::ready, "end %" PRIu64 " of a fill was not announced", name);
    }
}

// No key twice, and everything that is kept can be found.
void require_sound(Attachment& by) {
    REQUIRE(Granules(by.segment()).are_claimed(0, by.segment().geometry().shape.pool_nbytes), "it has never been full");
    Store store(by);
    auto items = store.stats().items;
    for (size_t i = 0; i < items.size(); ++i) {
        REQUIRE(items[i].holders == 0 && !items[i].is_filling, "block %u is held by %u", items[i].block,
                items[i].holders);
        for (size_t j = 0; j < i; ++j)
            REQUIRE(std::memcmp(&items[i].key, &items[j].key, sizeof(Key)) != 0, "blocks %u and %u have one key",
                    items[i].block, items[j].block);
        Extent extent;
        REQUIRE(store.get(items[i].key, extent) && extent.block == items[i].block, "block %u is not found",
                items[i].block);
        store.pool().release(extent.block, extent.generation);
    }
    PoolStats stats = store.pool().stats();
    REQUIRE(stats.blocks == items.size() && stats.holders.empty(), "%" PRIu64 " blocks for %zu keys", stats.blocks,
            items.size());
    store.remove(nullptr);
    Extent whole;
    REQUIRE(store.pool().try_take(NBYTES, whole), "the room is not one piece again");
    store.pool().release(whole.block, whole.generation);
}

void at_three_times_the_capacity(const Arguments& arguments, u64 operations, bool is_threads, u32 buckets) {
    u64 began = now_ns();
    auto segment = create(store_shape(buckets), "store");
    auto* tally = new (::mmap(nullptr, sizeof(Tally), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Tally;
    auto play = [&](u32 process) {
        auto own = WATCHES_THREADS ? segment : map_again(*segment);
        auto by = Attachment::join(own, "trader");
        std::vector<std::thread> threads;
        for (u32 i = 0; i < THREADS; ++i)
            threads.emplace_back([&, i] {
                trade(by, arguments.seed + process * THREADS + i, operations / THREADS / PROCESSES, *tally);
            });
        for (auto& thread : threads) thread.join();
    };
    if (is_threads) {
        std::vector<std::thread> processes;
        for (u32 i = 0; i < PROCESSES; ++i) processes.emplace_back([&, i] { play(i); });
        for (auto& process : processes) process.join();
    } else {
        std::vector<pid_t> children;
        for (u32 i = 0; i < PROCESSES; ++i) {
            children.push_back(::fork());
            if (children.back() != 0) continue;
            ::prctl(PR_SET_PDEATHSIG, SIGKILL);
            play(i);
            ::_exit(0);
        }
        for (pid_t child : children) {
            int status = 0;
            ::waitpid(child, &status, 0);
            REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a process ended badly");
        }
    }
    auto by = Attachment::join(segment, "look");
    StoreStats stats = Store(*by).stats();
    REQUIRE(stats.evictions > 0 && tally->hits > 0 && tally->waits > 0, "too little happened");
    require_sound(*by);
    std::printf("%-10s %3u buckets: %8" PRIu64 " operations in %5.2f s: %" PRIu64 " hits, %" PRIu64 " written, %" PRIu64
                " waits, %" PRIu64 " evicted, %" PRIu64 " without room, longest %.1f ms\n",
                is_threads ? "threads" : "processes", buckets, operations, static_cast<double>(now_ns() - began) / 1e9,
                tally->hits.load(), tally->fills.load(), tally->waits.load(), stats.evictions,
                tally->exhaustions.load(), static_cast<double>(tally->longest_ns.load()) / 1e6);
    std::fflush(stdout);
    ::munmap(tally, sizeof(Tally));
}

// One after the other is killed at any moment, and another comes, while some trade on.
void with_deaths(const Arguments& arguments, u32 deaths) {
    u64 began = now_ns();
    auto segment = create(store_shape(64), "store");
    auto* tally = new (::mmap(nullptr, sizeof(Tally), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Tally;
    Random random(arguments.seed);
    auto begin = [&](u64 seed, u64 operations) {
        pid_t child = ::fork();
        if (child != 0) return child;
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        {
            auto by = Attachment::join(map_again(*segment), "mortal");
            std::thread other([&] { trade(by, seed + 1, operations, *tally); });
            trade(by, seed, operations, *tally);
            other.join();
        }
        ::_exit(0);
    };
    auto must_end_well = [](pid_t child) {
        int status = 0;
        ::waitpid(child, &status, 0);
        REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a survivor ended badly");
    };
    std::vector<pid_t> survivors, mortals;
    for (int i = 0; i < 2; ++i) survivors.push_back(begin(random.next(), 400ull * deaths));
    for (int i = 0; i < 2; ++i) mortals.push_back(begin(random.next(), NEVER));
    for (u32 i = 0; i < deaths; ++i) {
        ::usleep(static_cast<useconds_t>(random.below(20'000)));
        pid_t& victim = mortals[random.below(mortals.size())];
        int status = 0;
        ::kill(victim, SIGKILL);
        ::waitpid(victim, &status, 0);
        REQUIRE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "it had ended badly before");
        victim = begin(random.next(), NEVER);
    }
    for (pid_t victim : mortals) {
        ::kill(victim, SIGKILL);
        ::waitpid(victim, nullptr, 0);
    }
    for (pid_t survivor : survivors) must_end_well(survivor);
    auto by = Attachment::join(segment, "look");  // it buries who is not yet buried
    u64 recoveries = Pool(*by).stats().recoveries, abandoned = Store(*by).stats().abandoned;
    require_sound(*by);
    std::printf("%u deaths in %.2f s: %" PRIu64 " locks taken over, %" PRIu64 " abandoned, longest operation %.1f ms\n",
                deaths, static_cast<double>(now_ns() - began) / 1e9, recoveries, abandoned,
                static_cast<double>(tally->longest_ns.load()) / 1e6);
    std::fflush(stdout);
    ::munmap(tally, sizeof(Tally));
}

}  // namespace

int main(int argc, char** argv) {
    Arguments arguments(argc, argv);
    std::printf("store: seed %" PRIu64 "\n", arguments.seed);
    std::fflush(stdout);
    bool is_threads_only = WATCHES_THREADS || !knows_others_start();
    u64 operations = (arguments.is_quick ? WATCHES_THREADS ? 15'000 : 60'000 : 500'000) * arguments.scale;
    each_end_of_a_fill_ends_a_wait();
    for (u32 buckets : {1u, 256u}) {
        if (!is_threads_only) at_three_times_the_capacity(arguments, operations, false, buckets);
        at_three_times_the_capacity(arguments, is_threads_only ? operations : operations / 4, true, buckets);
    }
    if (!is_threads_only) with_deaths(arguments, arguments.is_quick ? 30 : 200);
    return 0;
}
