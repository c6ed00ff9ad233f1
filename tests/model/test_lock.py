"""The lock of native/peers.h: one at a time among the living, and no death of a holder leaves it locked.

    here              native/peers.h
    lock              Attachment::lock. The spinning is left out (it only tries the same exchange again); the
                      millisecond of the futex is a sleep that may end at any time; a holder is looked at every time
    unlock            Attachment::unlock: order lock
    take_over         Attachment::take_over
    is_abandoned      Attachment::is_abandoned
    reap_holdings     reap.h: is_still, then Pool::recover_lock (pool.h); reap is in native.py
    newcomer          Attachment::claim, into the slot of a dead peer

A word of the lock is 0 or (slot, epoch, whether there are waiters). What it protects is a word that is not 0 while
a peer is inside: the peer that takes over the lock of a dead holder repairs it, and all others must find it in order.
"""

from collections.abc import Hashable
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
    exchange,
    fetch_add,
    futex_wait,
    futex_wake,
    is_gone,
    load,
    must,
    store,
    until,
    until_gone,
)
from tests.model.native import reap
from tests.model.scene import ASLEEP, BUSY, Scene, Words

NOBODY = -1


def is_abandoned(owner: int) -> Step:
    if owner == NOBODY:
        return True
    state, peer = yield load(("identity", owner), orders.identity.acquire)
    if state in ("live", "dying"):  # dying may be leaving
        gone = yield is_gone(peer)
        return gone
    return True


def lock(slot: int, epoch: int, may_time_out: bool = True, without: str = "") -> Step:
    """True: the holder died holding it."""
    actual = yield cas("lock", 0, (slot, epoch, False), orders.lock.acquire)
    if actual == 0:
        return False
    del actual
    while True:
        outcome = yield from try_lock_or_sleep((slot, epoch, True), may_time_out, without)
        if outcome is not None:
            return outcome


def try_lock_or_sleep(mine: tuple[int, int, bool], may_time_out: bool, without: str) -> Step:
    before = yield load("lock", RELAXED)
    if before == 0:
        desired = (*mine[:2], False) if without == "keeping the bit" else mine
        actual = yield cas("lock", 0, desired, orders.lock.acquire)
        return False if actual == 0 else None
    abandoned = yield from is_abandoned(before[0])
    if abandoned and without != "looking at the holder":
        actual = yield cas("lock", before, mine, orders.lock.acquire)
        if actual == before:
            return True
        before = actual or (NOBODY, 0, False)  # compare_exchange says what it found
        del actual
    del abandoned
    if not before[2]:
        expected = 0 if before[0] == NOBODY else before
        actual = yield cas("lock", expected, (*before[:2], True), RELAXED)
        if actual != expected:
            return None
    yield futex_wait("lock", (*before[:2], True), may_time_out)
    return None


def unlock() -> Step:
    before = yield exchange("lock", 0, orders.lock.release)
    if before != 0 and before[2]:
        yield futex_wake("lock", 1)


def take_over(mine: tuple[int, int], slot: int, epoch: int, looks_at: str = "slot and epoch") -> Step:
    before = yield load("lock", orders.lock.acquire)
    if before == 0 or before[0] != slot or (before[1] != epoch and looks_at == "slot and epoch"):
        return False
    actual = yield cas("lock", before, (*mine, True), orders.lock.acquire)
    return actual == before


def inside(me: str, has_recovered: bool) -> Step:
    before = yield load("inside", RELAXED)
    must(before == 0 or has_recovered, f"{me} found it half done, or {before} is inside too")
    yield store("inside", me, RELAXED)
    now = yield load("inside", RELAXED)
    must(now == me, f"{now} came in while {me} was inside")
    yield store("inside", 0, RELAXED)


def locker(me: str, slot: int, times: int = 1, **how: object) -> Step:
    for _ in range(times):
        has_recovered = yield from lock(slot, 1, **how)
        yield from inside(me, has_recovered)
        del has_recovered
        yield from unlock()


# ── reaping ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def reaper(me: str, mine: int, slots: dict[str, int], looks_at: str = "slot and epoch") -> Step:
    died = yield until_gone(*slots)
    slot = slots[died]
    yield from reap(died, slot, lambda identity: reap_holdings(me, mine, slot, identity, looks_at))


def reap_holdings(me: str, mine: int, slot: int, identity: Hashable, looks_at: str) -> Step:
    epoch = yield load(("epoch", slot), orders.epoch.acquire)
    is_still = yield load(("identity", slot), orders.identity.acquire)
    if is_still != identity and looks_at == "slot and epoch":
        return
    del is_still
    has_it = yield from take_over((mine, 1), slot, epoch, looks_at)
    if has_it:
        yield from inside(me, True)
        yield from unlock()


def newcomer(me: str, slot: int) -> Step:
    """Takes the slot of the dead peer, as soon as it is free."""
    _, before = yield until(("identity", slot), is_dead)
    yield cas(("identity", slot), ("dead", before), ("live", me), orders.identity.acq_rel)
    epoch = yield fetch_add(("epoch", slot), 1, orders.epoch.acq_rel)
    has_recovered = yield from lock(slot, epoch + 1)
    yield from inside(me, has_recovered)
    yield from unlock()


def is_dead(identity: tuple[str, str]) -> bool:
    return identity[0] == "dead"


def memory(*names: str) -> Words:
    words: Words = {"lock": 0, "inside": 0}
    for slot, name in enumerate(names):
        words["identity", slot] = ("live", name)
        words["epoch", slot] = 1
    return words


def is_left_unlocked(view: View) -> None:
    must(view["lock"] == 0, f"the lock is left as {view['lock']}")
    must(view["inside"] == 0, f"what it protects is left half done by {view['inside']}")


def lockers(n: int, times: int = 1, **how: object) -> Scene:
    names = [f"peer {i}" for i in range(n)]
    processes = [Process(name, partial(locker, name, i, times, **how)) for i, name in enumerate(names)]
    return Scene(memory(*names), processes, at_end=is_left_unlocked, must_end=True)


def lockers_of_whom_some_die(n: int, reapers: int = 1, faults: int = 1, **how: object) -> Scene:
    names = [f"peer {i}" for i in range(n)]
    reaping = [f"reaper {i}" for i in range(reapers)]
    slots = {name: i for i, name in enumerate(names)}
    processes = [
        *(Process(name, partial(locker, name, i, **how), may_die=True) for i, name in enumerate(names)),
        *(Process(name, partial(reaper, name, n + i, slots), is_daemon=True) for i, name in enumerate(reaping)),
    ]

    def at_end(view: View) -> None:
        if faults == 1 and reapers:
            is_left_unlocked(view)

    return Scene(memory(*names, *reaping), processes, faults=faults, at_end=at_end, must_end=True)


def a_slot_that_is_taken_again(looks_at: str) -> Scene:
    """Peer 0 dies; two reapers see it; its slot is taken by a newcomer while one of them is still at it."""
    slots = {"peer 0": 0}
    processes = [
        Process("peer 0", partial(locker, "peer 0", 0), may_die=True),
        Process("reaper 0", partial(reaper, "reaper 0", 1, slots, looks_at=looks_at), is_daemon=True),
        Process("reaper 1", partial(reaper, "reaper 1", 2, slots, looks_at=looks_at), is_daemon=True),
        Process("newcomer", partial(newcomer, "newcomer", 0), is_daemon=True),
    ]

    def at_end(view: View) -> None:
        is_left_unlocked(view)
        must(view.is_done("newcomer") or not view.is_dead("peer 0"), "the newcomer did not come in")

    return Scene(memory("peer 0", "reaper 0", "reaper 1"), processes, at_end=at_end, must_end=True)


@pytest.mark.parametrize("model", [*tiers.only_in_all("sc", "tso"), "weak"])
def test_lock_admits_one_process_at_a_time(model: str) -> None:
    lockers(2, 2).holds(500, model)


def test_lock_waiter_is_woken_by_the_holder_without_a_clock() -> None:
    lockers(3, 1, may_time_out=False).holds(1_000)


@pytest.mark.parametrize("model", [*tiers.only_in_all("sc"), "weak"])
def test_a_holder_that_dies_anywhere_wedges_nobody(model: str) -> None:
    lockers_of_whom_some_die(2).holds(1_000, model)


def test_lock_of_a_dead_holder_goes_to_one_of_several_waiters_and_reapers() -> None:
    lockers_of_whom_some_die(3, reapers=0).holds(10_000)
    lockers_of_whom_some_die(2, reapers=2).holds(10_000)


def test_process_that_took_a_lock_over_may_die() -> None:
    lockers_of_whom_some_die(3, reapers=0, faults=2).holds(10_000)


def test_slow_reaper_leaves_the_lock_of_the_next_peer_in_the_slot() -> None:
    a_slot_that_is_taken_again("slot and epoch").holds(1_000)


# ── what each part is there for ──────────────────────────────────────────────────────────────────────────────────────
def test_reaper_without_epoch_check_takes_a_live_peers_lock() -> None:
    a_slot_that_is_taken_again("slot").fails(r"came in while|is inside too|half done")


def test_waiters_that_do_not_look_at_the_holder_hang_on_the_reaper() -> None:
    lockers_of_whom_some_die(2, reapers=0, without="looking at the holder").fails(BUSY)


def test_a_waiter_that_drops_the_bit_leaves_the_next_asleep() -> None:
    lockers(3, 1, may_time_out=False, without="keeping the bit").fails(ASLEEP)


def test_an_unlock_that_does_not_release_lets_the_next_in_too_early() -> None:
    lockers(2, 1).without("lock", "release").holds(100, "tso")
    lockers(2, 1).without("lock", "release").fails(r"half done|came in", "weak")
