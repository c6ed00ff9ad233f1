"""The verdict board: causes and lists of requests, by group and incarnation."""

import itertools
import time

import numpy as np

from penstock import lowlevel
from penstock.engine.cluster.verdict_board import MAX_TAG, Cause, Verdict, VerdictBoard, request_words
from tests.conftest import eventually, spawn

CAPACITY = 8


def boards(groups: int = 2) -> tuple[VerdictBoard, VerdictBoard]:
    page = VerdictBoard.create(groups, CAPACITY)
    return VerdictBoard(page, writable=True), VerdictBoard(page)


def test_verdict_is_none_until_a_cause_is_written() -> None:
    writing, reading = boards()
    writing.write_requests(1, 1, 1, [request_words([0, 2], [5, 6])], False)
    assert reading.verdict(1, 1) is None
    writing.write_cause(1, 1, Cause.ITSELF)
    assert reading.verdict(1, 1) == Verdict(Cause.ITSELF, frozenset({(0, 5), (2, 6)}), False)
    assert reading.verdict(0, 1) is None and reading.verdict(1, 2) is None


def test_verdict_has_the_last_list_of_its_incarnation() -> None:
    writing, reading = boards()
    writing.write_cause(0, 3, Cause.OUTSIDE)
    assert reading.verdict(0, 3) == Verdict(Cause.OUTSIDE, frozenset(), False), "no step was sent"
    for tag in range(20):
        lists = [request_words([1] * 4, np.arange(4) + tag), request_words([0], [(1 << 31) - 1])]
        writing.write_requests(0, 3, tag, lists, False)
        expected = frozenset({*((1, tag + number) for number in range(4)), (0, (1 << 31) - 1)})
        assert reading.verdict(0, 3) == Verdict(Cause.OUTSIDE, expected, False)
    writing.write_requests(0, 3, 20, [request_words([4], [9])], True)
    assert reading.verdict(0, 3) == Verdict(Cause.OUTSIDE, frozenset({(4, 9)}), True)
    writing.write_requests(0, 3, 21, [], False)
    assert reading.verdict(0, 3) == Verdict(Cause.OUTSIDE, frozenset(), False)


def test_verdict_stays_while_the_next_incarnation_runs() -> None:
    writing, reading = boards()
    writing.write_requests(0, 1, 1, [request_words([0], [5])], False)
    writing.write_cause(0, 1, Cause.ITSELF)
    writing.write_requests(0, 2, 1, [request_words([0], [6])], False)
    assert reading.verdict(0, 1) == Verdict(Cause.ITSELF, frozenset({(0, 5)}), False)
    writing.write_cause(0, 2, Cause.PLANNED)
    assert reading.verdict(0, 1) == Verdict(Cause.ITSELF, frozenset({(0, 5)}), False)
    assert reading.verdict(0, 2) == Verdict(Cause.PLANNED, frozenset({(0, 6)}), False)


def test_verdict_is_unknown_when_a_later_incarnation_has_its_place() -> None:
    writing, reading = boards()
    writing.write_requests(0, 1, 1, [request_words([0], [5])], False)
    writing.write_cause(0, 1, Cause.ITSELF)
    writing.write_requests(0, 3, 1, [request_words([0], [6])], False)
    assert reading.verdict(0, 1) == Verdict(Cause.UNKNOWN, frozenset(), False)
    writing.write_cause(0, 3, Cause.ITSELF)
    assert reading.verdict(0, 1) == Verdict(Cause.UNKNOWN, frozenset(), False)
    assert reading.verdict(0, 3) == Verdict(Cause.ITSELF, frozenset({(0, 6)}), False)


def test_verdict_is_none_while_the_core_writes_a_list_in_the_same_place() -> None:
    writing, reading = boards()
    writing.write_cause(0, 1, Cause.ITSELF)
    writing.write_requests(0, 1, MAX_TAG, [request_words([0, 0], [5, 6])], False)
    writing._entries_of(writing._part(0, 1), MAX_TAG, 2)[1] = 7  # of a list without its header
    assert reading.verdict(0, 1) is None
    writing.write_requests(0, 1, MAX_TAG + 1, [request_words([0], [7])], False)
    assert reading.verdict(0, 1) == Verdict(Cause.ITSELF, frozenset({(0, 7)}), False)


def write_for_ever(page: lowlevel.Segment) -> None:
    board = VerdictBoard(page, writable=True)
    board.write_cause(0, 1, Cause.ITSELF)
    for tag in itertools.count():
        board.write_requests(0, 1, tag, [request_words([tag % 32] * CAPACITY, [tag] * CAPACITY)], False)


def test_list_is_whole_or_refused_while_another_process_writes() -> None:
    page = VerdictBoard.create(1, CAPACITY)
    board = VerdictBoard(page)
    with spawn(write_for_ever, page):
        eventually(lambda: board.verdict(0, 1), within=30)
        deadline, different = time.monotonic() + 1.0, set()
        while time.monotonic() < deadline:
            verdict = board.verdict(0, 1)
            if verdict is not None and verdict.in_flight:
                assert len(verdict.in_flight) == 1, f"parts of several lists: {verdict}"
                different |= verdict.in_flight
        assert len(different) > 1
