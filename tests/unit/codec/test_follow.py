"""State that is sent once: who leads, who follows, and what happens when a change is missed, repeated or foreign."""

import msgspec
import pytest

from penstock import DecodeError, EndOfChannel, open_broadcast, open_inbox, open_ring
from penstock.codec import Catalogue, FrameDecoder, Interned
from penstock.codec.follow import (
    Change,
    Follower,
    Following,
    Leader,
    Leading,
    Lost,
    Picture,
    Verdict,
)

A, B, C = 0xA, 0xB, 0xC  # leaders


class Put(Change, array_like=True, frozen=True):
    key: str = "number"
    value: int = 0


class Shelf(Picture, array_like=True, frozen=True):
    items: dict[str, int] = msgspec.field(default_factory=dict)


class Halt(msgspec.Struct, array_like=True, frozen=True):
    pass


class Items:
    """The state: a dict. Refuses negative values; one that is 13 fails when half of it is done."""

    def __init__(self) -> None:
        self.items: dict[str, int] = {}
        self.becomings = 0

    def apply(self, change: Put) -> None:
        if change.value < 0:
            raise DecodeError(f"expected 0 or more, got {change.value} at $.value")
        self.items[change.key] = change.value
        if change.value == 13:
            raise RuntimeError("half done")

    def become(self, picture: Shelf) -> None:
        self.becomings += 1
        if "no" in picture.items:
            raise DecodeError("expected no such key at $.items")
        self.items = dict(picture.items)

    def picture(self, leader: int, number: int) -> Shelf:
        return Shelf(leader, number, dict(self.items))


def follower_at(number: int, leader: int = A, patience: int = 64) -> Follower[Put, Shelf]:
    follower: Follower[Put, Shelf] = Follower(Items(), "worker 1", patience)
    assert follower.take(Shelf(leader, number, {"number": number})) is Verdict.TAKEN
    return follower


def put(number: int, leader: int = A) -> Put:
    return Put(leader, number, "number", number)


def items(follower: Follower[Put, Shelf]) -> dict[str, int]:
    assert isinstance(follower.state, Items)
    return follower.state.items


def test_a_follower_begins_out_of_step_and_asks_once() -> None:
    follower: Follower[Put, Shelf] = Follower(Items(), "worker 1")
    assert not follower.is_in_step and follower.lost is None
    assert [follower.take(put(n)) for n in (7, 8, 9)] == [Verdict.LOST, Verdict.IGNORED, Verdict.IGNORED]
    assert follower.lost is not None
    assert (follower.lost.who, follower.lost.leader, follower.lost.expected) == ("worker 1", None, None)
    assert (follower.lost.found_leader, follower.lost.found) == (A, 7)
    assert "expected a picture, got change 7" in follower.lost.why
    assert items(follower) == {} and follower.ignored == 3


def test_changes_that_follow_the_picture_are_applied_one_after_the_other() -> None:
    follower = follower_at(4)
    assert [follower.take(put(n)) for n in (5, 6, 7)] == [Verdict.APPLIED] * 3
    assert items(follower) == {"number": 7} and follower.number == 7 and follower.leader == A


def test_who_is_in_step_passes_over_a_picture_without_looking_into_it() -> None:
    follower = follower_at(4)
    assert follower.take(Shelf(A, 4, {"number": 99})) is Verdict.PASSED
    assert items(follower) == {"number": 4}
    assert isinstance(follower.state, Items) and follower.state.becomings == 1
    assert follower.take(put(5)) is Verdict.APPLIED


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (put(6), "expected change 5 of leader 0000000a, got change 6 of leader 0000000a"),
        (put(5, B), "expected change 5 of leader 0000000a, got change 5 of leader 0000000b"),
        (put(1, B), "expected change 5 of leader 0000000a, got change 1 of leader 0000000b"),
    ],
    ids=["missed", "foreign", "restarted"],
)
def test_a_change_that_does_not_follow_is_told_with_both_numbers(wrong: Put, why: str) -> None:
    follower = follower_at(4)
    assert follower.take(wrong) is Verdict.LOST
    assert follower.lost == Lost("worker 1", A, 5, wrong.leader, wrong.number, why)
    assert not follower.is_in_step and items(follower) == {"number": 4} and follower.losses == 1


def test_a_missed_change_that_comes_after_all_does_not_bring_a_follower_back() -> None:
    follower = follower_at(4)
    assert follower.take(put(6)) is Verdict.LOST
    assert follower.take(put(5)) is Verdict.IGNORED
    assert items(follower) == {"number": 4}


def test_a_repeated_change_is_told_and_costs_nothing() -> None:
    follower = follower_at(4)
    follower.take(put(5))
    assert [follower.take(put(n)) for n in (5, 4, 1)] == [Verdict.REPEATED] * 3
    assert follower.is_in_step and follower.take(put(6)) is Verdict.APPLIED


def test_a_picture_brings_back_who_is_out_of_step() -> None:
    follower = follower_at(4)
    follower.take(put(7))
    follower.take(put(8))
    assert follower.take(Shelf(A, 8, {"number": 8})) is Verdict.TAKEN
    assert follower.lost is None and follower.take(put(9)) is Verdict.APPLIED and items(follower) == {"number": 9}


def test_a_picture_ahead_of_a_follower_in_step_is_taken_as_it_has_missed_something() -> None:
    follower = follower_at(4)
    assert follower.take(Shelf(A, 6, {"number": 6})) is Verdict.TAKEN
    assert follower.losses == 1 and follower.take(put(7)) is Verdict.APPLIED


def test_a_late_picture_takes_nobody_back() -> None:
    follower = follower_at(4)
    follower.take(put(5))
    assert follower.take(Shelf(A, 3, {"number": 3})) is Verdict.LATE
    assert follower.is_in_step and items(follower) == {"number": 5}
    follower.take(put(9))
    assert follower.take(Shelf(A, 4, {"number": 4})) is Verdict.LATE  # older than the state
    assert follower.take(Shelf(A, 8, {"number": 8})) is Verdict.LATE  # older than what it has seen: 9 would be missing
    assert not follower.is_in_step and items(follower) == {"number": 5}
    assert follower.take(Shelf(A, 9, {"number": 9})) is Verdict.TAKEN


def test_a_new_leader_is_followed_from_its_picture_on_and_the_former_one_no_more() -> None:
    follower = follower_at(4)
    assert follower.take(Shelf(B, 0, {})) is Verdict.TAKEN
    assert follower.take(put(5)) is Verdict.LATE
    assert follower.take(Shelf(A, 6, {"number": 6})) is Verdict.LATE
    assert follower.is_in_step and items(follower) == {}
    assert follower.take(put(1, B)) is Verdict.APPLIED and items(follower) == {"number": 1}


def test_who_asked_in_vain_asks_again_and_says_what_it_saw_last() -> None:
    follower = follower_at(4, patience=3)
    verdicts = [follower.take(put(n)) for n in range(6, 13)]
    lost, ignored = Verdict.LOST, Verdict.IGNORED
    assert verdicts == [lost, ignored, ignored, lost, ignored, ignored, lost]
    assert follower.lost is not None and follower.lost.found == 12 and follower.losses == 1


@pytest.mark.parametrize(
    "wrong",
    [Shelf(A, 1 << 40, {}), Shelf(B, 3, {})],
    ids=["with a number far ahead", "of a leader that does not exist"],
)
def test_a_follower_that_took_a_wrong_picture_doubts_itself_in_the_end(wrong: Shelf) -> None:
    follower = follower_at(4, patience=5)
    assert follower.take(wrong) is Verdict.TAKEN
    verdicts = [follower.take(put(n)) for n in range(5, 10)]
    assert verdicts[-1] is Verdict.LOST and Verdict.LOST not in verdicts[:-1]
    assert follower.take(Shelf(A, 9, {"number": 9})) is Verdict.TAKEN
    assert follower.take(put(10)) is Verdict.APPLIED


def test_a_change_that_the_state_refuses_makes_a_follower_lost_and_leaves_the_state_as_it_was() -> None:
    follower = follower_at(4)
    assert follower.take(Put(A, 5, "number", -1)) is Verdict.LOST
    assert follower.lost is not None and "expected 0 or more, got -1 at $.value" in follower.lost.why
    assert items(follower) == {"number": 4}
    assert follower.take(put(6)) is Verdict.IGNORED
    assert follower.take(Shelf(A, 6, {"number": 6})) is Verdict.TAKEN


def test_a_change_that_fails_half_way_leaves_a_follower_out_of_step_and_it_says_so() -> None:
    follower = follower_at(4)
    with pytest.raises(RuntimeError, match="half done"):
        follower.take(Put(A, 5, "other", 13))
    assert not follower.is_in_step and follower.lost is not None and "half done" in follower.lost.why
    assert follower.take(Shelf(A, 4, {"number": 4})) is Verdict.LATE  # the next change would be the sixth
    assert follower.take(put(6)) is Verdict.IGNORED
    assert follower.take(Shelf(A, 6, {"number": 6})) is Verdict.TAKEN
    assert items(follower) == {"number": 6} and follower.is_in_step


def test_a_picture_that_the_state_refuses_is_asked_for_again() -> None:
    follower = follower_at(4, patience=2)
    follower.take(put(6))
    assert follower.take(Shelf(A, 6, {"no": 1})) is Verdict.LOST
    assert not follower.is_in_step
    assert [follower.take(put(n)) for n in (7, 8)] == [Verdict.IGNORED, Verdict.LOST]
    assert follower.lost is not None and follower.lost.found == 8


def test_a_leader_answers_a_question_once_for_all_who_have_it() -> None:
    leader: Leader[Put, Shelf] = Leader(Items(), A)
    assert [(one.leader, one.number) for one in leader.pictures()] == [(A, 0)]
    for number in (1, 2, 3):
        leader.sent(put(number))
    first, second = (Lost(f"worker {n}", A, 1, A, 2, "") for n in (1, 2))
    assert leader.must_answer(first)
    assert leader.pictures()[0].items == {"number": 3}
    assert not leader.must_answer(second)
    assert leader.must_answer(Lost("worker 2", A, 1, A, 4, ""))
    assert leader.must_answer(Lost("worker 3", B, 900, B, 900, "it has not heard of us"))


def test_a_leader_takes_only_its_own_next_change() -> None:
    leader: Leader[Put, Shelf] = Leader(Items(), A)
    for wrong in (put(2), put(1, B)):
        with pytest.raises(ValueError, match="expected change 1 of leader 0000000a, got"):
            leader.sent(wrong)
    assert leader.number == 0


def test_leaders_draw_identities_of_their_own() -> None:
    assert len({Leader[Put, Shelf](Items()).identity for _ in range(50)}) == 50


# ── at the ends of channels ──────────────────────────────────────────────────────────────────────────────────────────
class Wire:
    """A sender and a receiver that keep what is sent in a list."""

    def __init__(self) -> None:
        self.sent: list[msgspec.Struct] = []
        self.fails = False
        self.greeting = None

    def greet(self, greeting) -> None:
        self.greeting = greeting

    def send(self, message, timeout=None) -> None:
        if self.fails:
            raise TimeoutError
        if self.greeting is not None:
            self.sent += self.greeting()
            self.greeting = None
        self.sent.append(message)

    def receive(self, timeout=None):
        if not self.sent:
            raise EndOfChannel
        return self.sent.pop(0)


def test_what_could_not_be_sent_has_not_happened() -> None:
    wire = Wire()
    leading = Leading(wire, Leader(Items(), A))
    leading.send(put(1))
    wire.fails = True
    with pytest.raises(TimeoutError):
        leading.send(put(2))
    wire.fails = False
    leading.send(put(2))
    assert [type(one).__name__ for one in wire.sent] == ["Shelf", "Put", "Put"]
    assert leading.leader.number == 2


@pytest.mark.parametrize("moment", ["before it is sent", "after it is sent", "before it is counted"])
def test_an_interrupt_that_leaves_open_whether_a_change_was_sent_leaves_nobody_with_another_state(moment: str) -> None:
    wire = Wire()
    leading = Leading(wire, Leader(Items(), A))
    follower = Follower[Put, Shelf](Items())
    leading.send(put(1))
    send, sent = wire.send, leading.leader.sent

    def interrupted(*arguments: object) -> None:
        if moment == "after it is sent":
            send(*arguments)
        raise KeyboardInterrupt

    if moment == "before it is counted":
        leading.leader.sent = interrupted  # type: ignore[method-assign]
    else:
        wire.send = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        leading.send(Put(A, 2, "lost", 1))
    wire.send, leading.leader.sent = send, sent  # type: ignore[method-assign]
    leading.send(put(leading.leader.next_number))
    leading.send(Put(A, leading.leader.next_number, "last", 1))
    list(Following(wire, follower, lambda lost: None))
    assert follower.is_in_step
    assert isinstance(leading.leader.state, Items)
    assert items(follower) == leading.leader.state.items


def test_a_change_that_is_not_the_next_one_is_not_sent() -> None:
    wire = Wire()
    leading = Leading(wire, Leader(Items(), A))
    with pytest.raises(ValueError, match="expected change 1"):
        leading.send(put(2))
    assert not wire.sent


def test_a_change_that_the_leaders_own_state_refuses_is_followed_by_a_picture() -> None:
    wire = Wire()
    leading = Leading(wire, Leader(Items(), A))
    leading.send(put(1))
    with pytest.raises(DecodeError):
        leading.send(Put(A, 2, "number", -1))
    leading.send(put(3))
    following = Following(wire, follower := Follower[Put, Shelf](Items()), lambda lost: None)
    assert [one.number for one in following] == [1, 3]
    assert items(follower) == {"number": 3}


def test_a_following_end_gives_the_changes_and_whatever_else_is_sent() -> None:
    wire = Wire()
    leading = Leading(wire, Leader(Items(), A))
    leading.send(put(1))
    wire.send(Halt())
    leading.send(put(2))
    asked: list[Lost] = []
    got = list(Following(wire, Follower[Put, Shelf](Items()), asked.append))
    assert [type(one).__name__ for one in got] == ["Put", "Halt", "Put"] and not asked


def test_one_that_missed_a_change_asks_and_goes_on_while_the_others_pass_over_its_picture() -> None:
    wires = Wire(), Wire()
    both = Wire()
    both.send = lambda message, timeout=None: [wire.send(message) for wire in wires]  # type: ignore[method-assign]
    both.greet = lambda greeting: [wire.greet(greeting) for wire in wires]  # type: ignore[method-assign]
    leading = Leading(both, Leader(Items(), A))
    ends = [Following(wire, Follower[Put, Shelf](Items(), f"{n}"), leading.hear) for n, wire in enumerate(wires)]
    for number in range(1, 8):
        leading.send(put(number))
        if number == 3:
            del wires[1].sent[-1]
        for n, end in enumerate(ends):
            if (n, number) not in ((1, 3), (1, 4)):
                assert end.receive().number == number
            elif number == 4:
                with pytest.raises(EndOfChannel):
                    end.receive()
    assert [items(end.follower) for end in ends] == [{"number": 7}] * 2
    becomings = [end.follower.state.becomings for end in ends if isinstance(end.follower.state, Items)]
    assert becomings == [1, 2], "the one that was in step has taken the picture of the other"


class Colour(msgspec.Struct, array_like=True, frozen=True):
    name: str


class Painted(Picture, array_like=True, frozen=True):
    colour: Interned[Colour]


def test_a_picture_stands_alone_for_who_has_missed_what_was_defined_before_it() -> None:
    with open_ring(messages=(Painted,)) as channel, channel.sender() as sender, channel.receiver() as receiver:
        message = Painted(A, 1, Interned(Colour("blue")))
        sender.send(message)
        sender.send(message)
        sender.greet(lambda: [message])
        sender.send(message)
        received = []
        for _ in range(4):
            decoder = FrameDecoder(Catalogue(Painted))
            try:
                received.append(decoder.decode(receiver._end.receive_frame(5)).colour.value)
            except DecodeError:
                received.append(None)
        assert received == [Colour("blue"), None, Colour("blue"), None]


def test_a_receiver_that_comes_late_or_again_is_shown_the_state_before_the_next_change() -> None:
    with (
        open_broadcast(receivers=2, messages=(Put, Shelf, Halt), on_receiver_death="ignore") as channel,
        open_inbox(senders=2, messages=(Lost,)) as back,
    ):
        sender = channel.sender()
        leading = Leading(sender, Leader(Items()))
        questions = back.receiver()
        asking = back.sender()
        first = channel.receiver(0)
        one = Following(first, Follower[Put, Shelf](Items(), "first"), asking.send)
        second = channel.receiver(1)
        two = Following(second, Follower[Put, Shelf](Items(), "second"), asking.send)

        def step() -> None:
            leading.send(put(leading.leader.next_number, leading.leader.identity), timeout=5)

        for _ in range(3):
            step()
        assert [one.receive(5).number for _ in range(3)] == [1, 2, 3]
        assert [two.receive(5).number for _ in range(3)] == [1, 2, 3]
        second.close()
        step()
        again = channel.receiver(1)
        three = Following(again, Follower[Put, Shelf](Items(), "second again"), asking.send)
        step()
        assert three.receive(5).number == 5 and items(three.follower) == {"number": 5}
        assert [one.receive(5).number for _ in range(2)] == [4, 5]
        assert one.follower.losses == 0
        with pytest.raises(TimeoutError):
            questions.receive(timeout=0)
        for end in (first, again, sender, questions, asking):
            end.close()
