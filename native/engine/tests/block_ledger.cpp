// block_ledger.cpp: a core and a worker are killed at random moments, with two steps in flight. In the ledger that they
// leave, each valid block has the content of its hash, and each unfinished block its ids. The next life adopts the
// blocks and goes on.
//
// Then a core is stepped, and this process does the work of the worker: the ledger after each instruction is what a
// SIGKILL there would leave.
//
//   block_ledger                1,000,000 kills, 1,000,000 instructions
//   block_ledger --quick        500 kills, 20,000 instructions
#include "block_ledger.h"

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <unistd.h>

#include <cstdlib>

#include "block_cache.h"
#include "tests/testing.h"

using namespace testing;
using namespace penstock::engine;

namespace {

constexpr u32 WORDS = 32, PER_STEP = 3, IN_FLIGHT = 2, SLOTS = 2, BLOCKS = PER_STEP * IN_FLIGHT + SLOTS;

struct Sent {
    i32 blocks[PER_STEP];
    u64 content;  // of the step's first block; the next ones count up
    // The step appends an id to the tail of a slot.
    i32 tail_block, tail_id;
    u32 tail_at;
};
struct Tail {
    LedgerTail tail;
    i32 ids[WORDS];
};
struct Survivors {
    Atomic<u64> sent, done;  // steps of this life
    Sent steps[IN_FLIGHT];
    LedgerEntry entries[BLOCKS];
    Tail tails[SLOTS];
    u64 pages[BLOCKS][WORDS];
};
BlockLedger ledger_of(const Survivors& shared) {
    return {const_cast<LedgerEntry*>(shared.entries), BLOCKS, SLOTS, WORDS};
}

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
        *const_cast<volatile u64*>(&shared.pages[sent.tail_block][sent.tail_at]) = static_cast<u64>(sent.tail_id);
        shared.done.store(step + 1, order::publish.release);
    }
}

// A slot with a sequence, of which the core knows one block: the tail.
struct Slot {
    i32 block = -1;
    BlockHash parent{};
    i32 ids[WORDS];
    u32 sent = 0;        // ids
    u64 first_step = 0;  // of the sequence
};
u32 slot_of(u64 step) { return static_cast<u32>(step / IN_FLIGHT % SLOTS); }

// Begins with what a former life has left of each slot.
void adopt(Slot (&slots)[SLOTS], BlockCache& cache, const Tail (&tails)[SLOTS]) {
    for (u32 slot = 0; slot < SLOTS; ++slot) {
        u32 block, count = tails[slot].tail.count.load(RELAXED), matched = 0;
        if (count != 0) cache.take_tail(tails[slot].tail.parent, tails[slot].ids, count, block, matched);
        if (matched == 0) continue;
        slots[slot].block = static_cast<i32>(block);
        slots[slot].parent = tails[slot].tail.parent;
        std::copy_n(tails[slot].ids, slots[slot].sent = matched, slots[slot].ids);
    }
}
void append(Slot& slot, Sent& step, u64 number, BlockCache& cache, Random& random) {
    if (slot.block < 0 || slot.sent == WORDS || random.one_in(16)) {  // another sequence, often in the same block
        if (slot.block >= 0) cache.release(static_cast<u32>(slot.block));
        if (!cache.take(1, &slot.block)) _exit(3);
        slot.parent = hash_of(step.content);
        slot.sent = 0;
        slot.first_step = number;
    }
    step.tail_block = slot.block;
    step.tail_at = slot.sent;
    step.tail_id = slot.ids[slot.sent++] = static_cast<i32>(random.below(1u << 30));
}

[[noreturn]] void run_core(Survivors& shared, u64 content, u64 seed) {
    Random random(seed);
    static Tail former[SLOTS];
    std::memcpy(static_cast<void*>(former), shared.tails, sizeof former);
    BlockCache cache(BLOCKS, ledger_of(shared));
    Slot slots[SLOTS];
    adopt(slots, cache, former);
    for (u64 sent = 0, done = 0;;) {
        while (sent - done < IN_FLIGHT) {
            Sent& step = shared.steps[sent % IN_FLIGHT];
            step.content = content;
            content += PER_STEP;
            append(slots[slot_of(sent)], step, sent, cache, random);
            if (!cache.take(PER_STEP, step.blocks)) _exit(3);
            shared.sent.store(++sent, order::publish.release);
        }
        while (shared.done.load(order::publish.acquire) <= done) sched_yield();
        const Slot& slot = slots[slot_of(done)];
        const Sent step = shared.steps[done % IN_FLIGHT];
        if (slot.first_step <= done && step.tail_at + 1 < WORDS)
            cache.publish_tail(slot_of(done), static_cast<u32>(slot.block), slot.parent, slot.ids, step.tail_at + 1);
        ++done;
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

template <class T>
T& shared_memory() {
    void* at = mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(at != MAP_FAILED, "mmap: %d", errno);
    return *static_cast<T*>(at);
}

// Returns the number of valid blocks, and ids of tails.
u64 require_right(const Survivors& shared, u64 seed, u64 life) {
    u64 valid = 0;
    BlockLedger ledger = ledger_of(shared);
    const std::string damage = ledger.find_damage();
    REQUIRE(damage.empty(), "seed %" PRIu64 ", life %" PRIu64 ": %s", seed, life, damage.c_str());
    for (u32 block = 0; block < BLOCKS; ++block) {
        if (!ledger.is_valid(block)) continue;
        ++valid;
        const BlockHash& hash = ledger.hash(block);
        for (u64 word : shared.pages[block])
            REQUIRE(std::memcmp(hash.data(), &word, sizeof word) == 0,
                    "seed %" PRIu64 ", life %" PRIu64 ": block %u is wrong", seed, life, block);
    }
    for (const Tail& tail : shared.tails)
        for (u32 at = 0; at < tail.tail.count.load(RELAXED); ++at, ++valid)
            REQUIRE(shared.pages[tail.tail.block][at] == static_cast<u64>(tail.ids[at]),
                    "seed %" PRIu64 ", life %" PRIu64 ": id %u of block %u is wrong", seed, life, at, tail.tail.block);
    return valid;
}

struct Totals {
    Atomic<u64> valid, steps;
};

void run_lives(Survivors& shared, u64 kills, u64 seed, Totals& totals) {
    Random random(seed);
    u64 valid = 0, steps = 0;
    for (u64 life = 1; life <= kills; ++life) {
        shared.sent.store(0, RELAXED);
        shared.done.store(0, RELAXED);
        pid_t victims[] = {start([&] { run_core(shared, life << 32, seed + life); }),
                           start([&] { run_worker(shared); })};
        // Seven of eight lives have a step before the kill, however slow and busy the machine is.
        const u64 deadline = random.one_in(8) ? 0 : now_ns() + 20'000'000'000;
        while (shared.done.load(RELAXED) == 0 && (deadline == 0 ? !random.one_in(1 << 10) : now_ns() < deadline))
            sched_yield();
        usleep(static_cast<useconds_t>(random.below(60)));
        u64 first = random.below(2);  // the other one goes on for a while
        kill(victims[first], SIGKILL);
        if (random.one_in(2)) usleep(static_cast<useconds_t>(random.below(50)));
        kill(victims[1 - first], SIGKILL);
        for (pid_t victim : victims) require_killed(victim);
        steps += shared.done.load(RELAXED);
        valid += require_right(shared, seed, life);
    }
    totals.valid.fetch_add(valid, RELAXED);
    totals.steps.fetch_add(steps, RELAXED);
}

// The worker of a core that is stepped. It writes a few words at a time.
class SteppedWorker {
   public:
    explicit SteppedWorker(Survivors& shared) : shared_(shared) {}
    void write(u64 words) {
        for (; words != 0 && shared_.sent.load(order::publish.acquire) > done_; --words) {
            const Sent& sent = shared_.steps[done_ % IN_FLIGHT];
            if (at_ < PER_STEP * WORDS) {
                shared_.pages[sent.blocks[at_ / WORDS]][at_ % WORDS] = sent.content + at_ / WORDS;
                ++at_;
                continue;
            }
            shared_.pages[sent.tail_block][sent.tail_at] = static_cast<u64>(sent.tail_id);
            at_ = 0;
            shared_.done.store(++done_, order::publish.release);
        }
    }

   private:
    Survivors& shared_;
    u64 done_ = 0;
    u32 at_ = 0;  // the next word of the step
};

[[maybe_unused]] void walk_instructions(Survivors& shared, u64 instructions, u64 seed) {
    Random random(seed);
    u64 valid = 0, life = 0, steps = 0, instruction = 0;
    while (instruction < instructions || valid == 0) {  // a life may end before its first step is done
        shared.sent.store(0, RELAXED);
        shared.done.store(0, RELAXED);
        ++life;
        pid_t core = start([&] {
            if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(5);
            raise(SIGSTOP);
            run_core(shared, life << 32, seed + life);
        });
        SteppedWorker worker(shared);
        int status = 0;
        REQUIRE(waitpid(core, &status, 0) == core, "waitpid: %d", errno);
        if (WIFEXITED(status) && WEXITSTATUS(status) == 5 && life == 1) {
            std::printf("no instruction is walked: ptrace is not allowed\n");
            return;
        }
        do {
            REQUIRE(WIFSTOPPED(status), "seed %" PRIu64 ", life %" PRIu64 ": status %d", seed, life, status);
            REQUIRE(ptrace(PTRACE_SINGLESTEP, core, nullptr, nullptr) == 0, "ptrace: %d", errno);
            REQUIRE(waitpid(core, &status, 0) == core, "waitpid: %d", errno);
            if (random.one_in(8)) worker.write(random.below(16));
            valid += require_right(shared, seed, life);
        } while (++instruction % 50'000 != 0 && !random.one_in(20'000));
        kill(core, SIGKILL);
        require_killed(core);
        worker.write(random.below(PER_STEP * WORDS));  // it goes on for a while
        require_right(shared, seed, life);
        steps += shared.done.load(RELAXED);
    }
    std::printf("%" PRIu64 " instructions of %" PRIu64 " lives, %" PRIu64 " steps, 0 wrong\n", instruction, life,
                steps);
}

}  // namespace

int main(int argc, char** argv) {
    Arguments arguments(argc, argv);
    // Several pairs of processes at once: most of a life is the start and the end of its processes.
    const u64 pairs = arguments.is_quick ? 1 : 4;
    const u64 kills = arguments.is_quick ? 500 : 1'000'000 * arguments.scale;
    Totals& totals = shared_memory<Totals>();
    std::vector<pid_t> killers;
    for (u64 pair = 0; pair < pairs; ++pair)
        killers.push_back(start([&] {
            run_lives(shared_memory<Survivors>(), kills / pairs, arguments.seed + pair, totals);
            _exit(0);
        }));
    for (pid_t killer : killers) {
        int status = 0;
        REQUIRE(waitpid(killer, &status, 0) == killer && status == 0, "status %d", status);
    }
    u64 valid = totals.valid.load(RELAXED), steps = totals.steps.load(RELAXED);
    REQUIRE(valid > kills / 2 && steps > kills / 2, "%" PRIu64 " blocks, %" PRIu64 " steps", valid, steps);
    std::printf("%" PRIu64 " kills, %" PRIu64 " steps, %" PRIu64 " valid blocks and ids, 0 wrong\n", kills, steps,
                valid);
    std::fflush(stdout);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // with these a life has a hundred times as many
    if (getenv("PENSTOCK_EMULATED") == nullptr)                      // an emulator has no ptrace
        walk_instructions(shared_memory<Survivors>(), arguments.is_quick ? 20'000 : 1'000'000 * arguments.scale,
                          arguments.seed);
#endif
    return 0;
}
