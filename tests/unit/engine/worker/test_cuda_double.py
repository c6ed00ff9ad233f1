"""The double of a CUDA device: what it finds, and what the engine's path to a device does on it.

Faults are planted here, one a line, and each must be found at its line.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

# First: where torch is missing, this skips the rest.
from tests.support.models import Family, ask, device, families

# isort: split
import torch

from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.messages import Step
from penstock.engine.worker import decode_graphs
from penstock.engine.worker.cuda.graphs import CudaGraphs
from penstock.engine.worker.input_batch import moved
from penstock.engine.worker.model_runner import ModelRunner, TorchPendingStep
from tests import tiers
from tests.support.cuda_double import CUDA, CudaDouble, Fault, Report

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")

PLANTED: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "item": (lambda on: on.sum().item(), "waits"),
    "tolist": (lambda on: on.tolist(), "waits"),
    "bool": (lambda on: bool(on.sum() > 0), "waits"),
    "int": (lambda on: [1, 2, 3, 4][int(on[0])], "waits"),
    "float": (lambda on: f"{float(on.sum()):.3f}", "waits"),
    "nonzero": (lambda on: on.nonzero(), "waits"),
    "where of one argument": (lambda on: torch.where(on > 1), "waits"),
    "masked_select": (lambda on: on.masked_select(on > 1), "waits"),
    "unique": (lambda on: on.unique(), "waits"),
    "equal": (lambda on: torch.equal(on, on + 1), "waits"),
    "bincount": (lambda on: on.long().bincount(), "waits"),
    "repeat_interleave": (lambda on: on.repeat_interleave(on.long()), "waits"),
    "index of booleans": (lambda on: on[on > 1], "waits"),
    "write by booleans": (lambda on: on.__setitem__(on > 1, on.new_zeros(2)), "waits"),
    "index on the host": (lambda on: on[torch.tensor([0, 2])], "pageable"),
    "cpu": (lambda on: on.cpu(), "waits"),
    "to": (lambda on: on.to("cpu"), "waits"),
    "copy into pageable memory": (lambda on: torch.empty(4).copy_(on, non_blocking=True), "waits"),
    "pageable upload": (lambda on: torch.ones(9).to(CUDA, non_blocking=True), "pageable"),
    "upload that waits": (lambda on: torch.ones(9).pin_memory().to(CUDA), "waits"),
    "pageable copy_": (lambda on: on.copy_(torch.ones(4), non_blocking=True), "pageable"),
    "torch.tensor": (lambda on: torch.tensor([1.0], device="cuda"), "pageable"),
    "synchronize": (lambda on: torch.cuda.synchronize(), "waits"),
    "stream": (lambda on: torch.cuda.current_stream().synchronize(), "waits"),
}


@pytest.fixture
def double() -> Iterator[CudaDouble]:
    with CudaDouble() as entered:
        yield entered


@pytest.fixture
def numbers(double: CudaDouble) -> torch.Tensor:
    return torch.arange(4, dtype=torch.float32, device="cuda")


# ── planted faults ───────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_found_at_its_line(name: str, double: CudaDouble, numbers: torch.Tensor) -> None:
    plant, kind = PLANTED[name]
    with double.watched() as report:
        plant(numbers)
    assert report.faults and all(kind in fault.what for fault in report.faults), report.faults
    assert {fault.line for fault in report.faults} == {f"test_cuda_double.py:{inspect.getsourcelines(plant)[1]}"}


def test_device_work_without_a_read_has_no_fault(double: CudaDouble, numbers: torch.Tensor) -> None:
    with double.watched() as report:
        index = moved(np.array([2, 0]), CUDA)
        result = torch.softmax(numbers[index] @ numbers.new_ones(2, 3), -1)
        arrived = result.to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
    assert not report.faults
    torch.testing.assert_close(arrived, torch.full((3,), 1 / 3))
    assert report.counts() | {"launches": 0} == {
        "launches": 0, "allocations": 5, "copies_up": 1, "copies_back": 1, "pinned": 2
    }  # fmt: skip


def test_tensors_of_two_devices_do_not_mix(double: CudaDouble, numbers: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        numbers + torch.ones(4)
    assert (numbers + torch.tensor(1.0)).device == CUDA  # a number may come from the host


def test_pinned_memory_that_is_written_before_its_copy_is_done(double: CudaDouble) -> None:
    ring = torch.zeros(4).pin_memory()
    event = torch.cuda.Event()
    with double.watched() as report:
        on_device = ring.to(CUDA, non_blocking=True)
        event.record()
        event.synchronize()
        ring.fill_(1)  # after the event: it may
        on_device.copy_(ring, non_blocking=True)
        ring.numpy()[2] = 7  # the copy may not have begun
        event.record()
        event.synchronize()
    (fault,) = report.faults
    assert "was written before" in fault.what


def test_result_arrives_when_its_event_has_passed(double: CudaDouble, numbers: torch.Tensor) -> None:
    result, event = (numbers + 1).to("cpu", non_blocking=True), torch.cuda.Event()
    event.record()
    later = (numbers + 2).to("cpu", non_blocking=True)
    poison = later.clone()
    assert torch.equal(result, poison) and not event.query()
    assert event.query() and result.tolist() == [1, 2, 3, 4]
    assert torch.equal(later, poison), "behind the event"
    numbers.zero_()
    event.record()
    event.synchronize()
    assert later.tolist() == [2, 3, 4, 5]


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_memory_is_held_as_long_as_its_tensors_live(double: CudaDouble) -> None:
    before = torch.cuda.memory_allocated()
    memory = torch.zeros(1000, dtype=torch.float32, device="cuda")
    part = memory[:10]
    assert torch.cuda.memory_allocated() - before == 4096  # eight granules of 512
    del memory
    assert torch.cuda.memory_allocated() - before == 4096
    torch.cuda.reset_peak_memory_stats()
    (part + 1).sum()
    del part
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() == before + 4096 + 2 * 512
    free, total = torch.cuda.mem_get_info()
    assert total - free == before


def test_an_allocation_fails_where_it_should(double: CudaDouble) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1 << 29, device="cuda")
    double.fail_at = double.allocated + 2
    first = torch.zeros(1, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1, device="cuda")
    assert (first + 1).tolist() == [1]


# ── graphs ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_replay_computes_with_the_numbers_of_its_time(double: CudaDouble, numbers: torch.Tensor) -> None:
    graphs = CudaGraphs()
    replay = graphs.record(lambda: numbers * 2)
    numbers.fill_(4)
    with double.watched() as report:
        result = replay()
    assert report.counts() == {"launches": 1, "allocations": 0, "copies_up": 0, "copies_back": 0, "pinned": 0}
    assert result.tolist() == [8, 8, 8, 8]
    other = graphs.record(lambda: numbers + 1)
    other()
    assert result.tolist() != [8, 8, 8, 8], "a result is valid until the next replay"
    assert replay().tolist() == [8, 8, 8, 8]


def test_memory_of_a_graph_is_kept(double: CudaDouble, numbers: torch.Tensor) -> None:
    graphs, before = CudaGraphs(), torch.cuda.memory_allocated()
    replays = [graphs.record(lambda: (numbers.new_zeros(1000) + 1).sum() * numbers) for _ in range(3)]
    assert before + 2 * 4096 <= torch.cuda.memory_allocated() <= before + 3 * 4096, "once for all three"
    assert replays[0]().tolist() == [0, 1000, 2000, 3000]


@pytest.mark.parametrize(
    "copy",
    [lambda: moved(np.array([2, 0]), CUDA), lambda: torch.ones(2, device="cuda").to("cpu", non_blocking=True)],
)
def test_graph_that_copies_from_or_to_the_host_is_refused(
    copy: Callable[[], torch.Tensor], double: CudaDouble, numbers: torch.Tensor
) -> None:
    with pytest.raises(RuntimeError, match="invalidated"):
        CudaGraphs().record(lambda: numbers * copy().numel())


@pytest.mark.parametrize(
    "plant", [lambda on: on * on.sum().item(), lambda on: on[on > 1], lambda on: on[torch.tensor([0, 2])]]
)
def test_graph_that_waits_is_refused(
    plant: Callable[[torch.Tensor], torch.Tensor], double: CudaDouble, numbers: torch.Tensor
) -> None:
    graphs = CudaGraphs()
    with pytest.raises(RuntimeError, match="synchronizing"):
        graphs.record(lambda: plant(numbers))
    assert torch.cuda.get_sync_debug_mode() == 0 and torch.cuda.current_stream() is torch.cuda.default_stream()
    assert graphs.record(lambda: numbers + 1)().tolist() == [1, 2, 3, 4]


class Recorded:
    """Something to record, which notes in which state of the device it is called."""

    def __init__(self, double: CudaDouble, *, fails_at: int = 9, reads: bool = False) -> None:
        self._double, self._fails_at, self._reads = double, fails_at, reads
        self._numbers = torch.ones(2, device="cuda")
        self.calls: list[tuple[bool, int, bool]] = []  # on a stream aside, how strict, is recorded

    def __call__(self) -> torch.Tensor:
        is_aside = torch.cuda.current_stream() is not torch.cuda.default_stream()
        self.calls.append((is_aside, torch.cuda.get_sync_debug_mode(), self._double.tape is not None))
        if len(self.calls) == self._fails_at:
            raise RuntimeError("cannot be recorded")
        return self._numbers * (self._numbers.sum().item() if self._reads else len(self.calls))


def test_graph_is_recorded_after_a_warm_up_without_synchronization() -> None:
    with CudaDouble() as double:
        compute = Recorded(double)
        replay = CudaGraphs().record(compute)
        assert compute.calls == [(True, 0, False), (True, 2, False), (True, 0, True)]
        assert replay().tolist() == [3, 3] and len(compute.calls) == 3
        assert torch.cuda.current_stream() is torch.cuda.default_stream() and torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.parametrize(
    ("options", "calls", "why"), [({"reads": True}, 2, "synchronizing"), ({"fails_at": 3}, 3, "invalidated")]
)
def test_graph_that_cannot_be_recorded_leaves_the_device_as_it_was(
    options: dict[str, Any], calls: int, why: str
) -> None:
    with CudaDouble() as double:
        compute, graphs = Recorded(double, **options), CudaGraphs()
        with pytest.raises(RuntimeError, match=why):
            graphs.record(compute)
        assert len(compute.calls) == calls and double.tape is None
        assert torch.cuda.current_stream() is torch.cuda.default_stream() and torch.cuda.get_sync_debug_mode() == 0
        assert graphs.record(Recorded(double))().tolist() == [3, 3]


# ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────────────
TEXT = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "mixtral", "qwen2_moe", "qwen3_moe"]
# Lines of image encoders that make the host wait, or copy pageable memory, for each image. The list shrinks.
ENCODER_LINES = ("image_encoder.py", "vision_utils.py", "masking_utils.py", "modeling_")


class Watcher:
    """Watches the steps that a model runner launches."""

    def __init__(self, double: CudaDouble, monkeypatch: pytest.MonkeyPatch) -> None:
        self._double = double
        self._steps: list[tuple[Report, bool]] = []  # and whether all rows go on, each by one token
        launch = ModelRunner.launch

        def watched(runner: ModelRunner, batch: BatchState, step: Step) -> TorchPendingStep:
            with double.watched() as report:
                pending = launch(runner, batch, step)
            self._note(report, batch, step)
            return pending

        monkeypatch.setattr(ModelRunner, "launch", watched)

    def _note(self, report: Report, batch: BatchState, step: Step) -> None:
        news = (step.left, step.preempted, step.joined, step.resumed, step.advances)
        self._steps.append((report, all(change is None for change in news)))

    def faults(self, *, is_quiet: bool | None = None) -> set[Fault]:
        """Returns the faults of all steps, or of the quiet ones, with those of copies that were launched in them."""
        self._double.pass_copies(self._double.launched)
        return {fault for report, quiet in self._steps if is_quiet in (None, quiet) for fault in report.faults}

    def usual(self, count: str) -> float:
        """Returns the median of the quiet steps. The step after a change has the change, too: the sampler's columns are
        written again."""
        return statistics.median(report.counts()[count] for report, quiet in self._steps if quiet)


@pytest.mark.parametrize(
    ("name", "has_graphs"),
    [("llama", False), ("gemma2", True)] if tiers.TIER == "push" else itertools.product(TEXT, [False, True]),
)
def test_text_is_answered_as_on_the_cpu(
    name: str, has_graphs: bool, family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, preemptions and prefixes of others are in between. No step waits for the device."""
    of, seed = family(name), 3 if has_graphs else None
    expected = ask(device(of), of.requests, seed=seed)
    with CudaDouble() as double:
        watcher = Watcher(double, monkeypatch)
        runner = device(of, device="cuda", recorder=CudaGraphs() if has_graphs else None)
        result = ask(runner, of.requests, seed=seed)
        assert not watcher.faults()
    assert result.answers == expected.answers and result.preemptions == expected.preemptions
    if has_graphs:
        assert watcher.usual("launches") <= 28 and watcher.usual("copies_up") <= 8 and watcher.usual("copies_back") == 3


def test_ring_that_is_written_too_early_is_found_in_the_engine(
    family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted in a decode step: one pinned memory for the inputs of all steps."""
    of, empty = family("llama"), torch.empty
    with CudaDouble() as double:
        watcher = Watcher(double, monkeypatch)
        runner = device(of, device="cuda", recorder=CudaGraphs())
        rings: dict[Any, torch.Tensor] = {}

        def reused(shape: Any, **options: Any) -> torch.Tensor:
            memory = empty(shape, **options)
            return rings.setdefault(memory.shape, memory) if options.get("pin_memory") else memory

        monkeypatch.setattr(decode_graphs.torch, "empty", reused)
        ask(runner, of.requests)
        monkeypatch.undo()
        faults = watcher.faults()
    assert {fault.what for fault in faults} == {"pinned memory was written before its copy was done"}
    assert all(fault.line.startswith("decode_graphs.py:") for fault in faults)


@pytest.mark.parametrize("name", families("llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm"))
def test_images_are_answered_as_on_the_cpu(
    name: str, family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Today encoders wait for the device: the lines are known. No other line waits, and no decode step."""
    of = family(name)
    with CudaDouble() as double:
        watcher = Watcher(double, monkeypatch)
        runner = device(of, device="cuda", recorder=CudaGraphs())
        assert ask(runner, of.requests).answers == of.answers
        assert not watcher.faults(is_quiet=True) and watcher.usual("launches") <= 28
        assert watcher.faults() and all(fault.line.startswith(ENCODER_LINES) for fault in watcher.faults())
