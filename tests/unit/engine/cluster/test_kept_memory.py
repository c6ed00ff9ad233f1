"""Memory that outlives a process: content under a key, and files that no process has left like that."""

from __future__ import annotations

import errno
import logging
import os
import random
from collections.abc import Iterator

import pytest

from penstock.engine.cluster import kept_memory
from penstock.engine.cluster.kept_memory import CONTENT_AT, HEADER, KeptMemory, KVFiles, MemoryFile

KEY, OTHER = b"k" * 32, b"o" * 32
NBYTES, COUNT = 10_000, 4


@pytest.fixture
def file() -> Iterator[MemoryFile]:
    file = MemoryFile.create("kv pages", "test")
    yield file
    file.close()


def opened(file: MemoryFile, key: bytes = KEY, count: int = COUNT, nbytes: int = NBYTES) -> KeptMemory:
    return KeptMemory(file, key, count, nbytes)


def test_next_process_finds_the_content_under_the_same_key(file: MemoryFile) -> None:
    first = opened(file)
    first.content[:5] = b"hello"
    second = opened(file)
    assert second.content[:6] == b"hello\0" and second.epoch == first.epoch
    assert not first.is_discarded and not second.is_discarded
    assert file.read_header() == (KEY, first.epoch, COUNT)


@pytest.mark.parametrize(
    "changed", [{"key": OTHER}, {"count": 5}, {"nbytes": NBYTES + 1}, {"nbytes": NBYTES - 1}], ids=str
)
def test_content_under_another_key_or_size_is_discarded(file: MemoryFile, changed: dict[str, object]) -> None:
    first = opened(file)
    first.content[:5] = b"hello"
    del first
    second = opened(file, **changed)  # type: ignore[arg-type]
    assert second.is_discarded and not any(second.content[:5])


@pytest.mark.parametrize("how", ["zeros", "random bytes", "cut short", "without a key", "header alone"])
def test_file_that_no_process_left_like_that_is_discarded(file: MemoryFile, how: str, seed: int) -> None:
    first = opened(file)
    first.content[:5] = b"hello"
    epoch = first.epoch
    with file.map() as pages:
        if how == "zeros":
            pages[:] = bytes(len(pages))
        elif how == "random bytes":
            pages[:] = random.Random(seed).randbytes(len(pages))
        elif how == "without a key":  # a process was killed before the last write
            pages[:32] = bytes(32)
    del first
    if how in ("cut short", "header alone"):
        file.resize(CONTENT_AT + 100 if how == "cut short" else HEADER.size)
    second = opened(file)
    assert second.is_discarded and second.epoch != epoch and not any(second.content)


def test_emptied_file_has_no_content_and_is_not_discarded_again(file: MemoryFile) -> None:
    first = opened(file)
    epoch = first.epoch
    first.content[:5] = b"hello"
    del first
    file.empty()
    assert file.nbytes == 0 and file.read_header()[2] == 0
    second = opened(file)
    assert not second.is_discarded and second.epoch != epoch and not any(second.content[:5])


def test_file_that_cannot_grow_is_an_error_and_has_no_key(file: MemoryFile) -> None:
    with pytest.raises((OSError, OverflowError)):
        opened(file, nbytes=1 << 62)
    assert file.read_header()[0] == bytes(32)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_files_of_a_group_are_none_where_the_system_has_none(
    number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    create = os.memfd_create

    def refuse_ledgers(name: str, flags: int) -> int:
        if "ledger" in name:
            raise OSError(number, os.strerror(number))
        return create(name, flags)

    monkeypatch.setattr(kept_memory.os, "memfd_create", refuse_ledgers)
    assert KVFiles.create(0, 2) is None
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "kv cache is not kept"
    ]
    assert len(os.listdir("/proc/self/fd")) == before
