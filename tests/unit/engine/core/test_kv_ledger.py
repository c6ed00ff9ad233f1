"""What a core adopts, where a rank or the core of a life between could not keep anything."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import random
import struct
from collections.abc import Iterator

import pytest

from penstock.engine._native import BlockCache, ledger_nbytes
from penstock.engine.cluster.kept_memory import CONTENT_AT, KVFiles, MemoryFile
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.core import kv_ledger
from penstock.engine.core.kv_ledger import open_cache
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.messages import Ready
from tests.unit.engine.core.test_block_cache import A, B, filled

BLOCKS, SLOTS, BLOCK_SIZE = 4, 2, 16
READY = [Ready(rank, BLOCKS, 100, kv_epoch=bytes([rank]) * 16) for rank in range(2)]


@pytest.fixture
def files() -> Iterator[KVFiles]:
    files = KVFiles.create(0, 2)
    assert files is not None
    yield files
    files.close()


def opened(files: KVFiles, ready: list[Ready], blocks: int = BLOCKS) -> BlockCache:
    page = StatusBoard.create(1)
    board = StatusBoard(page, writable=True)
    cache = open_cache(files, ready, BatchState(SLOTS, blocks, BLOCK_SIZE, 1), board.row(0))
    board.close()
    return cache


def test_next_life_adopts_what_is_valid(files: KVFiles) -> None:
    filled(A, B, cache=opened(files, READY))
    assert opened(files, READY).num_adopted == 2


def test_life_without_the_pages_of_a_rank_leaves_no_ledger(files: KVFiles) -> None:
    """The other rank has overwritten blocks of its pages, and no core has withdrawn them."""
    filled(A, B, cache=opened(files, READY))
    assert opened(files, [READY[0], Ready(1, BLOCKS, 100)]).num_adopted == 0
    assert opened(files, READY).num_adopted == 0


def test_life_without_a_ledger_leaves_none_of_a_former_life(files: KVFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(A, B, cache=opened(files, READY))

    def refuse(file: MemoryFile) -> mmap.mmap:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFile, "map", refuse)
        assert opened(files, READY).num_adopted == 0
    assert opened(files, READY).num_adopted == 0


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("zeros", "changed"),
        ("random bytes", "changed"),
        ("cut short", "changed"),
        ("another version", "changed"),
        ("pages of another size", "changed"),
        ("random entries", "damaged"),
        ("a hash twice", "damaged"),
        ("a state that is no state", "damaged"),
    ],
)
def test_ledger_that_no_core_has_left_is_an_empty_cache_and_a_line(
    files: KVFiles,
    how: str,
    reason: str,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(kv_ledger, "VERSION", 0 if how == "another version" else kv_ledger.VERSION)
        filled(A, B, cache=opened(files, READY, BLOCKS + 1 if how == "pages of another size" else BLOCKS))
    with files.ledger.map() as ledger:
        first, second, end = (CONTENT_AT + ledger_nbytes(number) for number in (0, 1, 2))
        assert ledger[first:second] != ledger[second:end]
        if how == "zeros":
            ledger[:] = bytes(len(ledger))
        elif how == "random bytes":
            ledger[:] = random.Random(seed).randbytes(len(ledger))
        elif how == "random entries":
            ledger[CONTENT_AT:] = random.Random(seed).randbytes(len(ledger) - CONTENT_AT)
        elif how == "a hash twice":
            ledger[second:end] = ledger[first:second]
        elif how == "a state that is no state":
            ledger[first : first + 4] = struct.pack("<I", 2)
    if how == "cut short":
        files.ledger.resize(end)
    with caplog.at_level(logging.WARNING, "penstock.engine"):
        assert opened(files, READY).num_adopted == 0
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.fields["reason"] for record in warnings] == [reason]  # type: ignore[attr-defined]
    filled(A, B, cache=opened(files, READY))
    assert opened(files, READY).num_adopted == 2
