// block_ledger.cpp: a core and a worker are killed at random moments, with two steps in flight. In the ledger that they
// leave, each valid block has the content of its hash. The next life adopts the blocks and goes on.
//
//   block_ledger                100,000 kills
//   block_ledger --quick        500
#include "block_ledger.h"

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include "block_cache.h"
#include "tests/testing.h"

using namespace testing;
using namespace penstock::engine;

namespace {

constexpr u32 BLOCKS = 8, WORDS = 32, PER_STEP = 3, IN_FLIGHT = 2;

struct Sent {
    i32 blocks[PER_STEP];
    u64 content;  // of the step's first block; the next ones count up
};
struct Survivors {
    Atomic<u64> sent, done;  // steps of this life
    Sent steps[IN_FLIGHT];
    LedgerEntry entries[BLOCKS];
    u64 pages[BLOCKS][WORDS];
};

BlockHash hash_of(u64 content) {
    BlockHash hash{};
    std::memcpy(hash.data(), &content, sizeof content);
    return hash;
}

[[noreturn]] void run_worker(Survivors& shared) {
    for (u64 step = 0;; ++step) {
        while (shared.sent.load(order::publish.acquire) <= step) sched_yield();
        const Sent& sent = shared.steps[step % IN_FLIGHT];
        for (u32 i = 0; i < PER_STEP; ++i)
            for (u64& word : shared.pages[sent.blocks[i]]) *const_cast<volatile u64*>(&word) = sent.content + i;
        shared.done.store(step + 1, order::publish.release);
    }
}

[[noreturn]] void run_core(Survivors& shared, u64 content, u64 seed) {
    Random random(seed);
    BlockCache cache(BLOCKS, BlockLedger(shared.entries, BLOCKS));
    for (u64 sent = 0, done = 0;;) {
        while (sent - done < IN_FLIGHT) {
            Sent& step = shared.steps[sent % IN_FLIGHT];
            if (!cache.take(PER_STEP, step.blocks)) _exit(3);
            step.content = content;
            content += PER_STEP;
            shared.sent.store(++sent, order::publish.release);
        }
        while (shared.done.load(order::publish.acquire) <= done) sched_yield();
        const Sent step = shared.steps[done++ % IN_FLIGHT];
        for (u32 i = 0; i < PER_STEP; ++i) {
            auto block = static_cast<u32>(step.blocks[i]);
            if (!random.one_in(8)) cache.publish(block, hash_of(step.content + i));
            cache.release(block);
        }
    }
}

template <class Run>
pid_t start(Run&& run) {
    pid_t pid = fork();
    REQUIRE(pid >= 0, "fork: %d", errno);
    if (pid != 0) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    run();
    _exit(4);
}
void require_killed(pid_t pid) {
    int status = 0;
    REQUIRE(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "status %d", status);
}

}  // namespace

int main(int argc, char** argv) {
    Arguments arguments(argc, argv);
    const u64 kills = arguments.is_quick ? 500 : 100'000 * arguments.scale;
    void* at = mmap(nullptr, sizeof(Survivors), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(at != MAP_FAILED, "mmap: %d", errno);
    Survivors& shared = *static_cast<Survivors*>(at);
    Random random(arguments.seed);
    u64 valid = 0, steps = 0;
    for (u64 life = 1; life <= kills; ++life) {
        shared.sent.store(0, RELAXED);
        shared.done.store(0, RELAXED);
        pid_t victims[] = {start([&] { run_core(shared, life << 32, arguments.seed + life); }),
                           start([&] { run_worker(shared); })};
        // Most lives have a step before the kill, however slow the machine is: under emulation a start takes
        // milliseconds.
        while (!random.one_in(1 << 14) && shared.done.load(RELAXED) == 0) sched_yield();
        usleep(static_cast<useconds_t>(random.below(300)));
        u64 first = random.below(2);  // the other one goes on for a while
        kill(victims[first], SIGKILL);
        if (random.one_in(2)) usleep(static_cast<useconds_t>(random.below(50)));
        kill(victims[1 - first], SIGKILL);
        for (pid_t victim : victims) require_killed(victim);
        steps += shared.done.load(RELAXED);
        BlockLedger ledger(shared.entries, BLOCKS);
        const std::string damage = ledger.find_damage();
        REQUIRE(damage.empty(), "seed %" PRIu64 ", life %" PRIu64 ": %s", arguments.seed, life, damage.c_str());
        for (u32 block = 0; block < BLOCKS; ++block) {
            if (!ledger.is_valid(block)) continue;
            ++valid;
            for (u64 word : shared.pages[block])
                REQUIRE(hash_of(word) == ledger.hash(block), "seed %" PRIu64 ", life %" PRIu64 ": block %u is wrong",
                        arguments.seed, life, block);
        }
    }
    REQUIRE(valid > kills / 2 && steps > kills / 2, "%" PRIu64 " blocks, %" PRIu64 " steps", valid, steps);
    std::printf("%" PRIu64 " kills, %" PRIu64 " steps, %" PRIu64 " valid blocks, 0 wrong\n", kills, steps, valid);
    return 0;
}
