"""What a core adopts, where a rank or the core of a life between could not keep anything."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator

import pytest

from penstock.engine._native import BlockCache
from penstock.engine.cluster.kept_memory import KVFiles, MemoryFile
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.core.kv_ledger import open_cache
from penstock.engine.protocol.messages import Ready
from tests.unit.engine.core.test_block_cache import A, B, filled

BLOCKS, BLOCK_SIZE = 4, 16
READY = [Ready(rank, BLOCKS, 100, kv_epoch=bytes([rank]) * 16) for rank in range(2)]


@pytest.fixture
def files() -> Iterator[KVFiles]:
    files = KVFiles.create(0, 2)
    assert files is not None
    yield files
    files.close()


def opened(files: KVFiles, ready: list[Ready]) -> BlockCache:
    page = StatusBoard.create(1)
    board = StatusBoard(page, writable=True)
    cache = open_cache(files, ready, BLOCKS, BLOCK_SIZE, board.row(0))
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
