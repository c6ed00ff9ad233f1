"""The double of a CUDA device finds each of the faults that are planted here, one a line, at its line.

`cuda/test_engine_on_double.py` runs the engine on it.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'penstock[engine]'")

from penstock.engine.worker.cuda.graphs import CudaGraphs, InvalidatedCapture  # noqa: E402
from penstock.engine.worker.input_batch import moved  # noqa: E402
from tests.support.cuda_double import CUDA, POISON, CudaDouble  # noqa: E402

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


def test_double_leaves_torch_as_it_was() -> None:
    """Also where an operation is decomposed within: a later double of the process finds torch's own functions."""
    before = torch.cuda.is_available, torch.cuda.set_device, torch.tensor
    double = CudaDouble()
    for _ in range(2):
        with double, torch.inference_mode():
            stream = torch.cuda.default_stream()
            assert torch.ones(2, 3, device="cuda").reshape(6).tolist() == [1] * 6
            assert torch.cuda.default_stream() is stream and torch.cuda.is_available is not before[0]
        assert (torch.cuda.is_available, torch.cuda.set_device, torch.tensor) == before


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


@pytest.mark.parametrize("way", ["nothing", "stream", "event", "host"])
def test_work_waits_for_the_stream_that_has_its_memory(way: str, double: CudaDouble, numbers: torch.Tensor) -> None:
    def plant() -> torch.Tensor:
        return numbers * 2

    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    event.record()
    if way == "stream":
        stream.wait_stream(torch.cuda.current_stream())
    elif way == "event":
        stream.wait_event(event)
    elif way == "host":
        event.synchronize()
    with double.watched() as report, torch.cuda.stream(stream):
        result = plant()
        result += 1
    if way == "nothing":
        (fault,) = report.faults
        assert "another stream" in fault.what
        assert fault.line == f"test_cuda_double.py:{inspect.getsourcelines(plant)[1] + 1}"
    else:
        assert not report.faults


@pytest.mark.parametrize("waits", [True, False])
def test_recording_waits_for_streams_in_both_directions(
    waits: bool, double: CudaDouble, numbers: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not waits:
        monkeypatch.setattr(CudaDouble.Stream, "wait_stream", lambda *_: None)
    with double.watched() as report:
        CudaGraphs().record(lambda: numbers.add_(1))
        numbers.add_(1)
    assert len(report.faults) == (0 if waits else 2)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_memory_that_is_not_written_holds_poison(dtype: torch.dtype, double: CudaDouble) -> None:
    memory = [torch.empty(3, dtype=dtype, device="cuda")]
    memory += [memory[0].new_empty(3), torch.empty_like(memory[0])]
    assert {int(value) for tensor in memory for value in tensor.view(torch.uint8).tolist()} == {POISON}


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


def test_memory_for_a_result_that_is_read_before_it_is_written(double: CudaDouble, numbers: torch.Tensor) -> None:
    """Planted: a replay reads what the replay before it has written."""
    shared = torch.zeros(4, device="cuda")

    def plant() -> torch.Tensor:
        return shared[1:3] + 1

    def compute() -> torch.Tensor:
        stale = plant()
        torch.mul(numbers[:2], 2, out=shared[2:])
        return torch.cat((stale, shared[2:]))

    replay = CudaGraphs().record(compute)
    shared.fill_(1)
    with double.watched() as report:
        result = replay()
    (fault,) = report.faults
    assert "before it is written" in fault.what
    assert fault.line == f"test_cuda_double.py:{inspect.getsourcelines(plant)[1] + 1}"
    assert result[0] == 2 and result[1] not in (1, 2), "poison, where the graph writes later"
    assert result[2:].tolist() == [0, 2]


def test_memory_that_is_overwritten_first_may_be_read(double: CudaDouble, numbers: torch.Tensor) -> None:
    shared = torch.zeros(4, device="cuda")

    def compute() -> torch.Tensor:
        total = shared.zero_().sum()
        return torch.mul(numbers, total + 2, out=shared).sum()

    replay = CudaGraphs().record(compute)
    with double.watched() as report:
        results = [replay().item() for _ in range(2)]
    assert results == [12, 12] and {fault.what for fault in report.faults} == {"waits: _local_scalar_dense"}


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
    with pytest.raises(RuntimeError, match="not permitted"):
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
    ("options", "calls", "why"), [({"reads": True}, 2, "synchronizing"), ({"fails_at": 3}, 3, "cannot be recorded")]
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


def test_capture_that_is_invalidated_stays_underway(double: CudaDouble, numbers: torch.Tensor) -> None:
    """As in torch: the allocator can neither return memory nor begin another capture."""
    stream = torch.cuda.Stream()
    with (
        pytest.raises(RuntimeError, match="previous error during capture") as raised,
        torch.cuda.stream(stream),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
    ):
        numbers.sum().item()
    assert "not permitted when stream is capturing" in str(raised.value.__context__)
    with pytest.raises(RuntimeError, match="captures_underway"):
        torch.cuda.empty_cache()
    with (
        pytest.raises(RuntimeError, match="captures_underway"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
    ):
        pass


def test_other_thread_may_ask_about_an_event_while_a_graph_is_recorded(
    double: CudaDouble, numbers: torch.Tensor
) -> None:
    """As the thread of NCCL does. In the mode "global" the capture would be invalid."""
    event, stream = torch.cuda.Event(), torch.cuda.Stream()
    event.record()

    def compute() -> torch.Tensor:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(event.query).result()
        return numbers * 2

    assert CudaGraphs().record(compute)().tolist() == [0, 2, 4, 6]
    with pytest.raises(InvalidatedCapture, match="a question about an event"):
        CudaGraphs().record(lambda: numbers * (2 if double.tape is None else 2 + event.query()))
    double.captures_underway = 0
    with (
        pytest.raises(RuntimeError, match="previous error during capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
    ):
        compute()


def test_capture_that_is_invalidated_is_told_from_one_that_fails(double: CudaDouble, numbers: torch.Tensor) -> None:
    """Libraries may wait where torch does not see it: only the capture finds out."""

    def compute() -> torch.Tensor:
        return numbers * (2 if double.tape is None else numbers.sum().item())

    graphs = CudaGraphs()
    with pytest.raises(RuntimeError, match="cannot be recorded"):
        graphs.record(Recorded(double, fails_at=3))
    torch.cuda.empty_cache()
    with pytest.raises(InvalidatedCapture, match="not permitted when stream is capturing"):
        graphs.record(compute)
    assert torch.cuda.current_stream() is torch.cuda.default_stream()
