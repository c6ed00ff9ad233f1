"""The board: numbers of the cores, read by others without a message."""

import itertools

import penstock
from penstock.engine.board import ROW_WORDS, WORD_NBYTES, Board
from tests.conftest import eventually, spawn


def test_what_one_writes_the_others_read_and_rows_do_not_touch_each_other() -> None:
    page = Board.lay(3)
    writing, reading = Board(page, writable=True), Board(page)
    row = writing.row(1)
    for word in range(ROW_WORDS):
        row[word] = (1 << 63) + word
    assert [reading.row(1)[word] for word in range(ROW_WORDS)] == [(1 << 63) + word for word in range(ROW_WORDS)]
    assert not any(reading.row(group)[word] for group in (0, 2) for word in range(ROW_WORDS))
    assert not reading.is_draining
    writing.drain()
    assert reading.is_draining
    writing.begin(1)
    assert not any(reading.row(1)[word] for word in range(ROW_WORDS))


def test_each_number_is_an_aligned_word_and_the_core_and_rank_0_write_to_different_cache_lines() -> None:
    page = Board.lay(2)
    Board(page, writable=True).row(0)[Board.SERVING] = 7
    Board(page, writable=True).row(0)[Board.BUSY_NS] = 9
    words = page.view().cast("Q")
    assert words[ROW_WORDS] == 7 and words[ROW_WORDS + Board.BUSY_NS] == 9
    assert Board.BUSY_NS * WORD_NBYTES == 64 and page.nbytes == 3 * 128


def test_who_only_reads_cannot_write() -> None:
    page = Board.lay(1)
    try:
        Board(page).row(0)[0] = 1
    except TypeError as error:
        assert "read-only" in str(error)
    else:
        raise AssertionError("it was written")


def count(page: penstock.Segment) -> None:
    row = Board(page, writable=True).row(0)
    for number in itertools.cycle(range(1, 1 << 16)):
        row[Board.STEPS] = number * 0x0001_0001_0001_0001  # all four quarters are alike


def test_a_number_that_another_process_writes_is_never_seen_half() -> None:
    page = Board.lay(1)
    row = Board(page).row(0)
    with spawn(count, page):
        eventually(lambda: row[Board.STEPS], within=30)
        for _ in range(100_000):
            number = row[Board.STEPS]
            quarters = {(number >> shift) & 0xFFFF for shift in (0, 16, 32, 48)}
            assert len(quarters) == 1, hex(number)
