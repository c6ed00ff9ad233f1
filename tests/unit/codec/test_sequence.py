"""Changes in sequence: one that is missed, repeated or foreign is noticed, and the whole state makes good for it."""

import pickle
from typing import Any

import pytest

from penstock import Timeout
from penstock.codec.sequence import SequenceCheck, Sequenced, SequenceSender
from penstock.lowlevel import OutOfStep

A, B = 0xAAAAAAAA, 0xBBBBBBBB


class Whole(Sequenced, array_like=True, frozen=True):
    pass


class Put(Sequenced, array_like=True, frozen=True):
    pass


class Sent(list[Any]):
    """A sender that keeps what it sends, and raises `error` before or after it."""

    error: BaseException | None = None
    is_sent_before = False

    def send(self, message: Any, timeout: float | None = None) -> None:
        if self.error is None or self.is_sent_before:
            self.append(message)
        if self.error is not None:
            raise self.error


def begun(number: int = 0) -> SequenceCheck:
    check = SequenceCheck()
    check.begin(Whole(A, number))
    return check


# ── the receiver ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_changes_in_their_order_are_in_step() -> None:
    check = begun(6)
    for number in (7, 8, 9):
        check.check(Put(A, number))


@pytest.mark.parametrize(
    ("actual", "what"),
    [((A, 9), "missed"), ((A, 7), "repeated"), ((B, 8), "of another leader"), ((A, 0), "older than all")],
)
def test_any_other_change_raises_with_both_leaders_and_numbers(actual: tuple[int, int], what: str) -> None:
    check = begun(6)
    check.check(Put(A, 7))
    with pytest.raises(OutOfStep) as raised:
        check.check(Put(*actual))
    assert (raised.value.expected, raised.value.actual) == ((A, 8), actual), what
    assert str(raised.value) == (
        f"expected change 8 of leader aaaaaaaa, got change {actual[1]} of leader {actual[0]:08x}"
    )


def test_a_change_before_the_whole_state_is_out_of_step() -> None:
    with pytest.raises(OutOfStep, match="expected the whole state, got change 1 of leader aaaaaaaa") as raised:
        SequenceCheck().check(Put(A, 1))
    assert raised.value.expected is None


def test_a_missed_change_that_comes_late_does_not_bring_the_receiver_back() -> None:
    check = begun()
    for number in (2, 1, 3):
        with pytest.raises(OutOfStep):
            check.check(Put(A, number))
    check.begin(Whole(B, 9))
    check.check(Put(B, 10))


def test_the_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(OutOfStep((A, 1), (B, 2))))
    assert (error.expected, error.actual) == ((A, 1), (B, 2)) and "leader bbbbbbbb" in str(error)


# ── the leader ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_whole_state_comes_first() -> None:
    sequence = SequenceSender(sent := Sent(), A)
    with pytest.raises(ValueError, match="expected the whole state first, got change 1"):
        sequence.send(Put(A, 1))
    sequence.send_whole(Whole(A, 0))
    sequence.send(Put(A, sequence.next_number))
    assert [message.number for message in sent] == [0, 1]


@pytest.mark.parametrize("wrong", [Put(A, 2), Put(A, 0), Put(B, 1)])
def test_a_change_that_is_not_the_next_one_is_not_sent(wrong: Put) -> None:
    sequence = SequenceSender(sent := Sent(), A)
    sequence.send_whole(Whole(A, 0))
    with pytest.raises(ValueError, match="expected number 1 of leader aaaaaaaa, got"):
        sequence.send(wrong)
    assert len(sent) == 1


def test_a_change_that_could_not_be_sent_has_not_happened() -> None:
    sequence = SequenceSender(sent := Sent(), A)
    sequence.send_whole(Whole(A, 0))
    sent.error = Timeout("no room")
    with pytest.raises(Timeout):
        sequence.send(Put(A, 1))
    sent.error = None
    sequence.send(Put(A, 1))
    assert [message.number for message in sent] == [0, 1]


@pytest.mark.parametrize("is_sent_before", [False, True])
def test_a_change_that_may_have_been_sent_is_followed_by_the_whole_state(is_sent_before: bool) -> None:
    sequence, check = SequenceSender(sent := Sent(), A), SequenceCheck()
    sequence.send_whole(Whole(A, 0))
    sequence.send(Put(A, 1))
    sent.error, sent.is_sent_before = KeyboardInterrupt(), is_sent_before
    with pytest.raises(KeyboardInterrupt):
        sequence.send(Put(A, 2))
    sent.error = None
    with pytest.raises(ValueError, match="whole state first"):
        sequence.send(Put(A, sequence.next_number))
    sequence.send_whole(Whole(A, sequence.number))
    sequence.send(Put(A, sequence.next_number))
    for message in sent:
        check.begin(message) if isinstance(message, Whole) else check.check(message)
    assert len(sent) == 4 + is_sent_before


def test_leaders_draw_identities_of_their_own() -> None:
    assert len({SequenceSender(Sent()).leader for _ in range(100)}) == 100
