"""Graphs on a CUDA device, where there is one. `test_cuda_double` records them on a double."""

import contextlib
from collections.abc import Callable

import numpy as np
import pytest

# First: where torch is missing, this skips the rest.
from tests.support.models import Family, ask, device

# isort: split
import torch

from penstock.engine.worker.cuda.graphs import CudaGraphs
from penstock.engine.worker.model_runner import TorchPendingStep
from tests.support.libcuda import has_device, open_device

NEEDS_CUDA = pytest.mark.skipif(not has_device(), reason="needs a CUDA device: a graph is recorded there")


@NEEDS_CUDA
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2_vl", "qwen3_moe"])
def test_graphs_of_a_device_answer_what_it_answers_without(name: str, family: Callable[[str], Family]) -> None:
    """Mixtures in float32 are computed one expert after the other: they are not recorded, and answered all the same."""
    of = family(name)
    ours = device(of, device="cuda", recorder=CudaGraphs())
    assert ask(ours, of.requests).answers == ask(device(of, device="cuda"), of.requests).answers
    assert ours._decoding._is_recording or name == "qwen3_moe"


@pytest.mark.skipif(torch.version.cuda is not None and not has_device(), reason="needs a CUDA device")
def test_a_result_does_not_wait_for_what_was_launched_after_it() -> None:
    with contextlib.nullcontext() if has_device() else open_device():
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
