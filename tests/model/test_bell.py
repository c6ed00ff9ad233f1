"""The bell of native/wait.h, and the memory bell of native/pool.h: no wake-up is lost.

    here                    native
    wait, ring, ring_all    wait.h  of the same names: see native.py
    hand_on                 receiver.h  Receiver::hand_on, for one lane
    announce_return         pool.h  Pool::announce_return: takes all bits, then wakes all
    reaper                  reap.h  reap_holdings (clears the bit of the dead), header.changes, wake_everybody

wait reads rings before it sets its bit. The memory bell needs that: test_where_the_ringer_takes_the_bits_… says why.
A waiter here wants two publications, one after the other, or to be told that a peer died.
"""

from collections.abc import Callable
from functools import partial

import pytest

from tests import tiers
from tests.model import orders
from tests.model.explorer import (
    RELAXED,
    Process,
    Step,
    View,
    cas,
    fence,
    fetch_add,
    fetch_and,
    futex_wake,
    load,
    must,
    store,
    until_gone,
)
from tests.model.native import lowest, nobody, ring, ring_all, take_bits, wait
from tests.model.scene import ASLEEP, Scene, Words

MEMORY: Words = {"published": 0, "changes": 0, "rings": 0, "parked": 0}
MEMORY |= {("read", i): 0 for i in range(3)}


def ringer(records: int, without: str = "", **how: object) -> Step:
    for n in range(1, records + 1):
        if without == "publish first":
            yield from ring(**how)
            yield store("published", n, orders.publish.release)
        else:
            yield store("published", n, orders.publish.release)
            yield from ring(without=without, **how)


def is_ready(had: int) -> Step:
    published = yield load("published", orders.publish.acquire)
    changes = yield load("changes", orders.changes.acquire)
    return published > had or changes != 0


def hand_on(parked: int) -> Step:
    behind = 0
    while parked:
        read = yield load(("read", lowest(parked)), RELAXED)
        published = yield load("published", orders.publish.acquire)
        if read != published:
            behind |= parked & -parked
        del read, published
        parked &= parked - 1
    if behind != 0:
        yield futex_wake("rings", 1, behind)


def waiter(bit: int, records: int, hands_on: bool = True, **how: object) -> Step:
    had = 0
    while had < records:
        published = yield load("published", orders.publish.acquire)
        if published > had:
            had = published
            yield store(("read", lowest(bit)), had, RELAXED)
            continue
        changes = yield load("changes", orders.changes.acquire)
        if changes != 0:
            return "told of a death"
        del published, changes
        yield from wait(bit, partial_of(is_ready, had), hand_on if hands_on else nobody, **how)
    return "all"


def partial_of(what: Callable[[int], Step], had: int) -> Callable[[], Step]:
    return lambda: what(had)


def reaper(waiters: int, wakes: bool = True) -> Step:
    died = yield until_gone("ringer", *(f"waiter {i}" for i in range(waiters)))
    if died != "ringer":
        yield fetch_and("parked", ~(1 << int(died[-1])), orders.bell.seq_cst_then)
    if died == "ringer":
        yield fetch_add("changes", 1, orders.changes.acq_rel)
    if wakes:
        yield from ring_all()


def bell(
    waiters: int,
    records: int,
    *,
    dies: bool = False,
    stops: bool = False,
    wakes: bool = True,
    ringing: dict[str, object] | None = None,
    waiting: dict[str, object] | None = None,
) -> Scene:
    def at_end(view: View) -> None:
        for i in range(waiters):
            outcome = view.result(f"waiter {i}")
            must(outcome != "told of a death" or view.is_dead("ringer"), "a waiter gave up though nobody died")

    processes = [
        Process("ringer", partial(ringer, records, **(ringing or {})), may_die=dies),
        *(
            Process(f"waiter {i}", partial(waiter, 1 << i, records, **(waiting or {})), may_die=dies, may_stop=stops)
            for i in range(waiters)
        ),
    ]
    if dies:
        processes.append(Process("reaper", partial(reaper, waiters, wakes), is_daemon=True))
    return Scene(MEMORY, processes, at_end=at_end)


@pytest.mark.parametrize("model", [*tiers.only_in_all("sc", "tso"), "weak"])
@pytest.mark.parametrize(("waiters", "records"), [(1, 2), (2, 2), (3, 1)])
def test_no_wake_up_is_lost(waiters: int, records: int, model: str) -> None:
    bell(waiters, records).holds({1: 100, 2: 1_000, 3: 5_000}[waiters], model)


@pytest.mark.parametrize("model", [*tiers.only_in_all("sc"), "weak"])
def test_after_a_death_anywhere_the_reaper_leaves_nobody_asleep(model: str) -> None:
    bell(2, 1, dies=True).holds(10_000, model)


@pytest.mark.parametrize("model", [*tiers.only_in_all("sc"), "weak"])
def test_rings_may_be_read_after_the_bit_when_each_waiter_has_its_bit(model: str) -> None:
    bell(2, 2, waiting={"without": "rings read first"}).holds(10_000, model)


@pytest.mark.parametrize(("waiters", "records"), [(2, 2), (3, 1)])
def test_waiter_stopped_anywhere_does_not_keep_the_others_asleep(waiters: int, records: int) -> None:
    bell(waiters, records, stops=True).holds(50_000)


def two_ringers(**ringing: object) -> Scene:
    """The first may be stopped anywhere; the second goes through with it."""

    def ringer() -> Step:
        yield fetch_add("published", 1)
        yield from ring(**ringing)

    processes = [
        Process("stops", ringer, may_stop=True),
        Process("goes on", ringer),
        *(Process(f"waiter {i}", partial(waiter, 1 << i, 1)) for i in range(2)),
    ]
    return Scene(MEMORY, processes)


@pytest.mark.parametrize("model", [*tiers.only_in_all("sc"), "weak"])
def test_a_ringer_that_is_stopped_anywhere_leaves_the_bits_to_the_next(model: str) -> None:
    two_ringers().holds(10_000, model)


# ── a group of ends: its watcher says that it is broken, and rings the bells of all members ──────────────────────────
def grouped(*, wakes: bool = True, breaks_first: bool = True) -> Scene:
    """A waiter for a record that never comes, in a channel with living peers, and the watcher of the process."""

    def is_over() -> Step:
        published = yield load("published", orders.publish.acquire)
        is_broken = yield load("broken", RELAXED)
        return published > 0 or is_broken != 0

    def member() -> Step:
        while not (yield from is_over()):
            yield from wait(1, is_over)
        return "told of a death"

    def watcher() -> Step:  # Watcher::break_group
        if breaks_first:
            yield store("broken", 1, RELAXED)
        if wakes:
            yield from ring_all()
        if not breaks_first:
            yield store("broken", 1, RELAXED)

    return Scene(MEMORY | {"broken": 0}, [Process("member", member), Process("watcher", watcher)])


@pytest.mark.parametrize("model", [*tiers.only_in_all("sc", "tso"), "weak"])
def test_broken_group_leaves_no_member_asleep(model: str) -> None:
    grouped().holds(10, model)


def test_group_without_a_bell_leaves_a_member_asleep() -> None:
    grouped(wakes=False).fails(ASLEEP)


def test_group_that_is_broken_after_the_bell_leaves_a_member_asleep() -> None:
    grouped(breaks_first=False).fails(ASLEEP)


# ── what each part is there for ──────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("model", ["tso", "weak"])
def test_without_the_fence_of_the_ringer_a_wake_up_is_lost(model: str) -> None:
    without = bell(1, 1, ringing={"without": "fence"})
    without.fails(ASLEEP, model)
    without.holds(50, "sc")  # it orders, and does nothing else


@pytest.mark.parametrize("model", [*tiers.only_in_all("sc", "tso"), "weak"])
def test_without_the_second_look_a_wake_up_is_lost(model: str) -> None:
    bell(1, 1, waiting={"without": "second look"}).fails(ASLEEP, model)


def test_ringing_before_publishing_loses_a_wake_up() -> None:
    bell(1, 1, ringing={"without": "publish first"}).fails(ASLEEP)


def test_bits_that_the_ringer_clears_are_lost_with_a_ringer_that_stops() -> None:
    two_ringers(clears=True).fails(ASLEEP)


def test_a_ringer_that_wakes_two_of_three_needs_the_woken_to_hand_on() -> None:
    bell(3, 1, waiting={"hands_on": False}).fails(ASLEEP)


def test_waking_only_one_hangs_on_that_one() -> None:
    bell(2, 1, ringing={"most": 1}).holds(1_000)
    bell(2, 1, stops=True, ringing={"most": 1}).fails(ASLEEP)


def test_a_reaper_that_forgets_wake_everybody_leaves_somebody_asleep() -> None:
    bell(1, 1, dies=True, wakes=False).fails(ASLEEP)


# ── the memory bell: bits are shared, so the ringer takes them all and wakes all ─────────────────────────────────────
def announce_return(order: str = "take, ring") -> Step:
    yield fetch_add("returns", 1, orders.returns.release)
    yield fence(orders.bell.seq_cst_first)
    parked = yield load("parked", RELAXED)
    if parked == 0:
        return
    if order == "take, ring":
        yield take_bits("parked", 0, orders.bell.seq_cst_first)
        yield from ring_all()
    else:
        yield from ring_all()
        yield take_bits("parked", 0, orders.bell.seq_cst_first)


def give_back(order: str = "take, ring") -> Step:
    yield fetch_add("free", 1)
    yield from announce_return(order)


def has_returned(before: int) -> Step:
    returns = yield load("returns", orders.returns.acquire)
    changes = yield load("changes", orders.changes.acquire)
    return returns != before or changes != 0


def taker(bit: int, without: str) -> Step:
    while True:
        changes = yield load("changes", orders.changes.acquire)
        before = yield load("returns", orders.returns.acquire)
        free = yield load("free", orders.block.acquire)
        if free > 0:
            actual = yield cas("free", free, free - 1)
            if actual == free:
                return "has it"
            del actual
            continue
        if changes != 0:
            return "told of a death"
        del changes, free
        yield from wait(bit, partial_of(has_returned, before), clears=False, without=without)


def memory_bell(
    bits: tuple[int, ...], *, dies: bool = False, stops: bool = False, order: str = "take, ring", without: str = ""
) -> Scene:
    def reap() -> Step:
        yield until_gone("gives 0")
        yield fetch_add("changes", 1, orders.changes.acq_rel)
        yield from ring_all()

    processes = [
        Process("gives 0", partial(give_back, order), may_die=dies, may_stop=stops),
        Process("gives 1", partial(give_back, order)),
        *(Process(f"takes {i}", partial(taker, bit, without)) for i, bit in enumerate(bits)),
    ]
    if dies:
        processes.append(Process("reaper", reap, is_daemon=True))
    return Scene({"free": 0, "returns": 0, "changes": 0, "rings": 0, "parked": 0}, processes)


@pytest.mark.parametrize("model", [*tiers.only_in_all("sc"), "weak"])
@pytest.mark.parametrize("bits", [(1, 2), (1, 1)])
def test_waiters_that_share_a_bit_both_get_memory(bits: tuple[int, int], model: str) -> None:
    memory_bell(bits).holds(5_000, model)


def test_waiters_for_memory_wake_when_a_releasing_process_dies() -> None:
    memory_bell((1,), dies=True).holds(1_000)


def test_rings_must_be_read_before_the_bit_when_the_ringer_takes_bits() -> None:
    """Else: bit set; ringer takes it and rings; rings read; the next ringer finds no bit; asleep, with memory free."""
    memory_bell((1, 1), without="rings read first").fails(ASLEEP)


def test_taking_the_bits_after_ringing_loses_a_wake_up() -> None:
    memory_bell((1, 1), order="ring, take").fails(ASLEEP)


def test_memory_bell_ringer_stopped_with_the_bits_delays_to_the_poll() -> None:
    """Known, and why wait() looks up after LOOK_UP_NS: shared bits cannot be cleared by their waiters."""
    memory_bell((1,), stops=True).fails(ASLEEP)
