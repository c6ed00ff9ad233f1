"""Weights in a file of the launcher: one worker fills it, and the others compute the same with what they map."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# First: where torch is missing, this skips the rest.
from tests.support.models import ask, build_family, device, families

# isort: split
import numpy as np
import torch

from penstock.engine.cluster.node_weights import NodeWeights, WeightFile
from penstock.engine.worker import shared_weights
from penstock.engine.worker.shared_weights import LENGTH, SharedWeights, WeightLayout
from tests.conftest import eventually
from tests.support.processes import IS_SANITIZED, forked
from tests.support.ranks import results_of_threads

PACKED_NBYTES = 1000
# The stages of a fill, and the call, or the number of the copied tensor, with which each ends.
STAGES: dict[str, str | int] = {
    "empty": "map_file",
    "mapped": 0,
    "one tensor": 1,
    "copied": "claim_large_pages",
    "filled": "protect",
    "protected": "seal",
    "sealed": "unlock",
}


@pytest.fixture
def file() -> Iterator[WeightFile]:
    file = WeightFile.create("weights", "test")
    yield file
    file.close()


def tensors() -> dict[str, torch.Tensor]:
    first = torch.arange(1000, dtype=torch.float32)
    return {"first": first, "tied": first, "transposed": torch.arange(6).view(2, 3).t(), "half": first.bfloat16()[1:]}


def filled(file: WeightFile, *key: object) -> SharedWeights:
    shared = SharedWeights.open(file, *key)
    assert shared is not None and not shared.is_complete
    assert shared.fill(tensors(), PACKED_NBYTES)
    if shared.packed is not None:
        for begin in range(0, PACKED_NBYTES // 2, 100):  # all parts are in one large page
            shared.claim(begin, begin + 100)
            shared.packed[begin : begin + 100] = 7
    shared.complete()
    return shared


def must_have_all(shared: SharedWeights | None) -> None:
    assert shared is not None and shared.is_complete
    for name, expected in tensors().items():
        assert torch.equal(shared.tensors[name], expected) and shared.tensors[name].dtype == expected.dtype
    assert shared.tensors["first"].data_ptr() == shared.tensors["tied"].data_ptr()
    assert shared.packed is None or (shared.packed.nbytes == PACKED_NBYTES and (shared.packed == 7).all())


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.fields["reason"] for record in caplog.records if "reason" in getattr(record, "fields", {})]


def write_into(file: WeightFile, has_filled: bool) -> None:
    shared = filled(file) if has_filled else SharedWeights.open(file)
    assert shared is not None
    shared.tensors["first"][3] = 1.0


@pytest.mark.skipif(IS_SANITIZED, reason="a sanitizer ends the process in its own way")
@pytest.mark.parametrize("has_filled", [True, False], ids=["filler", "later worker"])
def test_write_into_complete_weights_ends_the_writer_alone(file: WeightFile, has_filled: bool) -> None:
    if not has_filled:
        filled(file)
    assert forked(lambda: write_into(file, has_filled)) == -signal.SIGSEGV
    must_have_all(SharedWeights.open(file))
    with pytest.raises(PermissionError):
        os.pwrite(file.fileno(), b"x", 0)
    with pytest.raises(PermissionError):
        file.empty()


def die_at(file: WeightFile, stage: str) -> None:
    """Fills the file until a stage, and kills itself."""
    native, copy, numbers = shared_weights._native, torch.Tensor.copy_, iter(range(99))

    def die(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    class Native:
        def __getattr__(self, name: str) -> Any:
            return die if STAGES.get(stage) == name else getattr(native, name)

    def counted(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if STAGES.get(stage) == next(numbers):
            die()
        return copy(target, source)

    shared_weights._native = Native()  # type: ignore[assignment]
    shared_weights.gives_large_pages = lambda: True
    torch.Tensor.copy_ = counted  # type: ignore[method-assign,assignment]
    if stage in ("protected", "sealed"):
        setattr(WeightFile, str(STAGES[stage]), die)
    filled(file)


@pytest.mark.parametrize("stage", STAGES)
def test_filler_that_is_killed_is_followed_by_the_next_worker(file: WeightFile, stage: str) -> None:
    assert forked(lambda: die_at(file, stage)) == -signal.SIGKILL
    if stage != "sealed":
        filled(file)
    must_have_all(SharedWeights.open(file))


@contextmanager
def other_filler(file: WeightFile) -> Iterator[int]:
    """A process that holds the lock, and does not fill the file."""
    pid = os.fork()
    if pid == 0:
        file.lock()
        file.resize(1)  # says that the lock is held
        time.sleep(60)
        os._exit(1)
    try:
        eventually(lambda: file.nbytes == 1)
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_worker_waits_for_the_filler_and_takes_over_when_it_dies(file: WeightFile) -> None:
    with other_filler(file) as pid:
        assert not file.lock()
        killer = threading.Timer(0.2, os.kill, (pid, signal.SIGKILL))
        killer.start()
        filled(file)
        killer.join()
    must_have_all(SharedWeights.open(file))


def test_worker_loads_for_itself_when_the_filler_stands_still(
    file: WeightFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_weights, "FILL_TIMEOUT_S", 0.05)
    with other_filler(file), caplog.at_level(logging.INFO, "penstock.engine"):
        assert SharedWeights.open(file) is None
    assert reasons(caplog) == ["another worker has not filled the file within 0.05 s"]


@pytest.mark.parametrize("how", ["another key", "zeros", "random bytes", "cut short"])
def test_file_with_other_content_is_not_mapped(
    file: WeightFile, how: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    if how == "another key":
        filled(file, "other")
    else:
        table = WeightLayout.build("key", tensors(), 0)
        file.resize(table.file_nbytes)
        head = {"zeros": bytes(100), "random bytes": random.Random(seed).randbytes(5000)}
        os.pwrite(file.fileno(), head.get(how, LENGTH.pack(len(table.encoded)) + table.encoded), 0)
        if how == "cut short":
            file.resize(table.file_nbytes - 4096)
        file.seal()
    with caplog.at_level(logging.WARNING, "penstock.engine"):
        assert SharedWeights.open(file, "key") is None
    assert len(reasons(caplog)) == 1


def test_no_memory_for_the_file_leaves_the_worker_its_own_weights(
    file: WeightFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: WeightFile, nbytes: int) -> None:
        raise OSError(12, os.strerror(12))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "penstock.engine"):
        patch.setattr(WeightFile, "resize", refuse)
        shared = SharedWeights.open(file)
        assert shared is not None and not shared.fill(tensors(), 0)
        shared.complete()
    assert reasons(caplog) == ["[Errno 12] Cannot allocate memory"] and not file.is_sealed()
    must_have_all(filled(file))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "has_large_pages"),
    [("llama", False), *((name, True) for name in families("llama", "gemma2", "mixtral", "qwen2_vl"))],
)
def test_models_with_shared_weights_answer_as_with_their_own(
    name: str, dtype: str, has_large_pages: bool, tmp_path: Path, file: WeightFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_weights, "gives_large_pages", lambda: has_large_pages)
    of = build_family(name, tmp_path)
    results = []
    for weight_file in (None, file, file):
        runner = device(of, dtype=dtype, weight_file=weight_file)
        results.append(ask(runner, of.requests, logprobs=0))
    assert results[1] == results[0] == results[2]
    assert file.is_sealed()


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_ranks_with_shared_slices_answer_as_with_their_own(name: str, tmp_path: Path) -> None:
    of, files = build_family(name, tmp_path), [WeightFile.create("weights", str(rank)) for rank in range(2)]
    results = [results_of_threads(2, of, of.requests[:4], weight_files=lent) for lent in ([None] * 2, files, files)]
    assert results[1] == results[0] == results[2]
    assert all(file.is_sealed() for file in files)
    for file in files:
        file.close()


def test_file_of_a_rank_changes_with_the_files_of_the_model(tmp_path: Path) -> None:
    model = build_family("llama", tmp_path).path
    weights = NodeWeights(model)
    first = weights.file_of(0)
    assert first is not None and weights.file_of(0) is first is not weights.file_of(1)
    about = (model / "model.safetensors").stat()
    os.utime(model / "model.safetensors", ns=(about.st_atime_ns, about.st_mtime_ns))
    assert weights.file_of(0) is not first
    weights.close()


def test_claim_keeps_the_parts_that_are_packed(file: WeightFile) -> None:
    shared = SharedWeights.open(file)
    assert shared is not None and shared.fill(tensors(), 5 << 20)
    if shared.packed is None:
        pytest.skip("files in memory get no large pages")
    expected = np.arange(shared.packed.size, dtype=np.uint64).astype(np.uint16) | 1
    for begin in range(0, shared.packed.size, 300_000):
        end = min(begin + 300_000, shared.packed.size)
        shared.claim(begin, end)
        shared.packed[begin:end] = expected[begin:end]
    shared.complete()
    later = SharedWeights.open(file)
    assert later is not None and later.packed is not None and (later.packed == expected).all()
    assert torch.equal(later.tensors["first"], tensors()["first"])


def test_memory_of_a_dead_filler_is_given_back_before_the_next_loads(file: WeightFile) -> None:
    assert forked(lambda: die_at(file, "filled")) == -signal.SIGKILL
    assert file.nbytes
    shared = SharedWeights.open(file)
    assert shared is not None and not shared.is_complete and not file.nbytes


def test_weights_that_are_copied_give_their_own_memory_back(file: WeightFile) -> None:
    shared, own = SharedWeights.open(file), tensors()
    assert shared is not None and shared.fill(own, 0)
    assert [own[name].data_ptr() for name in own] == [shared.tensors[name].data_ptr() for name in own]


def test_forked_code_has_the_versions_of_its_start(file: WeightFile, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(file)
    monkeypatch.setattr("penstock.engine.cluster.kept_memory.version", lambda name: "newer")
    must_have_all(SharedWeights.open(file))
