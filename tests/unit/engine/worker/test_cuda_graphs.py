"""Graphs on a CUDA device, where there is one. `test_cuda_double` records them on a double."""

import contextlib
import logging

import numpy as np
import pytest

# First: where torch is missing, this skips the rest.
from tests.support.models import BuildFamily, ask, device

# isort: split
import torch

from penstock.engine.protocol.config import EngineConfig
from penstock.engine.worker.cuda import graphs
from penstock.engine.worker.cuda.graphs import CudaGraphs
from penstock.engine.worker.cuda.pending_step import CudaPendingStep
from penstock.engine.worker.worker import recorder_of
from tests.support.libcuda import has_device, open_device

NEEDS_CUDA = pytest.mark.skipif(not has_device(), reason="needs a CUDA device: a graph is recorded there")


@NEEDS_CUDA
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2_vl", "qwen3_moe"])
def test_graphs_of_a_device_answer_what_it_answers_without(name: str, family: BuildFamily) -> None:
    """Mixtures in float32 are computed one expert after the other: they are not recorded, and answered all the same."""
    of = family(name)
    ours = device(of, device="cuda", recorder=CudaGraphs())
    assert ask(ours, of.requests).answers == ask(device(of, device="cuda"), of.requests).answers
    assert ours._cuda is not None and (len(ours._cuda._decode.graphs) or name == "qwen3_moe")


@pytest.mark.skipif(torch.version.cuda is not None and not has_device(), reason="needs a CUDA device")
def test_result_of_a_cuda_step_does_not_wait_for_later_work() -> None:
    with contextlib.nullcontext() if has_device() else open_device():
        ids = torch.arange(3, dtype=torch.int32, device="cuda")
        flight = CudaPendingStep(torch.stack((ids, ids), 1), np.arange(3), None, {})
        torch.cuda._sleep(10**10)
        result = flight.result()
        assert result.ids.tolist() == [0, 1, 2] and set(result.failed) == {1, 2}
        assert not torch.cuda.current_stream().query()


@NEEDS_CUDA
def test_synchronizing_in_a_cuda_graph_recording_raises_and_leaves_no_mode() -> None:
    recorder, number = CudaGraphs(), torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="synchronizing"):
        recorder.record(lambda: number * number.sum().item())
    replay = recorder.record(lambda: number * 2)
    number.fill_(4)
    assert replay().tolist() == [8, 8, 8]
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.cuda.get_sync_debug_mode() == 0


def test_only_cuda_steps_are_recorded_and_a_refusal_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graphs, "CudaGraphs", object)
    with caplog.at_level(logging.INFO, "penstock.engine"):
        assert recorder_of(EngineConfig(model="m", device="cpu")) is None
        assert recorder_of(EngineConfig(model="m", device="cuda")) is not None
        assert not caplog.records
        assert recorder_of(EngineConfig(model="m", device="cuda", enforce_eager=True)) is None
    assert [record.message for record in caplog.records] == ["steps are not recorded"]
