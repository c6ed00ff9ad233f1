"""The bell of native/wait.h, and the memory bell of native/pool.h: no wake-up is lost.

    here                    native
    wait                    wait.h  penstock::wait, from "for (;;)" on; no spinning, no deadline and no look-up, so
                                    that a sleeper sleeps until it is woken. clears=False is wait<false>
    hand_on                 receiver.h  Receiver::hand_on, for one lane
    ring                    wait.h  ring: ORDER bell on both sides
    ring_all                wait.h  ring_all
    announce_return         pool.h  Pool::announce_return: takes all bits, then wakes all
    reaper                  reap.h  reap_holdings (clears the bit of the dead), header.changes, wake_everybody

The memory bell must read rings before it sets its bit: test_where_the_ringer_takes_the_bits_… says why.
A waiter here wants two publications, one after the other, or to be told that somebody died.
"""

from collections.abc import Callable, Hashable
from functools import partial

import pytest

from tests.model.explorer import (
    ACQUIRE,
    EVERYBODY,
    RELAXED,
    RELEASE,
    SEQ_CST,
    Explored,
    Process,
    Step,
    View,
    Violation,
    cas,
    explore,
    fence,
    fetch_add,
    fetch_and,
    fetch_or,
    futex_wait,
    futex_wake,
    load,
    must,
    store,
    until_gone,
)
from tests.model.explorer import exchange as take_bits

HAND_ON_WAKES = 2
MEMORY: dict[Hashable, Hashable] = {"published": 0, "changes": 0, "rings": 0, "parked": 0}
MEMORY |= {("read", i): 0 for i in range(3)}


def nobody(others: int) -> Step:
    yield from ()


def wait(
    bit: int,
    ready: Callable[[], Step],
    hand_on: Callable[[int], Step] = nobody,
    clears: bool = True,
    without: str = "",
    rings: str = "",
    bell: str = "",
) -> Step:
    while True:
        if rings == "before parked":
            seen = yield load(bell + "rings", SEQ_CST)
        yield fetch_or(bell + "parked", bit, SEQ_CST)  # ORDER bell: before the second look
        if rings != "before parked":
            seen = yield load(bell + "rings", SEQ_CST)
        yield fence()
        is_ready = False
        if without != "second look":
            is_ready = yield from ready()
        got = 0
        if not is_ready:
            got = yield futex_wait(bell + "rings", seen, mask=bit)
        del seen
        others = 0
        if clears:
            others = yield fetch_and(bell + "parked", ~bit, SEQ_CST)
            others &= ~bit
        if others != 0 and got == 0 and not is_ready:
            yield from hand_on(others)
        del others, got
        if is_ready:
            return
        is_ready = yield from ready()
        if is_ready:
            return


def ring(most: int = HAND_ON_WAKES, without: str = "", clears: bool = False, bell: str = "") -> Step:
    if without != "fence":
        yield fence()  # ORDER bell: published before parked is read
    if clears:  # never so: see the tests below
        parked = yield take_bits(bell + "parked", 0)
    else:
        parked = yield load(bell + "parked", RELAXED)
    if parked == 0:
        return
    yield fetch_add(bell + "rings", 1, SEQ_CST)
    yield futex_wake(bell + "rings", most, parked)


def ring_all(bell: str = "") -> Step:
    yield fetch_add(bell + "rings", 1, SEQ_CST)
    yield futex_wake(bell + "rings", EVERYBODY)


def ringer(records: int, without: str = "", **how: object) -> Step:
    for n in range(1, records + 1):
        if without == "publish first":
            yield from ring(**how)
            yield store("published", n, RELEASE)
        else:
            yield store("published", n, RELEASE)
            yield from ring(without=without, **how)


def is_ready(had: int) -> Step:
    published = yield load("published", ACQUIRE)
    changes = yield load("changes", ACQUIRE)
    return published > had or changes != 0


def hand_on(parked: int) -> Step:
    behind = 0
    while parked:
        read = yield load(("read", lowest(parked)), RELAXED)
        published = yield load("published", ACQUIRE)
        if read != published:
            behind |= parked & -parked
        del read, published
        parked &= parked - 1
    if behind != 0:
        yield futex_wake("rings", 1, behind)


def lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def waiter(bit: int, records: int, hands_on: bool = True, **how: object) -> Step:
    had = 0
    while had < records:
        published = yield load("published", ACQUIRE)
        if published > had:
            had = published
            yield store(("read", lowest(bit)), had, RELAXED)
            continue
        changes = yield load("changes", ACQUIRE)
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
        yield fetch_and("parked", ~(1 << int(died[-1])))
    if died == "ringer":
        yield fetch_add("changes", 1)
    if wakes:
        yield from ring_all()


def bell(
    waiters: int,
    records: int,
    model: str = "sc",
    *,
    dies: bool = False,
    stops: bool = False,
    wakes: bool = True,
    ringing: dict[str, object] | None = None,
    waiting: dict[str, object] | None = None,
    is_ringer_stopped: bool = False,
) -> Explored:
    def at_end(view: View) -> None:
        for i in range(waiters):
            told = view.result(f"waiter {i}")
            must(told != "told of a death" or view.is_dead("ringer"), "a waiter gave up though nobody died")

    processes = [
        Process("ringer", partial(ringer, records, **(ringing or {})), may_die=dies, may_stop=is_ringer_stopped),
        *(
            Process(f"waiter {i}", partial(waiter, 1 << i, records, **(waiting or {})), may_die=dies, may_stop=stops)
            for i in range(waiters)
        ),
    ]
    if dies:
        processes.append(Process("reaper", partial(reaper, waiters, wakes), is_daemon=True))
    return explore(MEMORY, processes, model=model, at_end=at_end)


@pytest.mark.parametrize("model", ["sc", "tso", "weak"])
@pytest.mark.parametrize(("waiters", "records"), [(1, 2), (2, 2), (3, 1)])
def test_no_wake_up_is_lost(waiters: int, records: int, model: str) -> None:
    explored = bell(waiters, records, model)
    print(explored)
    assert explored.states > {1: 100, 2: 1_000, 3: 5_000}[waiters]


@pytest.mark.parametrize("model", ["sc", "weak"])
def test_after_a_death_anywhere_the_reaper_leaves_nobody_asleep(model: str) -> None:
    explored = bell(2, 1, model, dies=True)
    print(explored)
    assert explored.states > 10_000


@pytest.mark.parametrize("model", ["sc", "weak"])
def test_rings_may_as_well_be_read_before_the_bit_is_set(model: str) -> None:
    explored = bell(2, 2, model, waiting={"rings": "before parked"})
    print(explored)
    assert explored.states > 10_000


@pytest.mark.parametrize(("waiters", "records"), [(2, 2), (3, 1)])
def test_one_waiter_that_is_stopped_anywhere_does_not_keep_the_others_asleep(waiters: int, records: int) -> None:
    explored = bell(waiters, records, stops=True)
    print(explored)
    assert explored.states > 50_000


def two_ringers(model: str, **ringing: object) -> Explored:
    """The first may be stopped anywhere; the second goes through with it."""

    def one() -> Step:
        yield fetch_add("published", 1)
        yield from ring(**ringing)

    processes = [
        Process("stops", one, may_stop=True),
        Process("goes on", one),
        *(Process(f"waiter {i}", partial(waiter, 1 << i, 1)) for i in range(2)),
    ]
    return explore(MEMORY, processes, model=model)


@pytest.mark.parametrize("model", ["sc", "weak"])
def test_a_ringer_that_is_stopped_anywhere_leaves_the_bits_to_the_next(model: str) -> None:
    explored = two_ringers(model)
    print(explored)
    assert explored.states > 10_000


# ── what each part is there for ──────────────────────────────────────────────────────────────────────────────────────
SLEEPS = "sleeps and nobody will wake it"


@pytest.mark.parametrize("model", ["tso", "weak"])
def test_without_the_fence_of_the_ringer_a_wake_up_is_lost(model: str) -> None:
    with pytest.raises(Violation, match=SLEEPS):
        bell(1, 1, model, ringing={"without": "fence"})
    bell(1, 1, "sc", ringing={"without": "fence"})  # it orders, and does nothing else


@pytest.mark.parametrize("model", ["sc", "tso", "weak"])
def test_without_the_second_look_a_wake_up_is_lost(model: str) -> None:
    with pytest.raises(Violation, match=SLEEPS):
        bell(1, 1, model, waiting={"without": "second look"})


def test_ringing_before_publishing_loses_a_wake_up() -> None:
    with pytest.raises(Violation, match=SLEEPS):
        bell(1, 1, ringing={"without": "publish first"})


def test_bits_that_the_ringer_clears_are_lost_with_a_ringer_that_stops() -> None:
    with pytest.raises(Violation, match=SLEEPS):
        two_ringers("sc", clears=True)


def test_a_ringer_that_wakes_two_of_three_needs_the_woken_to_hand_on() -> None:
    with pytest.raises(Violation, match=SLEEPS):
        bell(3, 1, waiting={"hands_on": False})


def test_waking_only_one_hangs_on_that_one() -> None:
    bell(2, 1, ringing={"most": 1})
    with pytest.raises(Violation, match=SLEEPS):
        bell(2, 1, stops=True, ringing={"most": 1})


def test_a_reaper_that_forgets_wake_everybody_leaves_somebody_asleep() -> None:
    with pytest.raises(Violation, match=SLEEPS):
        bell(1, 1, dies=True, wakes=False)


# ── the memory bell: bits are shared, so the ringer takes them all and wakes all ─────────────────────────────────────
def announce_return(order: str = "take, ring") -> Step:
    yield fetch_add("returns", 1, RELEASE)
    yield fence()  # ORDER bell
    parked = yield load("parked", RELAXED)
    if parked == 0:
        return
    if order == "take, ring":
        yield take_bits("parked", 0, SEQ_CST)
        yield from ring_all()
    else:
        yield from ring_all()
        yield take_bits("parked", 0, SEQ_CST)


def give_back(order: str = "take, ring") -> Step:
    yield fetch_add("free", 1)
    yield from announce_return(order)


def has_returned(seen: int) -> Step:
    returns = yield load("returns", ACQUIRE)
    changes = yield load("changes", ACQUIRE)
    return returns != seen or changes != 0


def taker(bit: int, rings: str) -> Step:
    while True:
        changes = yield load("changes", ACQUIRE)
        seen = yield load("returns", ACQUIRE)
        free = yield load("free", ACQUIRE)
        if free > 0:
            found = yield cas("free", free, free - 1)
            if found == free:
                return "has it"
            del found
            continue
        if changes != 0:
            return "told of a death"
        del changes, free
        yield from wait(bit, partial_of(has_returned, seen), clears=False, rings=rings)


def memory_bell(
    model: str,
    bits: tuple[int, ...],
    *,
    dies: bool = False,
    stops: bool = False,
    order: str = "take, ring",
    rings: str = "before parked",
) -> Explored:
    def reap() -> Step:
        yield until_gone("gives 0")
        yield fetch_add("changes", 1)
        yield from ring_all()

    processes = [
        Process("gives 0", partial(give_back, order), may_die=dies, may_stop=stops),
        Process("gives 1", partial(give_back, order)),
        *(Process(f"takes {i}", partial(taker, bit, rings)) for i, bit in enumerate(bits)),
    ]
    if dies:
        processes.append(Process("reaper", reap, is_daemon=True))
    memory = {"free": 0, "returns": 0, "changes": 0, "rings": 0, "parked": 0}
    return explore(memory, processes, model=model)


@pytest.mark.parametrize("model", ["sc", "weak"])
@pytest.mark.parametrize("bits", [(1, 2), (1, 1)])
def test_two_that_wait_for_memory_get_it_even_when_they_share_a_bit(bits: tuple[int, int], model: str) -> None:
    explored = memory_bell(model, bits)
    print(explored)
    assert explored.states > 5_000


def test_after_the_death_of_one_that_gave_memory_back_nobody_who_waits_for_it_sleeps() -> None:
    explored = memory_bell("sc", (1,), dies=True)
    print(explored)
    assert explored.states > 1_000


def test_where_the_ringer_takes_the_bits_rings_must_be_read_before_the_bit_is_set() -> None:
    """Else: bit set; ringer takes it and rings; rings read; the next ringer finds no bit; asleep, with memory free."""
    with pytest.raises(Violation, match=SLEEPS):
        memory_bell("sc", (1, 1), rings="after parked")


def test_taking_the_bits_after_ringing_loses_a_wake_up() -> None:
    with pytest.raises(Violation, match=SLEEPS):
        memory_bell("sc", (1, 1), order="ring, take")


def test_a_ringer_of_the_memory_bell_that_stops_with_the_bits_costs_a_look_up() -> None:
    """Known, and why wait() looks up every LOOK_UP_NS: shared bits cannot be cleared by their waiters."""
    with pytest.raises(Violation, match=SLEEPS):
        memory_bell("sc", (1,), stops=True)
