"""A sender closes while a view can still write into its reservation: nothing that was committed changes, and its lane
goes on.

    here                      native
    First.close, drop         sender.h   Sender::close with keep_room, and finish_abort after the last view
    second                    sender.h   the constructor, which finds the lane closed or dead
    reap                      reap.h     reap_holdings: the end, and what the dead peer kept

Sender, Receiver and the lane are those of test_ring.py. The receiver sleeps until `committed` moves, and at no other
time: what its bell does is shown there. The view writes once, into the body of its room.
"""

from functools import partial

import pytest

from tests import tiers
from tests.model import orders
from tests.model.explorer import Process, Step, View, cas, load, must, store, until, until_gone
from tests.model.native import ring, ring_all
from tests.model.scene import ASLEEP, Scene
from tests.model.test_ring import ROOM, Receiver, Sender, lane

SIZE = 2  # cells of the room that is kept: a header and what the view can write
IS_PAST = [lambda committed, at=at: committed > at for at in range(10)]


class First(Sender):
    """Has a reservation, with a view, at `committed`."""

    def close(self) -> Step:
        if self.mutation == "closed before it is kept":
            yield from self.become_closed()
        if self.mutation != "nothing is kept":
            yield store("kept", self.committed)
            yield store("keeper", "first")
        yield store(("cell", self.committed % self.cells), (self.committed, "skip", SIZE, -1))
        yield store("committed", self.committed + SIZE, orders.publish.release)
        if self.mutation != "closed before it is kept":
            yield from self.become_closed()

    def become_closed(self) -> Step:
        yield cas("word", "live", "closed", orders.end.acq_rel)

    def drop(self) -> Step:
        yield store(("cell", (self.committed + 1) % self.cells), "written through the view")
        yield cas("keeper", "first", "", orders.room.release)
        if self.mutation != "dropped without a word":
            yield from ring(1, bell=ROOM)

    def close_and_drop(self) -> Step:
        yield from self.close()
        yield from self.drop()


def second(cells: int, needs: tuple[int, ...], mutation: str) -> Step:
    before = yield until("word", is_free)
    yield cas("word", before, "live", orders.end.acq_rel)
    del before
    me = Sender(cells, 1, mutation)
    me.committed = yield load("committed", orders.publish.acquire)
    for n in range(len(needs)):
        yield from me.send(n, needs[n])


def receives(cells: int, start: int, records: int, mutation: str) -> Step:
    me = Receiver(0, cells, 1, mutation)
    me.position = start
    while me.next != records:
        yield until("committed", IS_PAST[me.position])
        is_found = yield from me.find_in()
        if is_found:
            yield from me.give_back(me.position)


def reap(mutation: str) -> Step:
    yield until_gone("first")
    yield cas("word", "live", "dead", orders.end.acq_rel)
    if mutation != "the reaper leaves it kept":
        yield cas("keeper", "first", "", orders.room.release)
    yield from ring_all(bell=ROOM)


def is_free(word: str) -> bool:
    return word in ("closed", "dead")


def outlived(cells: int, needs: tuple[int, ...], mutation: str = "", start: int = 0, dies: bool = False) -> Scene:
    """The room begins at `start`: all before it was read and given back long ago."""

    def closes() -> Step:
        me = First(cells, 1, mutation)
        me.committed = start
        yield from me.close_and_drop()

    def at_end(view: View) -> None:
        must(view["keeper"] == "", "the room is kept for ever")

    words = lane(cells, 1) | {"committed": start, ("released", 0): start, ("read", 0): start}
    processes = [
        Process("first", closes, may_die=dies),
        Process("second", partial(second, cells, needs, mutation)),
        Process("receiver 0", partial(receives, cells, start, len(needs), mutation)),
    ]
    if dies:
        processes.append(Process("reaper", partial(reap, mutation), is_daemon=True))
    return Scene(words, processes, at_end=at_end, must_end=True)


@pytest.mark.parametrize("model", [*tiers.only_in_all("sc", "tso"), "weak"])
@pytest.mark.parametrize(("cells", "needs"), [(4, (2, 2)), (4, (1, 1, 1)), (3, (1, 2)), (5, (2, 2))])
def test_a_view_that_outlives_its_sender_changes_no_record_of_the_next(
    cells: int, needs: tuple[int, ...], model: str
) -> None:
    outlived(cells, needs).holds(100, model)


@pytest.mark.parametrize("model", [*tiers.only_in_all("sc"), "weak"])
def test_sender_dead_with_a_live_view_leaves_the_room_to_its_successor(model: str) -> None:
    outlived(4, (2, 2), dies=True).holds(1_000, model)


@pytest.mark.parametrize(
    ("mutation", "how"),
    [
        ("nothing is kept", "is torn|not the record of"),
        ("closed before it is kept", "is torn|not the record of"),
        ("dropped without a word", ASLEEP),
    ],
)
def test_each_part_of_keeping_a_room_is_needed(mutation: str, how: str) -> None:
    outlived(4, (2, 2), mutation).fails(how)


def test_a_room_is_given_up_after_the_last_write_of_its_view() -> None:
    outlived(4, (2, 2)).without("room", "release").fails("is torn|not the record of", "weak")


def test_a_reaper_that_leaves_the_room_kept_leaves_the_next_sender_less() -> None:
    outlived(4, (2, 2), "the reaper leaves it kept", dies=True).fails("kept for ever")


def test_a_skip_that_no_record_follows_is_given_back_with_nothing_read() -> None:
    """The next record begins a lap, and needs more room than is free before the skip is given back."""
    outlived(4, (2,), start=1).holds(30)
    outlived(4, (2,), "a skip is kept until the next record", start=1).fails(ASLEEP)


def succession(mutation: str = "") -> Scene:
    """Two reap the first, which has died while it kept a room; the next one in its slot may come, and keep another."""

    def reaps() -> Step:
        identity = yield load("identity", orders.identity.acquire)
        if identity == "dying":
            if mutation == "whoever keeps":
                yield store("keeper", "")
            else:
                yield cas("keeper", "first", "", orders.room.release)
            yield cas("identity", "dying", "dead", orders.identity.acq_rel)

    def keeps() -> Step:
        yield until("identity", is_free)
        yield store("keeper", "second")

    def at_end(view: View) -> None:
        must(view["keeper"] == "second", "the room of the living is given up")

    words = {"identity": "dying", "keeper": "first"}
    return Scene(words, [Process("reaper 0", reaps), Process("reaper 1", reaps), Process("second", keeps)], at_end)


def test_a_slow_reaper_does_not_give_up_the_room_of_a_successor() -> None:
    succession().holds(10)
    succession("whoever keeps").fails("of the living")
