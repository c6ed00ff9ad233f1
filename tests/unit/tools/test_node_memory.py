"""Bytes of a node by kind: segments, and files that a launcher keeps for later workers."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.synchronize import Event

import pytest

from penstock import Ring, Store
from penstock.engine.cluster.kept_memory import KVFiles, MemoryFile
from penstock.tools.inspect import memory_by_kind, memory_of
from tests.conftest import spawn

MIB = 1 << 20


@pytest.fixture
def files() -> Iterator[KVFiles]:
    files = KVFiles.create(0, 2)
    assert files is not None
    yield files
    files.close()


def fill(file: MemoryFile, nbytes: int) -> None:
    file.resize(nbytes)
    with file.map() as pages:
        pages[:] = b"x" * nbytes


def test_memory_is_counted_by_kind_and_each_file_once(files: KVFiles) -> None:
    for file in files.pages:
        fill(file, MIB)
    fill(files.ledger, 4096)
    duplicate = os.dup(files.pages[0]._fd)
    nbytes = memory_by_kind([], [os.getpid(), os.getpid()])
    os.close(duplicate)
    assert nbytes == {"kv pages": 2 * MIB, "kv ledger": 4096}


def hold(files: KVFiles, is_held: Event, may_end: Event) -> None:
    is_held.set()
    may_end.wait()
    files.close()


def test_kept_files_count_for_the_parent_that_gave_them_away(files: KVFiles) -> None:
    fill(files.ledger, 4096)
    spawning = multiprocessing.get_context("spawn")
    is_held, may_end = spawning.Event(), spawning.Event()
    with spawn(hold, files, is_held, may_end) as child:
        assert child.pid is not None and is_held.wait(30)
        assert memory_by_kind([], [child.pid]) == {}
        assert memory_by_kind([], [child.pid, os.getpid()])["kv ledger"] == 4096
        may_end.set()
        child.join()


def test_emptied_files_and_untouched_pages_occupy_nothing(files: KVFiles) -> None:
    files.ledger.resize(MIB)
    fill(files.pages[0], MIB)
    files.pages[0].empty()
    assert set(memory_by_kind([], [os.getpid()]).values()) == {0}


def test_memory_of_a_process_covers_channels_and_stores(files: KVFiles) -> None:
    with Store(MIB) as store, Ring() as ring:
        nbytes = memory_of(os.getpid())
        assert nbytes["stores"] >= store.segment_nbytes and nbytes["channels"] > 0
        assert nbytes["kv pages"] == 0 and ring.receivers == 1


def test_memory_of_a_process_that_has_ended_is_empty() -> None:
    assert memory_of(1 << 22) == {}
