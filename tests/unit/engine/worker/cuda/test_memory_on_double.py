"""A device that runs out of memory, on the double: at each place where a step allocates, and as a sum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

# First: where torch is missing, this skips the rest.
from tests.support.models import BuildFamily, ask, device

# isort: split
import torch

from tests.support.interpreter import require_interpreter

require_interpreter()

from penstock.engine.protocol.messages import FinishReason, SamplingParams, Step  # noqa: E402
from penstock.engine.worker import weight_loader  # noqa: E402
from penstock.engine.worker.cuda import step_room  # noqa: E402
from penstock.engine.worker.cuda.step_room import kv_nbytes_of_token, least_step_nbytes, require_step, step_nbytes  # noqa: E402
from penstock.engine.worker.cuda.steps import CudaSteps  # noqa: E402
from penstock.engine.worker.encoding_exchange import EncoderOptions  # noqa: E402
from penstock.engine.worker.grammars import Grammars  # noqa: E402
from penstock.engine.worker.paged_attention import KVCache  # noqa: E402
from tests import tiers  # noqa: E402
from tests.support.cuda_double import CudaDouble  # noqa: E402
from tests.unit.engine.worker.cuda.test_engine_on_double import BUDGET, OnDouble  # noqa: E402

PLACES = 200
PARAMS = [
    SamplingParams(ignore_eos=True, temperature=0, logprobs=2, frequency_penalty=0.5),
    SamplingParams(ignore_eos=True, temperature=0, logit_bias=((5, 1.0),), presence_penalty=0.5),
]


def failures(double: CudaDouble, places: range) -> Iterator[int]:
    """Yields the number of an allocation from now on that fails."""
    for place in places:
        double.fail_at = double.allocated + place
        yield place
    double.fail_at = 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["llama", "qwen2_vl"])
def test_allocation_that_fails_ends_no_worker_and_changes_no_answer(
    name: str, family: BuildFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps run without graphs, which have no allocation. Requests of the step fail; the same runner goes on."""
    of = family(name, num_hidden_layers=1)
    shortest = sorted(of.requests, key=lambda request: (not request.inputs, len(request.prompt)))
    requests = [request._replace(tokens=2) for request in shortest[1:3]]
    options: dict[str, Any] = {"params": PARAMS, "slots": 2, "budget": BUDGET}
    expected = ask(device(of), requests, **options).answers
    runner = OnDouble(of, monkeypatch, has_graphs=False, blocks=64)
    double, num_failed, num_answered = runner.double, 0, 0
    places = range(1, PLACES + 1, 41 if tiers.TIER == "push" else 1)
    for place in failures(double, places):
        result = runner.ask(requests, **options)
        assert set(result.reasons.values()) <= {FinishReason.ERROR}, place
        answered = set(range(len(requests))) - result.failed
        assert [result.answers[at] for at in answered] == [expected[at] for at in answered], place
        num_failed += bool(result.failed)
        num_answered += len(answered)
    assert num_failed > len(places) / 2 and num_answered > len(places) / 2
    assert runner.ask(requests, **options).answers == expected


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2_vl"])
def test_request_without_room_is_refused_before_weights_are_read(
    name: str, family: BuildFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = family(name)
    model = OnDouble(of, monkeypatch).runner._model
    assert kv_nbytes_of_token(model.stock) == KVCache.nbytes_of_block(model.shapes, 1, model.dtype)
    monkeypatch.setattr(weight_loader, "load", lambda *_: pytest.fail("weights are read"))
    monkeypatch.setattr("penstock.engine.worker.model_runner.KEPT_NBYTES", 1 << 20)
    with pytest.raises(ValueError, match=r"no room for one request: .* of 160000000 tokens, .* --max-model-len"):
        OnDouble(of, monkeypatch, blocks=None, max_blocks_per_request=10_000_000, block_size=16)


def test_largest_step_without_room_is_refused_before_weights_are_read(
    family: BuildFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_loader, "load", lambda *_: pytest.fail("weights are read"))
    monkeypatch.setattr("penstock.engine.worker.model_runner.KEPT_NBYTES", 1 << 20)
    options = {"blocks": None, "max_blocks_per_request": 4, "token_budget": 1 << 20}
    text = r"no room for one request: .* for a step of 1048576 tokens are .*--gpu-memory-utilization.* --max-model-len"
    with pytest.raises(ValueError, match=text):
        OnDouble(family("llama"), monkeypatch, **options)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2_vl", "qwen3_moe"])
@pytest.mark.parametrize("tokens", [16, 500])
def test_least_bytes_of_a_step_are_no_more_than_it_has(
    name: str, tokens: int, family: BuildFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = OnDouble(family(name), monkeypatch, has_graphs=False)
    with runner.double:
        measured = step_nbytes(runner.runner._model, tokens, 4)
    assert measured / 8 < least_step_nbytes(runner.runner._model.stock, tokens, 4) <= measured


def test_step_that_runs_out_of_memory_as_it_is_measured_is_refused(
    family: BuildFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = OnDouble(family("llama"), monkeypatch, has_graphs=False)
    model, text = runner.runner._model, "no room for one request: a step of 16 tokens .* lower --max-num-batched-tokens"
    with runner.double:
        assert require_step(model, 16, 4) == step_nbytes(model, 16, 4)
        monkeypatch.setattr(model.ranks, "least", lambda _: 0)
        with pytest.raises(ValueError, match=text.replace("tokens .*", "tokens .*another rank.*")):
            require_step(model, 16, 4)
        monkeypatch.undo()
        runner.double.total_nbytes = runner.double.held_nbytes + 512
        with pytest.raises(ValueError, match=text.replace("tokens .*", "tokens .*Tried to allocate.*")):
            require_step(model, 16, 4)


def test_request_without_room_beside_the_measured_step_is_refused(
    family: BuildFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_room, "least_step_nbytes", lambda *_: 0)
    monkeypatch.setattr("penstock.engine.worker.model_runner.KEPT_NBYTES", 1 << 20)
    options = {"blocks": None, "max_blocks_per_request": 4, "token_budget": 1024, "memory_utilization": 0.003}
    text = r" 0.0 MiB left, and 4 blocks .*MiB are for a step of 1024 tokens\): raise --gpu-memory-utilization or lower"
    with pytest.raises(ValueError, match=text):
        OnDouble(family("llama"), monkeypatch, **options)


def test_failed_step_lets_go_of_its_tensors_before_memory_is_returned(
    family: BuildFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the device would get nothing back: an error holds the tensors of all its frames."""
    of = family("llama", num_hidden_layers=1)
    runner = OnDouble(of, monkeypatch, has_graphs=False, blocks=64)
    double = runner.double
    request = of.requests[1]._replace(tokens=2)
    assert not runner.ask([request]).failed
    held = double.held_nbytes
    for place in failures(double, range(4, 40, 12)):
        double.held_when_emptied.clear()
        assert runner.ask([request]).failed, place
        assert set(double.held_when_emptied) == {held}, place


@pytest.mark.parametrize(
    "text", ["Triton Error [CUDA]: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "invalid argument"]
)
def test_want_of_memory_of_a_library_fails_the_requests_of_a_step(
    text: str, family: BuildFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises an error of its own for its allocator alone. Any other error ends the worker."""
    of = family("llama", num_hidden_layers=1)
    runner, launch, calls = OnDouble(of, monkeypatch, has_graphs=False, blocks=64), CudaDouble.launch_kernel, [0]
    request = of.requests[1]._replace(tokens=2)

    def fail_once(*arguments: Any, **options: Any) -> None:
        calls[0] += 1
        if calls[0] == 5:
            raise RuntimeError(text)
        launch(*arguments, **options)

    monkeypatch.setattr(CudaDouble, "launch_kernel", fail_once)
    if "invalid" in text:
        with pytest.raises(RuntimeError, match=text):
            runner.ask([request])
        return
    assert runner.ask([request]).failed
    assert runner.ask([request]).answers == [of.answers[1][:2]]


def test_grammars_follow_a_step_with_a_join_that_fails(family: BuildFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a slot that leaves in this step would keep its grammar for the next request."""
    of, followed = family("llama", num_hidden_layers=1), list[Step]()
    runner = OnDouble(of, monkeypatch, has_graphs=False, blocks=64)

    def join(*_: object) -> None:
        raise torch.OutOfMemoryError("no table of penalties")

    monkeypatch.setattr(CudaSteps, "join", join)
    monkeypatch.setattr(Grammars, "launch", lambda grammars, batch, step: followed.append(step))
    states: Any = runner.runner._grammars.states
    states[7] = "a grammar"
    assert runner.ask(of.requests[1:2]).failed
    assert [step.joined is not None for step in followed[:1]] == [True]


@pytest.mark.parametrize("name", ["llama", "qwen2_vl"])
def test_bytes_held_are_at_most_the_share_of_the_device(
    name: str, family: BuildFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many blocks as there is room for: weights, cache, graphs, steps with log-probabilities and penalties."""
    of = family(name)
    monkeypatch.setattr("penstock.engine.worker.model_runner.KEPT_NBYTES", 1 << 20)
    options = {
        "max_blocks_per_request": 16,
        "memory_utilization": 0.01,
        "encoder": EncoderOptions(cache_nbytes=1 << 20),
    }
    runner = OnDouble(of, monkeypatch, blocks=None, **options)
    assert runner.runner.blocks > 64
    runner.ask(of.requests[:4], params=PARAMS)
    assert runner.double.peak_nbytes + runner.double.pool_nbytes <= 0.01 * runner.double.total_nbytes
