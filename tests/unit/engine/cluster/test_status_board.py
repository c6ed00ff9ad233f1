"""The board: numbers of the cores, read by others without a message."""

import itertools

import pytest

from penstock import lowlevel
from penstock.engine.cluster.counter import LINE_WORDS
from penstock.engine.cluster.status_board import LAUNCHER, PLACE, RANK_0, ProcessEntry, StatusBoard
from penstock.engine.cluster.topology import all_processes
from penstock.engine.protocol.config import EngineConfig, SimulatedDevice
from tests.conftest import eventually, spawn

OF_A_GROUP = (("core", 0), ("worker", 0), ("worker", 1), ("output", 0))


def test_status_board_rows_are_read_as_written_and_do_not_overlap() -> None:
    page = StatusBoard.create(3)
    writing, reading = StatusBoard(page, writable=True), StatusBoard(page)
    row = writing.row(1)
    for word in range(StatusBoard.WORDS):
        row[word] = (1 << 63) + word
    assert [reading.row(1)[word] for word in range(StatusBoard.WORDS)] == [
        (1 << 63) + word for word in range(StatusBoard.WORDS)
    ]
    assert not any(reading.row(group)[word] for group in (0, 2) for word in range(StatusBoard.WORDS))
    assert not reading.is_draining
    writing.drain()
    assert reading.is_draining
    writing.begin(1)
    starts = set(StatusBoard.STARTS.at.values())
    assert {word for word, number in enumerate(reading.row(1)) if number} == starts, "of all lives of the engine"


def test_owners_write_to_different_cache_lines_of_a_row() -> None:
    page = StatusBoard.create(2)
    StatusBoard(page, writable=True).row(0)[StatusBoard.SERVING] = 7
    StatusBoard(page, writable=True).row(0)[StatusBoard.BUSY_NS] = 9
    words = page.view().cast("Q")
    assert words[StatusBoard.WORDS] == 7 and words[StatusBoard.WORDS + StatusBoard.BUSY_NS] == 9
    assert StatusBoard.WORDS % LINE_WORDS == 0 and page.nbytes == 3 * StatusBoard.WORDS * 8
    owners: dict[int, set[str]] = {}
    for counter in StatusBoard.DECLARED:
        for word in range(counter, counter + counter.spec.words):
            owners.setdefault(word // LINE_WORDS, set()).add(counter.spec.owner)
    assert {PLACE, LAUNCHER, RANK_0} < set().union(*owners.values())
    assert all(len(writers) == 1 for writers in owners.values())


def test_status_board_opened_for_reading_cannot_be_written() -> None:
    page = StatusBoard.create(1)
    with pytest.raises(TypeError, match="read-only"):
        StatusBoard(page).row(0)[0] = 1


def count(page: lowlevel.Segment) -> None:
    row = StatusBoard(page, writable=True).row(0)
    for number in itertools.cycle(range(1, 1 << 16)):
        row[StatusBoard.STEPS] = number * 0x0001_0001_0001_0001  # all four quarters are alike


def test_a_number_that_another_process_writes_is_never_seen_half() -> None:
    page = StatusBoard.create(1)
    row = StatusBoard(page).row(0)
    with spawn(count, page):
        eventually(lambda: row[StatusBoard.STEPS], within=30)
        for _ in range(100_000):
            number = row[StatusBoard.STEPS]
            quarters = {(number >> shift) & 0xFFFF for shift in (0, 16, 32, 48)}
            assert len(quarters) == 1, hex(number)


def test_status_board_lists_process_entries_behind_the_groups() -> None:
    page = StatusBoard.create(2, 3)
    writing, reading = StatusBoard(page, writable=True), StatusBoard(page)
    assert reading.members == [ProcessEntry(0, 0)] * 3
    writing.live(1, ProcessEntry(7, 4711))
    writing.live(2, ProcessEntry((1 << 32) - 1, (1 << 22) - 1))
    assert reading.members == [ProcessEntry(0, 0), ProcessEntry(7, 4711), ProcessEntry((1 << 32) - 1, (1 << 22) - 1)]
    assert len(reading.rows) == 2 and not any(map(any, reading.rows))


def test_places_are_those_that_the_tree_starts() -> None:
    config = EngineConfig(
        simulated=SimulatedDevice(),
        data_parallel_size=2,
        tensor_parallel_size=2,
        output_processors=1,
        api_server_count=2,
    )
    assert [(process.kind, process.group, process.index) for process in all_processes(config)] == [
        *[(kind, group, index) for group in (0, 1) for kind, index in OF_A_GROUP],
        *[("server", 0, 0), ("server", 0, 1)],
    ]


def test_words_of_a_row_are_distinct() -> None:
    words = [word for counter in StatusBoard.DECLARED for word in range(counter, counter + counter.spec.words)]
    assert len(words) == len(set(words)) and max(words) < StatusBoard.WORDS
    named = {name: word for name, word in vars(StatusBoard).items() if type(word) is int and name != "WORDS"}
    assert len(named) == len(set(named.values())) == 9, "words of the cluster's row"
