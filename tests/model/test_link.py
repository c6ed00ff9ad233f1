"""The protocol of a link: the end of a transfer, cut within each frame, killed, silent one way; and how a link begins
with two epochs. A direction of the connection is a process that carries one piece at a time, so that each cut has a
place; the handshake is walked with its own classes.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from penstock.bridge import BridgeRefused, LinkSpec
from penstock.bridge.handshake import ConnectorHandshake, Handshake, ListenerHandshake
from penstock.bridge.liveness import Liveness
from tests import tiers
from tests.model.explorer import Process, Step, View, futex_wait, futex_wake, load, must, store, until, until_gone
from tests.model.scene import ASLEEP, WAITS, Scene
from tests.support.links import SECRET

FRAMES = 2
# What one side sends: a frame in two pieces, one in one, then BYE. It is killed before, after, or between.
SENT = (("head", 0), ("rest", 0), ("rest", 1), ("bye", 0))
DAMAGED = ("damaged", 7)  # a piece without its checksum: of which frame, or of which kind, is not known
WRITES = (1, len(SENT))  # pieces that have been written after each call


def transfer(*, cut: str = "", dies: str = "", flips: str = "", mutation: str = "") -> Scene:
    """Side a sends its frames and is done; side b delivers them and is done. `cut`: directions that may be cut, by the
    side that they lead to; `dies`: sides that may be killed; `flips`: sides with pieces that may arrive damaged."""

    def at_end(view: View) -> None:
        delivered = view["delivered"]
        must(delivered == tuple(range(len(delivered))), f"delivered {delivered}")
        ends = {side: view.result(side) for side in "ab"}
        for side, end in ends.items():
            must(view.is_dead(side) or end is not None, f"{side} has not ended")
        if ends["a"] == "done":
            must(len(delivered) == FRAMES, f"a is done, and b has delivered {delivered}")
        is_faulty = any(view[fault, side] for fault in ("cut", "flip") for side in "ab")
        if not is_faulty and not any(view.is_dead(side) for side in "ab"):
            must(set(ends.values()) == {"done"}, f"without a fault they ended as {ends}")

    memory = {("out", "a"): (), ("out", "b"): (), "delivered": ()}
    memory |= {(word, side): 0 for word in ("cut", "flip", "end", "event") for side in "ab"}
    memory |= {("in", side): () for side in "ab"}
    processes = [
        Process("a", partial(sends, mutation), may_die="a" in dies),
        Process("b", partial(receives, mutation), may_die="b" in dies),
        Process("to b", partial(carries, "a", "b", len(SENT)), is_daemon=True),
        Process("to a", partial(carries, "b", "a", 1), is_daemon=True),
        *(Process(f"cuts {side}", partial(cuts, side, mutation), is_daemon=True) for side in cut),
        *(Process(f"flips {side}", partial(flips_bits, side), is_daemon=True) for side in flips),
        *(Process(f"reaps {side}", partial(closes, side, mutation), is_daemon=True) for side in dies),
    ]
    return Scene(memory, processes, at_end=at_end, limit=400_000)


def rings(side: str) -> Step:
    yield store(("event", side), 1)
    yield futex_wake(("event", side), 1)


def carries(source: str, target: str, count: int) -> Step:
    """One direction: pieces in their order, until it is cut."""
    arrived: tuple[tuple[str, int], ...] = ()
    for carried in range(count):
        pieces = yield until(("out", source), lambda pieces, carried=carried: len(pieces) > carried)
        is_cut = yield load(("cut", target))
        if is_cut:
            return
        is_flipped = yield load(("flip", target))
        arrived = (*arrived, DAMAGED if is_flipped else pieces[carried])
        yield store(("in", target), arrived)
        yield from rings(target)


def flips_bits(side: str) -> Step:
    """At any time, or never: pieces for the side arrive damaged from then on."""
    yield store(("flip", side), 1)


def cuts(side: str, mutation: str) -> Step:
    """At any time, or never: nothing reaches the side any more, and after a while it takes the other one for dead."""
    yield store(("cut", side), 1)
    if mutation != "no silence":
        yield store(("end", side), "silent")
        yield from rings(side)


def closes(side: str, mutation: str) -> Step:
    """The kernel of a process that was killed: the other side sees the end of the connection, unless that is cut."""
    yield until_gone(side)
    if mutation != "no end of the connection":
        yield from ends(side)


def ends(side: str) -> Step:
    """The connection ends: the other side sees that, unless it is cut."""
    other = "b" if side == "a" else "a"
    is_cut = yield load(("cut", other))
    if not is_cut:
        yield store(("end", other), "closed")
        yield from rings(other)


def sends(mutation: str) -> Step:
    for count in WRITES:
        yield store(("out", "a"), SENT[:count])
    if mutation == "a is done when it has said so":
        return "done"
    while True:
        yield store(("event", "a"), 0)
        end = yield load(("end", "a"))
        pieces = yield load(("in", "a"))
        is_damaged = DAMAGED in pieces and mutation != "no checksum"
        if pieces and not is_damaged:
            return "done"
        if end or is_damaged:
            yield from ends("a")
            return "died"
        yield futex_wait(("event", "a"), 0)


def receives(mutation: str) -> Step:
    taken = 0
    delivered: tuple[int, ...] = ()
    while True:
        yield store(("event", "b"), 0)
        end = yield load(("end", "b"))  # before the pieces: what came before the end is delivered
        pieces = yield load(("in", "b"))
        for number in range(taken, len(pieces)):
            part, frame = pieces[number]
            if part == "damaged" and mutation != "no checksum":
                yield from ends("b")
                return "died"
            if part in ("damaged", "head" if mutation == "a frame is there with its head" else "rest"):
                delivered = (*delivered, frame)
                yield store("delivered", delivered)
            if part == "bye":
                yield store(("out", "b"), (("bye", 0),))
                return "done"
        taken = len(pieces)
        if end:
            yield from ends("b")
            return "died"
        yield futex_wait(("event", "b"), 0)


def test_a_transfer_ends_at_both_sides_and_delivers_everything() -> None:
    transfer().holds(100)


@pytest.mark.parametrize("cut", ["a", "b", pytest.param("ab", marks=tiers.needs_all)])
def test_link_cut_within_a_frame_ends_both_sides_after_a_prefix(cut: str) -> None:
    transfer(cut=cut).holds(300)


@pytest.mark.parametrize("dies", ["a", "b"])
def test_side_killed_anywhere_ends_the_other_side_after_a_prefix(dies: str) -> None:
    transfer(dies=dies).holds(300)


@tiers.needs_all
def test_side_killed_on_a_cut_link_is_noticed_by_its_silence() -> None:
    transfer(cut="b", dies="a").holds(1_000)
    transfer(cut="a", dies="b").holds(1_000)


@pytest.mark.parametrize("flips", ["a", "b"])
def test_a_piece_that_is_damaged_ends_both_sides_and_is_not_delivered(flips: str) -> None:
    transfer(flips=flips).holds(100)


# ── what each part is there for ──
@pytest.mark.parametrize(
    ("mutation", "cut", "dies", "how"),
    [
        ("no silence", "b", "", f"{WAITS}|{ASLEEP}"),
        ("no silence", "a", "", f"{WAITS}|{ASLEEP}"),
        ("no end of the connection", "", "a", f"{WAITS}|{ASLEEP}"),
        ("no end of the connection", "", "b", f"{WAITS}|{ASLEEP}"),
        ("a is done when it has said so", "b", "", "a is done, and b has delivered"),
        ("a is done when it has said so", "", "b", "a is done, and b has delivered"),
    ],
)
def test_without_its_part_a_side_hangs_or_takes_the_link_for_done(mutation: str, cut: str, dies: str, how: str) -> None:
    transfer(cut=cut, dies=dies, mutation=mutation).fails(how)


def test_without_a_checksum_a_damaged_frame_is_delivered_or_a_death_missed() -> None:
    transfer(flips="b", mutation="no checksum").fails("delivered")


def test_a_frame_that_is_delivered_with_its_head_would_be_torn() -> None:
    """A long frame crosses in pieces: an incomplete frame must not be delivered."""

    def torn(view: View) -> None:
        whole = [frame for part, frame in view["in", "b"] if part == "rest"]
        must(set(view["delivered"]) <= set(whole), "a frame was delivered whose rest has not come")

    replace(transfer(cut="b"), invariant=torn).holds(300)
    replace(transfer(cut="b", mutation="a frame is there with its head"), invariant=torn).fails("rest has not come")


# ── how a link begins: the classes themselves ──
def sides(epoch: int, awaited: int) -> tuple[Handshake, Handshake]:
    """A connector of one epoch, and the listener's side of its connection, which awaits another or the same."""
    return (
        ConnectorHandshake(LinkSpec("link", epoch, "connector"), SECRET),
        ListenerHandshake([LinkSpec("link", awaited, "listener")], SECRET),
    )


def steps(connector: Handshake, listener: Handshake) -> Iterator[None]:
    """Delivers one message at a time, of either side; ends when none is under way, or one side has refused."""
    while connector.outbox or listener.outbox:
        for source, target in ((connector, listener), (listener, connector)):
            if source.outbox:
                message = source.outbox.pop(0)
                try:
                    target.receive(message)
                except BridgeRefused:
                    pass
                yield


@pytest.mark.parametrize("cut_new", [*(pytest.param(count, marks=tiers.needs_all) for count in range(5)), 5, 6])
def test_only_the_awaited_epoch_begins_when_two_epochs_connect(cut_new: int) -> None:
    """A process of the epoch before, and the one of this epoch, connect at a time; each is cut after any message."""
    whole = [sum(1 for _ in steps(*sides(epoch, 2))) for epoch in (1, 2)]
    assert whole[1] == 6
    began = 0
    for cut_old in tiers.choose((0, 3), tuple(range(whole[0] + 1)), tuple(range(whole[0] + 1))):
        for turns_of_old in itertools.combinations(range(cut_old + cut_new), cut_old):
            order = [0 if turn in turns_of_old else 1 for turn in range(cut_old + cut_new)]
            connections = [sides(1, 2), sides(2, 2)]
            walks = [steps(*connection) for connection in connections]
            for connection in order:
                next(walks[connection], None)
            (old, listens_to_old), (new, listens_to_new) = connections
            must(old.remote is None and listens_to_old.remote is None, "the old epoch has begun")
            if listens_to_new.remote is not None:
                began += 1
                must(new.remote is not None, "the listener has begun alone")
    assert (began > 0) == (cut_new == whole[1]), "it begins with the last message"


def test_handshake_without_epoch_check_lets_the_old_process_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.bridge.handshake.differences", lambda here, there: [])
    connector, listener = sides(1, 2)
    for _ in steps(connector, listener):
        pass
    assert listener.remote is not None


# ── heartbeats ──
@pytest.mark.parametrize(("heartbeat", "silence"), [(1, 2), (1, 3), (2, 5)])
def test_side_is_dead_exactly_when_no_byte_came_for_the_silence(heartbeat: int, silence: int) -> None:
    """Every choice of lost heartbeats, a tick of the clock at a time, by the class itself."""
    ticks = 12
    for lost in itertools.product((False, True), repeat=ticks // heartbeat + 1):
        sender, receiver = Liveness(heartbeat, silence, 0.0), Liveness(heartbeat, silence, 0.0)
        last, number = 0, 0
        for now in range(ticks + 1):
            if sender.beat(now):
                if not lost[number]:
                    receiver.hear(now)
                    last = now
                number += 1
            must(receiver.is_silent(now) == (now - last >= silence), f"lost {lost}: at {now}, last heard at {last}")
            must(receiver.due_at <= last + silence, "it would look too late")
        must(number >= ticks // heartbeat, "a heartbeat was not sent")
