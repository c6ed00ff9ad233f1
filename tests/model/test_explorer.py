"""The explorer itself: it finds what each memory model allows and nothing else, and waits that never end.

outcome                                        sc          tso         weak        weaker
both miss what the other stored                forbidden   allowed     allowed     allowed     each hides its store
the same, a fence in between                   forbidden   forbidden   forbidden   forbidden   the buffer is empty
a message is announced before it is there      forbidden   forbidden   allowed     allowed     stores leave in any order
the same, announced by a release               forbidden   forbidden   forbidden   allowed     a load may come early
the same, and looked for by an acquire         forbidden   forbidden   forbidden   forbidden   both halves
one word is older than it was before           forbidden   forbidden   forbidden   forbidden   one word never goes back
two additions, one lost                        forbidden   forbidden   forbidden   forbidden   one step
"""

from collections.abc import Callable, Hashable

import pytest

from tests.model.explorer import (
    ACQUIRE,
    RELAXED,
    RELEASE,
    Process,
    Step,
    View,
    Violation,
    cas,
    explore,
    fence,
    fetch_add,
    futex_wait,
    futex_wake,
    is_gone,
    load,
    must,
    store,
)

Outcomes = set[tuple[Hashable, ...]]


def outcomes(model: str, words: str, *bodies: Callable[[], Step]) -> Outcomes:
    """What the processes returned, in all the ways it can go."""
    outcomes_of_runs: Outcomes = set()
    names = [str(i) for i in range(len(bodies))]

    def at_end(view: View) -> None:
        outcomes_of_runs.add(tuple(view.result(name) for name in names))

    processes = [Process(name, body) for name, body in zip(names, bodies)]
    explore(dict.fromkeys(words, 0), processes, model=model, at_end=at_end)
    return outcomes_of_runs


def stores_and_looks(mine: str, other: str, is_fenced: bool) -> Callable[[], Step]:
    def run() -> Step:
        yield store(mine, 1)
        if is_fenced:
            yield fence()
        value = yield load(other)
        return value

    return run


@pytest.mark.parametrize(
    ("model", "is_fenced", "is_allowed"),
    [
        ("sc", False, False),
        ("tso", False, True),
        ("weak", False, True),
        ("weaker", False, True),
        ("sc", True, False),
        ("tso", True, False),
        ("weak", True, False),
        ("weaker", True, False),
    ],
)
def test_stores_before_loads_miss_each_other_only_without_a_fence(
    model: str, is_fenced: bool, is_allowed: bool
) -> None:
    results = outcomes(model, "xy", stores_and_looks("x", "y", is_fenced), stores_and_looks("y", "x", is_fenced))
    assert ((0, 0) in results) == is_allowed
    assert {(0, 1), (1, 0), (1, 1)} <= results


@pytest.mark.parametrize(
    ("model", "announces", "looks", "is_allowed"),
    [
        ("sc", RELAXED, RELAXED, False),
        ("tso", RELAXED, RELAXED, False),
        ("weak", RELAXED, RELAXED, True),
        ("weak", RELEASE, RELAXED, False),
        ("weaker", RELEASE, RELAXED, True),
        ("weaker", RELAXED, ACQUIRE, True),
        ("weaker", RELEASE, ACQUIRE, False),
    ],
)
@pytest.mark.parametrize("is_fenced", [False, True])
def test_a_message_is_announced_too_early_unless_both_halves_are_there(
    model: str, announces: int, looks: int, is_allowed: bool, is_fenced: bool
) -> None:
    def tells() -> Step:
        yield store("x", 1)
        if is_fenced:
            yield fence(announces)
        yield store("y", 1, RELAXED if is_fenced else announces)

    def asks() -> Step:
        is_announced = yield load("y", RELAXED if is_fenced else looks)
        if is_fenced:
            yield fence(looks)
        message = yield load("x")
        return is_announced, message

    results = {each[1] for each in outcomes(model, "xy", tells, asks)}
    assert ((1, 0) in results) == is_allowed
    assert {(0, 0), (0, 1), (1, 1)} <= results


def test_one_word_never_goes_back() -> None:
    def writes() -> Step:
        yield store("x", 1)
        yield store("x", 2)

    def reads() -> Step:
        yield load("y")
        first = yield load("x")
        second = yield load("x")
        return first, second

    results = {each[1] for each in outcomes("weaker", "xy", writes, reads)}
    assert results == {(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)}


@pytest.mark.parametrize("model", ["sc", "tso", "weak", "weaker"])
def test_an_addition_is_one_step_and_a_load_and_a_store_are_two(model: str) -> None:
    def adds() -> Step:
        before = yield fetch_add("x", 1, RELAXED)
        return before

    def adds_in_two() -> Step:
        before = yield load("x")
        yield store("x", before + 1)
        return before

    assert outcomes(model, "x", adds, adds) == {(0, 1), (1, 0)}
    assert (0, 0) in outcomes(model, "x", adds_in_two, adds_in_two)


def test_explorer_reports_a_sleeper_without_a_waker_only() -> None:
    def sleeps() -> Step:
        yield futex_wait("x", 0)

    def wakes() -> Step:
        yield store("x", 1)
        yield futex_wake("x", 1)

    assert explore({"x": 0}, [Process("sleeps", sleeps), Process("wakes", wakes)]).ends >= 1
    with pytest.raises(Violation, match="sleeps sleeps and no process will wake it"):
        explore({"x": 0}, [Process("sleeps", sleeps)])
    with pytest.raises(Violation, match="no process will wake it"):
        explore({"x": 0}, [Process("sleeps", sleeps), Process("wakes", wakes, may_die=True)])
    with pytest.raises(Violation, match="no process will wake it"):
        explore({"x": 0}, [Process("sleeps", sleeps), Process("wakes", wakes, may_stop=True)])


def test_endless_loop_is_reported() -> None:
    def spins() -> Step:
        actual = 1
        while actual != 0:
            actual = yield cas("x", 0, 1)

    def takes() -> Step:
        actual = yield cas("x", 0, 1)
        if actual == 0:
            yield store("x", 0)

    processes = [Process("spins", spins), Process("takes", takes)]
    explore({"x": 0}, processes, must_end=True)
    with pytest.raises(Violation, match="busy for ever"):
        explore({"x": 0}, [processes[0], Process("takes", takes, may_die=True)], must_end=True)


def test_stores_of_a_dead_process_arrive_before_its_death() -> None:
    def dies() -> Step:
        yield store("x", 1)
        yield load("x")

    def looks() -> Step:
        gone = yield is_gone("dies")
        before = yield load("x")
        return gone, before

    results: Outcomes = set()

    def at_end(view: View) -> None:
        results.add((view.is_dead("dies"), view.result("looks"), view["x"]))

    explore({"x": 0}, [Process("dies", dies, may_die=True), Process("looks", looks)], model="weak", at_end=at_end)
    assert (True, (True, 1), 1) in results
    assert (True, (True, 0), 0) in results  # it died before it stored
    assert (True, (True, 0), 1) not in results  # nothing arrives afterwards


def test_a_process_that_loops_is_told_apart_by_what_it_still_reads() -> None:
    def counts() -> Step:
        for _ in range(3):
            yield fetch_add("x", 1)

    def at_end(view: View) -> None:
        must(view["x"] == 3, "a turn was lost")

    explored = explore({"x": 0}, [Process("counts", counts)], at_end=at_end)
    assert (explored.states, explored.ends) == (4, 1)


def test_the_story_names_every_step() -> None:
    def first() -> Step:
        yield store("x", 1)

    def second() -> Step:
        value = yield load("x")
        must(value == 0, "it came too late")

    with pytest.raises(Violation) as caught:
        explore({"x": 0}, [Process("first", first), Process("second", second)])
    assert str(caught.value).splitlines() == [
        "it came too late",
        "  first: store(x, 1) -> None",
        "  second: load(x) -> 1",
    ]
