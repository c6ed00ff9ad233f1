"""A CUDA device that is out of memory: the step's requests fail, and the worker goes on."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

# First: where torch is missing, this skips the rest.
from tests.support.models import BuildFamily, ask, device

# isort: split
import torch

from penstock.engine.protocol.messages import FinishReason
from penstock.engine.worker.model_runner import ModelRunner


@pytest.fixture
def runner(family: BuildFamily, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    """A runner with the control flow of a CUDA device. The CPU computes the steps."""
    runner = device(family("llama"))
    state = SimpleNamespace(forgotten=0)

    def forget() -> None:
        state.forgotten += 1

    def join(slot: int, batch: Any, *_: Any) -> None:
        with mock.patch.object(runner, "_cuda", None):
            runner._join(slot, batch)

    state.forget = forget
    monkeypatch.setattr(runner, "_cuda", SimpleNamespace(state=state, join=join, follow=lambda step: None))
    return runner


def compute_except(runner: ModelRunner, failing: set[int]) -> Callable[..., Any]:
    """Returns a computation of steps on the CPU that is out of memory in the steps with these numbers."""
    numbers = iter(range(10**6))
    launch = ModelRunner.launch

    def compute(batch: Any, cuda: Any) -> Any:
        if next(numbers) in failing:
            raise torch.OutOfMemoryError("CUDA out of memory")
        runner._cuda = None
        try:
            return launch(runner, batch, SimpleNamespace(left=None, joined=None))  # type: ignore[arg-type]
        finally:
            runner._cuda = cuda

    return compute


def test_requests_of_a_step_without_memory_fail_and_others_are_answered(
    runner: ModelRunner, family: BuildFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = family("llama").requests
    monkeypatch.setattr(runner, "_compute_on_cuda", compute_except(runner, {4}))
    result = ask(runner, requests)
    assert runner._cuda is not None and runner._cuda.state.forgotten == 1  # type: ignore[attr-defined]
    assert 0 < len(result.failed) < len(requests)
    assert set(result.reasons.values()) == {FinishReason.ERROR}
    expected = family("llama").answers
    answered = set(range(len(requests))) - result.failed
    assert [result.answers[number] for number in answered] == [expected[number] for number in answered]


@pytest.mark.parametrize("failing", [{4, 5}, {2, 5}], ids=["the next one was on its way", "not in a row"])
def test_two_steps_without_memory_end_no_worker(
    failing: set[int], runner: ModelRunner, family: BuildFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_compute_on_cuda", compute_except(runner, failing))
    result = ask(runner, family("llama").requests)
    assert runner._cuda is not None and runner._cuda.state.forgotten == 2  # type: ignore[attr-defined]
    assert result.failed


def test_third_step_in_a_row_without_memory_ends_the_worker(
    runner: ModelRunner, family: BuildFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_compute_on_cuda", compute_except(runner, {4, 5, 6}))
    with pytest.raises(MemoryError, match="--gpu-memory-utilization"):
        ask(runner, family("llama").requests)
