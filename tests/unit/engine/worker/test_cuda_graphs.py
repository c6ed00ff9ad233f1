"""Graphs of a CUDA device: in which order they are recorded, on a double; and on a device, where there is one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

# First: where torch is missing, this skips the rest.
from tests.support.models import Family, ask, device

# isort: split
import torch

from penstock.engine.worker.cuda_graphs import CudaGraphs
from penstock.engine.worker.model_runner import TorchPendingStep

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: a graph is recorded there")


class Double:
    """In place of `torch.cuda`: it notes in which order it is told what, and its streams do nothing."""

    def __init__(self) -> None:
        self.stream_now, self.mode, self.is_recording = "default", 0, False
        self.seen: list[tuple[str, int, bool]] = []

    def compute(self, *, fails_at: int = 9, waits: bool = False) -> torch.Tensor:
        self.seen.append((self.stream_now, self.mode, self.is_recording))
        if len(self.seen) == fails_at or (waits and self.mode):
            raise RuntimeError("called a synchronizing CUDA operation")
        return torch.full((2,), len(self.seen))

    def set_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        double = self

        class Stream:
            def __init__(self, name: str = "side") -> None:
                self.name = name

            def wait_stream(self, _: Any) -> None: ...

        @contextmanager
        def stream(of: Stream) -> Iterator[None]:
            before, double.stream_now = double.stream_now, of.name
            try:
                yield
            finally:
                double.stream_now = before

        class Recording:
            def __init__(self, graph: Any, *, pool: Any, stream: Stream, capture_error_mode: str) -> None:
                assert (pool, capture_error_mode) == ("pool", "thread_local")
                self._stream = stream

            def __enter__(self) -> None:
                double.stream_now, double.is_recording = self._stream.name, True

            def __exit__(self, kind: Any, *_: Any) -> None:
                double.is_recording = False
                if kind is not None:
                    raise RuntimeError("the recording was invalidated")  # and, as torch's, stays on its stream
                double.stream_now = "side"

        class Graph:
            def replay(self) -> None:
                double.seen.append(("replay", 0, False))

        for name, value in {
            "Stream": Stream,
            "stream": stream,
            "graph": Recording,
            "CUDAGraph": Graph,
            "graph_pool_handle": lambda: "pool",
            "current_stream": lambda: Stream(double.stream_now),
            "get_sync_debug_mode": lambda: double.mode,
            "set_sync_debug_mode": lambda mode: setattr(double, "mode", 2 if mode == "error" else mode),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


def test_graph_is_recorded_after_a_warm_up_without_synchronization(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    double = Double()
    double.set_up(monkeypatch)
    replay = CudaGraphs().record(double.compute)
    assert double.seen == [("side", 0, False), ("side", 2, False), ("side", 0, True)]
    assert replay().tolist() == [3, 3] and double.seen[3:] == [("replay", 0, False)]
    assert (double.stream_now, double.mode) == ("default", 0)


@pytest.mark.parametrize(
    ("options", "calls", "why"), [({"waits": True}, 2, "synchronizing"), ({"fails_at": 3}, 3, "inval")]
)
def test_a_graph_that_cannot_be_recorded_leaves_the_device_as_it_was(
    options: dict[str, Any], calls: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    double = Double()
    double.set_up(monkeypatch)
    with pytest.raises(RuntimeError, match=why):
        CudaGraphs().record(lambda: double.compute(**options))
    assert len(double.seen) == calls
    assert (double.stream_now, double.mode, double.is_recording) == ("default", 0, False)


# ── on a device ──────────────────────────────────────────────────────────────────────────────────────────────────────
@NEEDS_CUDA
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2_vl", "qwen3_moe"])
def test_graphs_of_a_device_answer_what_it_answers_without(name: str, family: Callable[[str], Family]) -> None:
    """Mixtures in float32 are computed one expert after the other: they are not recorded, and answered all the same."""
    of = family(name)
    ours = device(of, device="cuda", recorder=CudaGraphs())
    assert ask(ours, of.requests).answers == ask(device(of, device="cuda"), of.requests).answers
    assert ours._decoding._is_recording or name == "qwen3_moe"


@NEEDS_CUDA
def test_a_result_does_not_wait_for_what_was_launched_after_it() -> None:
    ids = torch.arange(3, dtype=torch.int32, device="cuda")
    flight = TorchPendingStep(ids, np.arange(3), None, {})
    torch.cuda._sleep(10**10)
    assert flight.result().ids.tolist() == [0, 1, 2]
    assert not torch.cuda.current_stream().query()


@NEEDS_CUDA
def test_whoever_waits_while_it_is_recorded_is_told_and_goes_on() -> None:
    graphs, number = CudaGraphs(), torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="synchronizing"):
        graphs.record(lambda: number * number.sum().item())
    replay = graphs.record(lambda: number * 2)
    number.fill_(4)
    assert replay().tolist() == [8, 8, 8]
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.cuda.get_sync_debug_mode() == 0
