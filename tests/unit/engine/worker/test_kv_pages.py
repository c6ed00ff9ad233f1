"""Pages of a rank: which model runner adopts those of a former one, and how many blocks the next one has."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("penstock.engine.worker.stock")

from penstock.engine.cluster import kept_memory
from penstock.engine.cluster.kept_memory import MemoryFile
from penstock.engine.cluster.model_fingerprint import model_fingerprint
from penstock.engine.worker import kv_pages, model_runner
from penstock.engine.worker.kv_pages import KVPages
from penstock.engine.worker.model_runner import ModelRunner
from tests.support.models import build_family

AVAILABLE = 1 << 20  # bytes, while nothing is kept


@pytest.fixture
def file() -> Iterator[MemoryFile]:
    file = MemoryFile.create("kv pages", "test")
    yield file
    file.close()


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return build_family("llama", tmp_path).path


def started(path: Path, file: MemoryFile, **more: Any) -> ModelRunner:
    return ModelRunner(path, slots=1, block_size=4, threads=1, kv_file=file, **more)


def rewrite(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes())


def rewrite_at_the_former_time(weights: Path) -> None:
    about = weights.stat()
    rewrite(weights)
    os.utime(weights, ns=(about.st_atime_ns, about.st_mtime_ns))


def replace(weights: Path) -> None:
    new = weights.with_name("new")
    shutil.copy2(weights, new)
    new.rename(weights)


@pytest.mark.parametrize("change", [rewrite, rewrite_at_the_former_time, replace])
def test_pages_of_former_weights_are_discarded(llama: Path, file: MemoryFile, change: Callable[[Path], None]) -> None:
    fingerprint, first = model_fingerprint(llama), started(llama, file, blocks=8)
    assert started(llama, file, blocks=8).kv_epoch == first.kv_epoch is not None
    change(llama / "model.safetensors")
    assert model_fingerprint(llama) == fingerprint
    assert started(llama, file, blocks=8).kv_epoch != first.kv_epoch


@pytest.mark.parametrize("package", kept_memory.PACKAGES)
def test_pages_of_another_version_are_discarded(
    file: MemoryFile, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    KVPages(file).open(8, 100)
    assert KVPages(file).num_blocks == 8
    monkeypatch.setattr(kept_memory, "version", lambda name: "0" if name == package else version(name))
    assert KVPages(file).num_blocks == 8, "this process runs the code of its start"
    monkeypatch.setattr(kv_pages, "VERSIONS", kept_memory.read_versions())
    assert KVPages(file).num_blocks == 0


@pytest.mark.parametrize("call", ["resize", "map"])
def test_pages_that_cannot_be_had_are_memory_of_the_worker(
    llama: Path, file: MemoryFile, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(MemoryFile, call, refuse)
    runner = started(llama, file, blocks=8)
    assert runner.kv_epoch is None and runner.blocks == 8
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "kv cache is not kept"
    ]


def test_memory_is_measured_without_pages_that_are_discarded(
    llama: Path, file: MemoryFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "memory_available", lambda: (AVAILABLE - file.nbytes, ""))
    blocks = started(llama, file).blocks
    assert started(llama, file).blocks == blocks
    rewrite(llama / "model.safetensors")
    assert started(llama, file).blocks == blocks
