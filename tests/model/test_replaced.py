"""The receiver of an inbox is replaced while senders come, send, die and close: see inbox.py for what is what.

What must be so, whatever the order:
  a record that was sent while a receiver was counted comes to that one, once and in order, if it lives
  no receiver sleeps while such a record is unread: no ready bit is lost, and no wake-up
  nothing is sent without a receiver while one asks to be let in, and it is let in

A request is made by the receiver, and by a sender that finds it joining: in its constructor, if it follows one that
died, and in look_at_ends. Of these two look_at_ends alone would do, for a newcomer looks at the ends first.
"""

from functools import partial

import pytest

from tests import tiers
from tests.model.explorer import Process, Step, View, must, store, until
from tests.model.inbox import FIRST, LANES, NO_RECEIVER, Receiver, Sender, follows, inbox, reap_receiver, reap_sender
from tests.model.scene import ASLEEP, BUSY, Scene

SECOND = FIRST + 1
CLOSED = ("closed", FIRST)

CONSTRUCTOR = "the constructor does not look who is joining"
LOOK_AT_ENDS = "look_at_ends does not ask for it"
REQUEST = "the constructor does not ask"
SECOND_LOOK = "no second look who was admitted"


def all_that_was_sent_to_the_last_is_read(view: View) -> None:
    _, epoch = view["receiver"]
    for i in range(LANES):
        committed, read = view["committed", i], view["read", i]
        must(epoch not in committed or read == len(committed), f"lane {i}: {read} were read of {committed}")


def nothing_was_sent_to_nobody(view: View) -> None:
    for i in range(LANES):
        must(
            NO_RECEIVER not in view["committed", i],
            f"lane {i}: sent to nobody, and one is joining: {view['committed', i]}",
        )


# ── the receiver before has closed, and none has come since ──────────────────────────────────────────────────────────
def coming(senders: tuple[str, ...], records: tuple[int, ...], closes: bool, mutation: str = "") -> Scene:
    """The second receiver comes among these senders, some of them newcomers; it reads until the end, or all.

    Where there is one sender, the receiver before left its ready bit: so the second looks there before it is let in.
    """

    def sends(lane: int) -> Step:
        me = Sender(lane, mutation)
        if senders[lane] == "expected":
            yield from me.come(("expected", FIRST - 1))
        for _ in range(records[lane]):
            yield from me.send()
        if closes:
            yield from me.close()

    def receives() -> Step:
        me = Receiver(mutation, is_counted=False)
        yield from me.come(CLOSED)
        actual = yield from me.receive(1 << 30 if closes else sum(records))
        return actual

    def at_end(view: View) -> None:
        nothing_was_sent_to_nobody(view)
        must(view.result("receiver")[0] == records, f"{view.result('receiver')[0]} of {records} records were read")

    processes = [Process(f"sender {i}", partial(sends, i)) for i in range(LANES) if senders[i] != "closed"]
    processes.append(Process("receiver", receives))
    words = inbox(senders, "closed") | {"ready": 0 if all(records) else 1}
    return Scene(words, processes, invariant=nothing_was_sent_to_nobody, at_end=at_end, must_end=True)


@pytest.mark.parametrize("model", [*tiers.only_in_all("sc", "tso"), "weak"])
@pytest.mark.parametrize(
    ("senders", "records"),
    [(("live", "closed"), (2, 0)), (("closed", "expected"), (0, 1)), (("live", "closed"), (1, 0))],
)
def test_joining_receiver_gets_every_record_of_a_sender_that_was_alone(
    senders: tuple[str, ...], records: tuple[int, ...], model: str
) -> None:
    coming(senders, records, closes=True).holds(2_500, model)


def test_receiver_and_sender_may_join_while_another_sender_sends() -> None:
    coming(("live", "expected"), (1, 1), closes=False).holds(200_000)


def test_cleared_ready_bit_needs_a_second_look_at_admissions() -> None:
    """Not counted, says find_in; the sender admits, commits and sets the bit; then it is cleared unseen."""
    coming(("live", "closed"), (1, 0), closes=False, mutation=SECOND_LOOK).fails(ASLEEP)


def test_sender_admits_a_receiver_that_has_not_yet_asked() -> None:
    """Mode says joining, the request has not been made: it sees a receiver, and sends to none."""
    coming(("live", "closed"), (1, 0), closes=False, mutation=LOOK_AT_ENDS).fails("sent to nobody")
    coming(("closed", "expected"), (0, 1), closes=False, mutation=LOOK_AT_ENDS).fails("sent to nobody")


# ── a sender dies ────────────────────────────────────────────────────────────────────────────────────────────────────
def dying_sender(records: int, comes: bool = True, mutation: str = "") -> Scene:
    """It may die anywhere, while the receiver comes, or has come and asked."""

    def sends() -> Step:
        me = Sender(0, mutation)
        for _ in range(records):
            yield from me.send()

    def receives() -> Step:
        me = Receiver(mutation, SECOND, is_counted=False)
        if comes:
            yield from me.come(CLOSED)
        yield from me.receive()

    def at_end(view: View) -> None:
        nothing_was_sent_to_nobody(view)
        all_that_was_sent_to_the_last_is_read(view)

    words = inbox(("live", "expected"), "closed") | {("is buried", "sender"): False}
    if not comes:
        words["receiver"] = ("live", SECOND)
        words |= {("mode", i): ("joining", SECOND) for i in range(LANES)} | {("joining", i): 1 for i in range(LANES)}
    processes = [
        Process("sender", sends, may_die=True),
        Process("receiver", receives, is_daemon=True),
        Process("reaper", partial(reap_sender, "sender", 0, mutation), is_daemon=True),
    ]
    return Scene(words, processes, at_end=at_end, must_end=True)


@pytest.mark.parametrize(
    ("records", "comes", "model"), [*tiers.only_in_all((1, True, "sc")), (1, True, "weak"), (2, False, "sc")]
)
def test_committed_records_of_a_dead_sender_reach_admitted_receivers(records: int, comes: bool, model: str) -> None:
    dying_sender(records, comes).holds(20_000, model)


def test_unannounced_record_is_announced_by_the_reaper_or_found() -> None:
    dying_sender(1, mutation="the reaper says nothing").holds(20_000)
    dying_sender(1, mutation="look_at_ends does not look after it").holds(20_000)
    neither = "the reaper says nothing, look_at_ends does not look after it"
    dying_sender(1, mutation=neither).fails("0 were read")


def following_sender(records: int, mutation: str = "") -> Scene:
    """It may die anywhere, and another takes its place; the receiver has come when it has asked in every lane."""

    def sends() -> Step:
        me = Sender(0, mutation)
        for _ in range(records):
            yield from me.send()

    def another() -> Step:
        me = Sender(0, mutation)
        yield from follows("sender", ("word", 0), me.come)
        yield from me.send()

    def comes() -> Step:
        yield from Receiver(mutation, is_counted=False).come(CLOSED)

    processes = [
        Process("sender", sends, may_die=True),
        Process("another", another, is_daemon=True),
        Process("receiver", comes),
        Process("reaper", partial(reap_sender, "sender", 0, mutation), is_daemon=True),
    ]

    def at_end(view: View) -> None:
        nothing_was_sent_to_nobody(view)
        must(view.is_done("another") or not view.is_dead("sender"), "the one that follows is left waiting")

    words = inbox(("live", "expected"), "closed") | {("is buried", "sender"): False}
    return Scene(words, processes, invariant=nothing_was_sent_to_nobody, at_end=at_end, must_end=True)


@pytest.mark.parametrize(("records", "model"), [*tiers.only_in_all((1, "sc")), (1, "weak"), (2, "sc")])
def test_a_request_that_a_sender_took_into_its_grave_is_seen_by_the_next(records: int, model: str) -> None:
    following_sender(records).holds(20_000, model)


def test_successor_that_ignores_joining_receivers_sends_to_none() -> None:
    """The dead one has taken the request out of the word, and had not let anybody in. Either look finds it."""
    following_sender(1, CONSTRUCTOR).holds(20_000)
    following_sender(1, f"{CONSTRUCTOR}, {LOOK_AT_ENDS}").fails("sent to nobody")


# ── the receiver dies, or closes, and another follows ────────────────────────────────────────────────────────────────
def dying_receiver(mutation: str = "") -> Scene:
    """The first, which has a record to read, dies anywhere; the sender sends one more, to any receiver there is."""

    def sends() -> Step:
        me = Sender(0, mutation)
        me.seen_changes, me.committed = 0, (FIRST,)
        yield from me.send()

    def first() -> Step:
        me = Receiver(mutation)
        me.seen_changes = 0
        yield from me.try_find()
        yield from me.try_find()

    def second() -> Step:
        me = Receiver(mutation, is_counted=False)
        yield from follows("first", "receiver", me.come)
        yield from me.receive()

    words = inbox(("live", "expected")) | {("committed", 0): (FIRST,), "ready": 1, ("is buried", "first"): False}
    processes = [
        Process("sender", sends),
        Process("first", first, may_die=True),
        Process("second", second, is_daemon=True),
        Process("reaper", partial(reap_receiver, "first", mutation), is_daemon=True),
    ]

    def at_end(view: View) -> None:
        if view.is_dead("first"):
            all_that_was_sent_to_the_last_is_read(view)

    return Scene(words, processes, at_end=at_end, must_end=True)


def test_records_after_admission_reach_the_successor_receiver() -> None:
    dying_receiver().holds(200_000)


def test_records_lie_unread_without_a_second_look_at_admissions() -> None:
    dying_receiver(SECOND_LOOK).fails("were read of")
    closing_receiver((2, 0), SECOND_LOOK).fails("were read of")


def dies_while_it_comes(mutation: str = "") -> Scene:
    """The second dies anywhere while it comes, or leaves at once; the sender goes on until it has let the third in."""

    def sends() -> Step:
        yield from Sender(0, mutation).send_to("third")

    def second() -> Step:
        me = Receiver(mutation, is_counted=False)
        yield from me.come(CLOSED)
        yield from me.let_go()
        yield store(("is buried", "second"), True)

    def third() -> Step:
        me = Receiver(mutation, is_counted=False)
        yield from follows("second", "receiver", me.come)
        yield store("third", me.epoch)

    words = inbox(("live", "expected"), "closed") | {("is buried", "second"): False, "third": NO_RECEIVER}
    processes = [
        Process("sender", sends),
        Process("second", second, may_die=True),
        Process("third", third),
        Process("reaper", partial(reap_receiver, "second", mutation, SECOND), is_daemon=True),
    ]

    def at_end(view: View) -> None:
        must(view["committed", 0] == (view["third"],), f"sent to {view['committed', 0]}")

    return Scene(words, processes, at_end=at_end, must_end=True)


def test_sender_admits_a_receiver_when_its_predecessor_dies_anywhere() -> None:
    dies_while_it_comes().holds(5_000)
    dies_while_it_comes().holds(5_000, "weak")


def test_admission_needs_the_request_or_the_look_at_the_ends() -> None:
    dies_while_it_comes(REQUEST).holds(5_000)
    dies_while_it_comes(LOOK_AT_ENDS).holds(5_000)
    dies_while_it_comes(f"{REQUEST}, {LOOK_AT_ENDS}").fails(BUSY)


def closing_receiver(records: tuple[int, ...], mutation: str = "") -> Scene:
    """The first closes after one record; another comes as soon as it may."""

    def sends(lane: int) -> Step:
        me = Sender(lane, mutation)
        me.seen_changes = 0
        for _ in range(records[lane]):
            yield from me.send()

    def first() -> Step:
        me = Receiver(mutation)
        me.seen_changes = 0
        yield from me.receive(1)

    def second() -> Step:
        me = Receiver(mutation, is_counted=False)
        yield until("receiver", is_closed)
        yield from me.come(CLOSED)
        yield from me.receive()

    processes = [
        *(Process(f"sender {i}", partial(sends, i)) for i in range(LANES) if records[i]),
        Process("first", first),
        Process("second", second, is_daemon=True),
    ]
    return Scene(inbox(), processes, at_end=all_that_was_sent_to_the_last_is_read, must_end=True)


def is_closed(word: tuple[str, int]) -> bool:
    return word[0] == "closed"


@pytest.mark.parametrize(("records", "model"), [*tiers.only_in_all(((2, 0), "sc")), ((2, 0), "weak"), ((1, 1), "sc")])
def test_closing_receiver_hands_its_place_over_without_a_shared_record(records: tuple[int, ...], model: str) -> None:
    closing_receiver(records).holds(10_000, model)
