// spinner.cpp: when the window of a waiter opens and closes, and what its spins may cost, in a time of the test's own.
#include "spinner.h"

#include "testing.h"

using namespace testing;

namespace {

constexpr u64 US = 1'000, MS = 1'000'000;
const auto ENOUGH = [](u64) { return false; };
const auto TOO_FEW = [](u64) { return true; };

// A waiter whose records come after waits of given lengths. A sleep that ends costs `wake_ns` on top.
struct Waiter {
    SpinWindow window{SPIN_NS_AUTO};
    u64 now = 1'000 * MS;
    u64 spins = 0, sleeps = 0;
    u64 failed_ns = 0;  // spun, and slept all the same
    u64 wake_ns = 60 * US;

    template <class AreShort>
    void wait(u64 length_ns, AreShort&& are_short) {
        u64 open_ns = window.at(now, are_short);
        if (open_ns != 0 && length_ns < open_ns) {
            now += length_ns;
            ++spins;
            return;
        }
        if (open_ns != 0) window.fail(open_ns);
        failed_ns += open_ns;
        now += length_ns + wake_ns;
        window.learn(length_ns + wake_ns, open_ns);
        ++sleeps;
    }
    void wait(u64 length_ns) { wait(length_ns, ENOUGH); }
    void wait_often(u64 count, u64 length_ns) {
        for (u64 i = 0; i < count; ++i) wait(length_ns);
    }
};

void a_window_opens_when_waits_would_have_fitted_and_closes_when_they_do_not() {
    for (u64 length_ns : {20 * US, 100 * US, 250 * US, 299 * US}) {
        Waiter waiter;
        waiter.wait_often(8, length_ns);
        REQUIRE(waiter.spins > 0, "a wait of %" PRIu64 " ns still sleeps after eight", length_ns);
        u64 sleeps = waiter.sleeps;
        waiter.wait_often(1'000, length_ns);
        REQUIRE(waiter.sleeps == sleeps, "%" PRIu64 " waits slept again", waiter.sleeps - sleeps);
        REQUIRE(waiter.window.ns() <= SPIN_NS_AUTO, "a window of %" PRIu64 " ns", waiter.window.ns());
        waiter.wait_often(6, 5 * MS);
        REQUIRE(waiter.window.ns() == 0, "%" PRIu64 " ns after six long waits", waiter.window.ns());
        REQUIRE(waiter.window.at(waiter.now, ENOUGH) == 0, "a closed window");
    }
}

void long_waits_never_open_a_window() {
    for (u64 length_ns : {500 * US, 1 * MS, 20 * MS}) {
        Waiter waiter;
        waiter.wait_often(1'000, length_ns);
        REQUIRE(waiter.failed_ns == 0, "%" PRIu64 " ns spun with waits of %" PRIu64 " ns", waiter.failed_ns, length_ns);
    }
}

void a_window_is_never_wider_than_its_limit() {
    for (u64 limit_ns : {u64{0}, SPIN_NS_QUOTA}) {
        Waiter waiter;
        waiter.window = SpinWindow(limit_ns);
        for (u64 i = 0; i < 100; ++i) {
            waiter.wait(40 * US);
            REQUIRE(waiter.window.ns() <= limit_ns, "a window of %" PRIu64 " ns", waiter.window.ns());
        }
        REQUIRE((waiter.spins > 0) == (limit_ns != 0), "%" PRIu64 " spins", waiter.spins);
    }
}

void spins_that_fail_take_a_sixteenth_of_the_time_whatever_comes(u64 seed) {
    // Lengths by which a window opens, and then is missed: at random, and those just longer than the widest window.
    for (u64 round = 0; round < 40; ++round) {
        Random random(seed + round);
        Waiter waiter;
        waiter.wake_ns = random.below(80) * US;
        u64 began = waiter.now;
        for (u64 i = 0; i < 20'000; ++i) {
            waiter.wait(round == 0 ? 310 * US : random.below(1 + random.below(600)) * US);
            u64 most = (waiter.now - began) / SPIN_SHARE + SPIN_CREDIT_NS;
            REQUIRE(waiter.failed_ns <= most, "seed %" PRIu64 ": %" PRIu64 " ns of %" PRIu64, seed + round,
                    waiter.failed_ns, waiter.now - began);
        }
    }
}

void beside_a_thread_that_computes_spins_become_rare_and_afterwards_frequent_again() {
    Waiter waiter;
    u64 met = 0;
    for (u64 end = waiter.now + 10'000 * MS; waiter.now < end;) {  // every spin meets that thread
        u64 spins = waiter.spins;
        waiter.wait(100 * US);
        if (waiter.spins == spins) continue;
        waiter.now += 3 * MS;
        waiter.window.hold(waiter.now);
        ++met;
    }
    REQUIRE(met >= 7 && met <= 16, "met %" PRIu64 " times in 10 s", met);  // 20, 40 … 1,280 ms after each other
    u64 since = waiter.now;
    for (waiter.spins = 0; waiter.spins == 0;) waiter.wait(100 * US);
    REQUIRE(waiter.now - since <= MAX_HOLD_NS + MS, "%" PRIu64 " ns without a spin", waiter.now - since);
    waiter.now += 10'000 * MS;
    waiter.window.hold(waiter.now);
    since = waiter.now;
    for (waiter.spins = 0; waiter.spins == 0;) waiter.wait(100 * US);
    REQUIRE(waiter.now - since <= HOLD_NS + MS, "%" PRIu64 " ns without a spin", waiter.now - since);
}

void a_hold_goes_on_while_processors_are_short() {
    Waiter waiter;
    waiter.wait_often(10, 100 * US);
    waiter.window.hold(waiter.now);
    waiter.spins = 0;
    for (u64 end = waiter.now + 1'000 * MS; waiter.now < end;) waiter.wait(100 * US, TOO_FEW);
    REQUIRE(waiter.spins == 0, "%" PRIu64 " spins", waiter.spins);
    for (u64 end = waiter.now + SHORTAGE_NS + MS; waiter.now < end;) waiter.wait(100 * US, ENOUGH);
    REQUIRE(waiter.spins > 0, "no spin %" PRIu64 " ns after the shortage", SHORTAGE_NS + MS);
}

}  // namespace

int main(int argc, char** argv) {
    Arguments arguments(argc, argv);
    a_window_opens_when_waits_would_have_fitted_and_closes_when_they_do_not();
    long_waits_never_open_a_window();
    a_window_is_never_wider_than_its_limit();
    spins_that_fail_take_a_sixteenth_of_the_time_whatever_comes(arguments.seed);
    beside_a_thread_that_computes_spins_become_rare_and_afterwards_frequent_again();
    a_hold_goes_on_while_processors_are_short();
    return 0;
}
