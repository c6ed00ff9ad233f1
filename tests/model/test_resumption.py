"""The protocol by which a link goes on over a new connection: every interleaving of resets with the connector, the
thread of the link at the listener's side, and the threads that speak with each new connection.

Side a connects and sends frames, side b listens and delivers them. A reset may reach side a alone: side b then has the
old connection and the new one at a time. The packets themselves, cut at every byte, are walked with their own classes.
"""

import itertools
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import pytest

from penstock.bridge import packets
from penstock.bridge.packets import PacketQueue, PacketReader
from tests import tiers
from tests.model.explorer import (
    Op,
    Process,
    Step,
    View,
    cas,
    exchange,
    futex_wait,
    futex_wake,
    load,
    must,
    store,
    until,
)
from tests.model.scene import Scene
from tests.unit.bridge.test_packets import CutWire, Recorder

FRAMES = 2
RAN_OUT = "no connection is left"


def resumed(connections: int, *, mutation: str = "", only: str = "ab") -> Scene:
    """Side a has so many connections, one after the other; resets may reach the sides in `only` of all but the last."""

    def at_end(view: View) -> None:
        delivered = view["delivered"]
        must(delivered == tuple(range(len(delivered))), f"delivered {delivered}")
        if view.result("a") != RAN_OUT:
            must(len(delivered) == FRAMES, f"a has ended, and b has delivered {delivered}")

    def invariant(view: View) -> None:
        delivered = view["delivered"]
        must(delivered == tuple(range(len(delivered))), f"delivered {delivered}")

    memory: dict[object, object] = {"delivered": (), "seat": (-1, "begins", 0), "event": 0, "received": 0}
    for number in range(connections):
        memory |= {
            ("hello", number): 0,
            ("go", number): 0,
            ("wire", number): (),
            ("a", number): "",
            ("lost", number): 0,
        }
    resets = [
        Process(f"reset {number} at {side}", partial(resets_at, side, number), is_daemon=True)
        for number in range(connections - 1)
        for side in only
    ]
    processes = [
        Process("a", partial(connects, connections, mutation)),
        Process("b", partial(receives, connections, mutation), is_daemon=True),
        *(
            Process(f"door {number}", partial(admits, number, mutation), is_daemon=True)
            for number in range(connections)
        ),
        *resets,
    ]
    return Scene(memory, processes, at_end=at_end, invariant=invariant, limit=3_000_000)


def rings() -> Step:
    yield store("event", 1)
    yield futex_wake("event", 1)


def resets_at(side: str, number: int) -> Step:
    """At any time, or never: the side finds that its connection is lost. Side a never hears of a reset of side b alone
    before side b has dropped the connection."""
    yield until(("hello", number), bool)
    if side == "a":
        yield exchange(("a", number), "lost")
    else:
        yield from ends_at_b(number)


def ends_at_b(number: int) -> Step:
    yield store(("lost", number), 1)
    yield from rings()


def connects(connections: int, mutation: str) -> Step:
    sent = 0
    for number in range(connections):
        yield store(("hello", number), 1)
        state = yield until(("a", number), lambda state: state != "")
        if state != "lost":
            first = sent if mutation == "a goes on where it was" else state
            yield store(("go", number), 1)
            for frame in range(first, FRAMES):
                yield store(("wire", number), tuple(range(first, frame + 1)))
                yield from rings()
                sent = frame + 1
            state = yield until(("a", number), lambda state: state in ("lost", "all"))
            if state == "all":
                return "done"
    return RAN_OUT


def receives(connections: int, mutation: str) -> Step:
    """The thread of the link: it reads one connection, until that is lost or replaced, and drops it then."""
    count = 0
    delivered: tuple[int, ...] = ()
    for generation in range(2 * connections):
        yield store("seat", (generation, "suspended", count))
        seat = yield until("seat", lambda seat: seat[1] != "suspended")
        number, first = seat[2], count
        while True:
            yield store("event", 0)
            is_lost = yield load(("lost", number))
            seat = yield load("seat")
            frames = yield load(("wire", number))
            for position in range(count - first, len(frames)):
                delivered = (*delivered, frames[position])
                count = first + position + 1
                yield store("delivered", delivered)
                yield store("received", count)
            if count == FRAMES:
                yield exchange(("a", number), "all")
            if is_lost or seat[1] == "wanted":
                break
            yield futex_wait("event", 0)
        yield exchange(("a", number), "lost")  # the connection is dropped: side a finds its end


def admits(number: int, mutation: str) -> Step:
    """Speaks with a new connection: has the link drop its old one, says how much has come, and hands the new one on."""
    yield until(("hello", number), bool)
    if mutation == "the old connection is read on":
        count = yield load("received")
        yield cas(("a", number), "", count)
        yield until(("go", number), bool)
        seat = yield from suspends()
    else:
        seat = yield from suspends()
        yield cas(("a", number), "", seat[2])
        yield until(("go", number), bool)
    if mutation == "a connection of an earlier loss is taken":
        seat = yield until("seat", lambda seat: seat[1] == "suspended")
    actual = yield cas("seat", seat, (seat[0], "runs", number))
    if actual != seat and mutation != "a connection that is not taken is left open":
        yield exchange(("a", number), "lost")


def suspends() -> Generator[Op, Any, Any]:
    """Asks as long as it takes: the connection of another thread may be handed on meanwhile."""
    seat = yield load("seat")
    while seat[1] != "suspended":
        if seat[1] == "runs":
            yield cas("seat", seat, (seat[0], "wanted", seat[2]))
            yield from rings()
        seat = yield until("seat", lambda seat: seat[1] in ("runs", "suspended"))
    return seat


def test_frames_are_delivered_once_in_order_whatever_is_reset() -> None:
    resumed(2).holds(1_000)
    resumed(3, only="a").holds(10_000)


@tiers.needs_all
def test_frames_are_delivered_once_in_order_after_two_resets_of_a_listener() -> None:
    resumed(3, only="b").holds(10_000)


@pytest.mark.parametrize(
    ("mutation", "how"),
    [
        ("a goes on where it was", "a has ended|delivered|waits for ever|sleeps"),
        ("the old connection is read on", "delivered"),
        ("a connection of an earlier loss is taken", "delivered"),
        ("a connection that is not taken is left open", "waits for ever"),
    ],
)
def test_frames_are_lost_or_repeated_without_a_part_of_the_protocol(mutation: str, how: str) -> None:
    resumed(3, mutation=mutation, only="a").fails(how)


# ── the end of a link after its process was replaced ──
RUNS, SUSPENDED, HANDED = "runs", "suspended", "handed on"


def replaced(mutation: str = "") -> Scene:
    """The process at the other side has gone. Its last connection may still be handed on, and another process comes,
    before or after the link reads its loss. The link has no deadline here: only the other process can end it."""

    def at_end(view: View) -> None:
        must(view.result("link") == "ended", f"the link has {view.result('link')}")

    memory: dict[object, object] = {"resumer": (RUNS, False, False), "lost": 0, "event": 0}
    processes = [
        Process("link", ends),
        Process("loss", is_lost),
        Process("other process", partial(replaces, mutation)),
        Process("door", hands_on, is_daemon=True),
    ]
    return Scene(memory, processes, at_end=at_end)


def is_lost() -> Step:
    yield store("lost", 1)
    yield from rings()


def changes(change: Callable[[str, bool, bool], tuple[str, bool, bool]]) -> Generator[Op, Any, Any]:
    """What is done under the lock of the resumer: its state, whether it is replaced, whether it has ended."""
    state = yield load("resumer")
    while (latest := (yield cas("resumer", state, change(*state)))) != state:
        state = latest
    return state


def replaces(mutation: str) -> Step:
    """Another process of the link's name ends the link at once while that waits, else when its connection is lost."""
    is_kept = mutation != "a replacement counts only while the link waits"
    yield from changes(lambda state, _, has_ended: (state, is_kept, has_ended or state == SUSPENDED))
    yield from rings()


def hands_on() -> Step:
    """The last connection of the process that has gone. It is lost at once."""
    yield until("resumer", lambda resumer: resumer[0] == SUSPENDED)
    yield from changes(
        lambda state, is_replaced, has_ended: (
            HANDED if state == SUSPENDED and not has_ended else state,
            is_replaced,
            has_ended,
        )
    )
    yield from rings()


def ends() -> Step:
    for _ in range(2):
        while True:
            yield store("event", 0)
            if (yield load("lost")):
                break
            yield futex_wait("event", 0)
        yield from changes(lambda _, is_replaced, has_ended: (SUSPENDED, is_replaced, has_ended or is_replaced))
        while True:
            yield store("event", 0)
            state, _, has_ended = yield load("resumer")
            if state == HANDED:
                break
            if has_ended:
                return "ended"
            yield futex_wait("event", 0)
    return "lost two connections, and goes on"


def test_link_ends_whenever_another_process_comes_in_the_place_of_its_own() -> None:
    replaced().holds(100)


def test_link_waits_for_its_deadline_when_a_replacement_is_forgotten() -> None:
    replaced("a replacement counts only while the link waits").fails("sleeps|waits for ever")


# ── what is sent again: the classes themselves ──
SENT = [
    (packets.FRAME, 0, 0, b"frame"),
    (packets.LONG, 0, 0, packets.LONG_NBYTES.pack(300_000)),
    (packets.FRAME_PART, 0, 0, b"piece of 14 b."),
    (packets.END, 0, 0, b""),
    (packets.BYE, 0, 0, b"over"),
]


@pytest.mark.parametrize("acknowledged", [0, 3, *tiers.only_in_all(1, 2, 4, 5)])
def test_packets_are_handled_once_in_order_wherever_two_connections_end(acknowledged: int) -> None:
    """Each of two connections loses everything behind any byte; the other side has said before that it has so many."""
    sizes = [packets.HEAD_NBYTES + len(payload) for *_, payload in SENT]
    for first, second in itertools.product(
        range(sum(sizes[:acknowledged]), sum(sizes) + 1), range(0, sum(sizes) + 1, tiers.choose(3, 1, 1))
    ):
        queue, recorder = PacketQueue(), Recorder()
        reader = PacketReader(recorder)
        for kind, lane, source, payload in SENT:
            queue.put(kind, lane, source, payload)
        for arrives in (first, second, sum(sizes)):
            wire = CutWire([1 << 20])
            queue.flush(wire)
            del wire.bytes[arrives:]
            while reader.read(wire):
                pass
            if arrives == first:
                queue.acknowledge(min(sum(sizes[:acknowledged]), reader.nbytes_whole))
            reader.restart()
            queue.rewind(reader.nbytes)
        must(recorder.packets == SENT, f"cut after {first} and {second} bytes: {recorder.packets}")
        must(queue.nbytes == 0 and queue.nbytes_acked == sum(sizes), "something is still kept")
