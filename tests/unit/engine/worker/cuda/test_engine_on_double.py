"""The model runner on the double of a CUDA device. Triton's interpreter runs the kernels.

Each family answers as `transformers` does, with graphs and without, and no step waits for the device.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

# First: where torch is missing, this skips the rest.
from tests.support.models import (
    BLOCK_SIZE,
    TEXT,
    VISION,
    WORDS,
    Asked,
    BuildFamily,
    Family,
    Told,
    ask,
    build_family,
    device,
    made_with_videos,
    must_be_greedy,
)

# isort: split
import torch

from tests.support.interpreter import require_interpreter

require_interpreter()

from penstock.engine.model_dir import VIDEO  # noqa: E402
from penstock.engine.protocol.batch_state import BatchState  # noqa: E402
from penstock.engine.protocol.messages import SamplingParams, Step  # noqa: E402
from penstock.engine.worker import input_batch, model_runner  # noqa: E402
from penstock.engine.worker.cuda import step_graphs  # noqa: E402
from penstock.engine.worker.cuda.graphs import CudaGraphs  # noqa: E402
from penstock.engine.worker.cuda.pending_step import CudaPendingStep  # noqa: E402
from penstock.engine.worker.device import PendingStep  # noqa: E402
from penstock.engine.worker.image_encoder import ImageEncoder  # noqa: E402
from penstock.engine.worker.input_batch import build_batch  # noqa: E402
from penstock.engine.worker.model_runner import ModelRunner  # noqa: E402
from penstock.engine.worker.tensor_parallel import TPGroup  # noqa: E402
from penstock.tensor import Handle, Store  # noqa: E402
from penstock.tensor.cuda import CudaPool, CudaTensors, DeviceScope  # noqa: E402
from tests import tiers  # noqa: E402
from tests.conftest import eventually  # noqa: E402
from tests.support.cuda_double import CudaDouble, Fault, Report, numbers_of  # noqa: E402
from tests.support.ranks import Work, ranks_must_answer, run_ranks  # noqa: E402
from tests.unit.engine.worker.test_long_answers import random_requests  # noqa: E402
from tests.unit.engine.worker.test_odd_shapes import MODELS, odd  # noqa: E402
from tests.unit.engine.worker.test_prompt_embeds_of_models import embedded  # noqa: E402
from tests.unit.engine.worker.test_rope import changes  # noqa: E402

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")

BUDGET = 16  # tokens of the largest step: the only size of steps with chunks that is recorded
PUSHED = ("gemma2", "qwen2_vl")
GREEDY = SamplingParams(ignore_eos=True, temperature=0)
PENALIZED = SamplingParams(
    ignore_eos=True, top_k=30, top_p=0.9, min_p=0.01, presence_penalty=0.5, repetition_penalty=1.2
)
VARIED = [
    PENALIZED,
    SamplingParams(ignore_eos=True, logit_bias=((5, 4.0), (9, -100.0)), frequency_penalty=0.5),
    SamplingParams(ignore_eos=True, temperature=0, presence_penalty=1.0, logprobs=2),
    SamplingParams(ignore_eos=True, allowed_token_ids=(4, 5, 6, 7), top_k=3, logprobs=0),
    SamplingParams(ignore_eos=True, min_tokens=4, stop_token_ids=tuple(range(3, 90))),
    SamplingParams(ignore_eos=True, min_tokens=4, stop_token_ids=tuple(range(3, 90)), frequency_penalty=0.5),
    GREEDY,
    SamplingParams(ignore_eos=True, frequency_penalty=0.7, top_p=0.8),
]
BAD_WORDS = [
    SamplingParams(ignore_eos=True, temperature=0, bad_words_ids=tuple((token,) for token in range(3, 60))),
    SamplingParams(ignore_eos=True, top_k=4, bad_words_ids=tuple((a, b) for a in range(60) for b in range(a, 60, 3))),
]


def chosen(*names: str) -> list[str]:
    return [name for name in names if tiers.TIER != "push" or name in PUSHED]


class Watcher:
    """Watches the steps that a model runner launches."""

    def __init__(self, double: CudaDouble, monkeypatch: pytest.MonkeyPatch) -> None:
        self._double = double
        self._steps: list[tuple[Report, bool, bool]] = []  # and whether it has no news, and no chunk
        launch, follows_decoding = ModelRunner.launch, False

        def watched(runner: ModelRunner, batch: BatchState, step: Step) -> PendingStep:
            nonlocal follows_decoding
            with double.watched() as report:
                pending = launch(runner, batch, step)
            news = (step.left, step.preempted, step.joined, step.resumed, step.appended)
            is_quiet = follows_decoding and all(change is None for change in news)
            follows_decoding = step.advances is None
            self._steps.append((report, is_quiet, follows_decoding))
            return pending

        monkeypatch.setattr(ModelRunner, "launch", watched)

    def faults(self) -> set[Fault]:
        """Returns the faults of all steps, with those of copies that were launched in them."""
        self._double.pass_copies(self._double.launched)
        return {fault for report, _, _ in self._steps for fault in report.faults}

    def decode_counts(self, *, is_quiet: bool) -> list[dict[str, int]]:
        return [report.counts() for report, quiet, decodes in self._steps if decodes and quiet == is_quiet]


class OnDouble:
    """A model runner on a double, and the watcher of its steps."""

    def __init__(self, of: Family, monkeypatch: pytest.MonkeyPatch, *, has_graphs: bool = True, **options: Any) -> None:
        self.double = CudaDouble()
        with self.double:
            self.watcher = Watcher(self.double, monkeypatch)
            recorder = CudaGraphs() if has_graphs else None
            self.runner = device(of, **{"device": "cuda", "token_budget": BUDGET, "recorder": recorder} | options)
            assert self.runner._cuda is not None
            self.graphs = self.runner._cuda._decode.graphs, self.runner._cuda._mixed.graphs

    def ask(self, requests: Sequence[Asked], **options: Any) -> Told:
        with self.double:
            return ask(self.runner, requests, **{"budget": BUDGET} | options)

    def faults(self) -> set[Fault]:
        with self.double:
            return self.watcher.faults()


NewDouble = Callable[..., OnDouble]


@pytest.fixture
def on_double(monkeypatch: pytest.MonkeyPatch) -> NewDouble:
    return lambda of, **options: OnDouble(of, monkeypatch, **options)


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", chosen(*TEXT))
def test_text_by_graphs_is_answered_as_by_transformers(name: str, family: BuildFamily, on_double: NewDouble) -> None:
    """Chunks, preemptions and prefixes of others are in between. No step waits for the device."""
    of = family(name)
    runner = on_double(of)
    result = runner.ask(of.requests)
    assert result.answers == of.answers and result.preemptions > 0 and result.cached_tokens > 0
    assert not runner.faults()
    if not name.endswith("moe") and name != "mixtral":  # experts are computed in turn
        assert [len(graphs) for graphs in runner.graphs] == [3, 1]


@pytest.mark.parametrize("name", chosen(*TEXT))
def test_random_text_without_graphs_is_answered_as_on_the_cpu(
    name: str, family: BuildFamily, on_double: NewDouble
) -> None:
    of = family(name)
    options: dict[str, Any] = {"seed": 3, "logprobs": 2, "budget": 6}
    expected = ask(device(of), of.requests[4:6], **options)
    runner = on_double(of, has_graphs=False)
    result = runner.ask(of.requests[4:6], **options)
    assert result.answers == expected.answers and result.preemptions == expected.preemptions
    for values, reference in zip(result.logprobs, expected.logprobs, strict=True):
        assert values == pytest.approx(reference, abs=1e-3)
    assert not runner.faults()


def variant(kernel: Any, *arguments: Any, **options: Any) -> tuple[Any, ...]:
    """Returns what Triton compiles a kernel for."""
    names, parameters = dict(zip(kernel.arg_names, arguments)) | options, inspect.signature(kernel.fn).parameters
    key = []
    for name, value in names.items():
        if isinstance(value, torch.Tensor):
            key.append((name, value.dtype, value.data_ptr() % 16 == 0))
        elif name not in parameters or "constexpr" in str(parameters[name].annotation):
            key.append((name, value))
        elif isinstance(value, int) and name not in (kernel.kwargs["do_not_specialize"] or ()):
            key.append((name, value == 1, value % 16 == 0))
    return kernel, *key


@pytest.mark.parametrize("slots", [4, 6])
@pytest.mark.parametrize("has_graphs", [False, True])
def test_each_kernel_is_compiled_before_the_first_request(
    has_graphs: bool,
    slots: int,
    family: BuildFamily,
    on_double: NewDouble,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For each alignment of addresses and number that is a constant of the kernel."""
    launch, launched = CudaDouble.launch_kernel, set[Any]()

    def note(double: CudaDouble, kernel: Any, grid: Any, *arguments: Any, **options: Any) -> None:
        launched.add(variant(kernel, *numbers_of(arguments), **options))
        launch(double, kernel, grid, *arguments, **options)

    monkeypatch.setattr(CudaDouble, "launch_kernel", note)
    of = family("qwen3")
    runner = on_double(of, has_graphs=has_graphs, slots=slots, blocks=64)
    compiled = set(launched)
    assert len(compiled) > len({kernel for kernel, *_ in compiled}) > 8
    few = [request._replace(prompt=request.prompt[:2], tokens=12) for request in of.requests[:7]]
    runner.ask([*few, of.requests[4]], slots=slots)
    assert launched == compiled


@pytest.mark.parametrize("name", chosen(*VISION))
@pytest.mark.parametrize("budget", [6, BUDGET])
def test_images_are_answered_as_by_transformers(
    name: str, budget: int, family: BuildFamily, on_double: NewDouble
) -> None:
    """No encoder waits for the device."""
    of = family(name)
    some = slice(0, 4 if budget == BUDGET else 3)
    runner = on_double(of, has_graphs=budget == BUDGET)
    assert runner.ask(of.requests[some], budget=budget).answers == of.answers[some]
    assert not runner.faults()


@pytest.mark.parametrize("name", chosen(*VIDEO))
def test_videos_are_answered_as_by_transformers(name: str, tmp_path: Path, on_double: NewDouble) -> None:
    of = made_with_videos(name, tmp_path)
    runner = on_double(of)
    assert runner.ask(of.requests[:2]).answers == of.answers[:2]
    assert not runner.faults()


@pytest.mark.parametrize("name", chosen("gemma2", "qwen2_vl"))
def test_embeds_are_brought_to_the_device_without_a_wait(name: str, family: BuildFamily, on_double: NewDouble) -> None:
    of = embedded(family(name))
    runner = on_double(of, takes_embeds=True)
    runner.ask(of.requests[:2])
    assert not runner.faults()


@pytest.mark.parametrize("name", chosen("gemma2", "qwen2_vl", "qwen3_vl"))
def test_embeds_of_ids_are_answered_as_the_ids_are(name: str, family: BuildFamily, on_double: NewDouble) -> None:
    of = embedded(family(name))
    assert on_double(of, takes_embeds=True).ask(of.requests).answers == of.answers


@pytest.mark.parametrize("name", chosen("gemma2", "qwen2_vl"))
def test_resumed_answers_go_on(name: str, family: BuildFamily, on_double: NewDouble) -> None:
    of = family(name)
    resumed = [answer[: number % 11] for number, answer in enumerate(of.answers)]
    result = on_double(of).ask(of.requests, resumed=resumed)
    assert [[*before, *after] for before, after in zip(resumed, result.answers, strict=True)] == of.answers


@pytest.mark.parametrize("kind", ["longrope", pytest.param("dynamic", marks=tiers.needs_all)])
def test_rotary_frequencies_depend_on_each_row(kind: str, tmp_path: Path, on_double: NewDouble) -> None:
    of = build_family("llama", tmp_path, **changes("llama", kind))
    assert on_double(of).ask(of.requests[2:6]).answers == of.answers[2:6]


@tiers.needs_all
@pytest.mark.parametrize("number", range(0, MODELS, 6))
def test_model_of_any_shape_is_answered_as_by_transformers(number: int, tmp_path: Path, on_double: NewDouble) -> None:
    of = odd(number, tmp_path)
    runner = on_double(of)
    assert runner.ask(of.requests[:3]).answers == of.answers[:3] and not runner.faults()


@tiers.needs_all
def test_random_lengths_are_answered_as_by_transformers(family: BuildFamily, on_double: NewDouble, seed: int) -> None:
    """Joins, preemptions and prefix hits are in between, and rows of several parts."""
    of = family("llama", max_position_embeddings=160)
    requests = [Asked([WORDS[0]] * 130, [], 20), *random_requests(seed, 150)[:3]]
    result = on_double(of, blocks=150 // BLOCK_SIZE + 8, token_budget=100).ask(requests, budget=100)
    must_be_greedy(of.path, requests, result.answers)


@pytest.mark.timeout(400)  # 20 s alone, of which most is interpreting
def test_two_ranks_on_one_device_answer_as_one_by_gloo(family: BuildFamily, tmp_path: Path) -> None:
    ranks_must_answer(2, [family("qwen3")], tmp_path, slice(1, 4), device="cuda")


@pytest.mark.timeout(400)  # 20 s alone, of which most is interpreting
def test_rank_without_memory_for_a_step_fails_its_requests_on_all_ranks(family: BuildFamily, tmp_path: Path) -> None:
    """No rank waits for the other, and both go on."""
    of = family("qwen3")
    results = run_ranks(2, [of], tmp_path, slice(0, 3), "cuda", Work(tokens=2, shortages={1: {2: 8192}}))
    ranks = [result[str(of.path)] for result in results]
    assert ranks[0] == ranks[1]
    failed = set(ranks[0]["failed"])
    assert 0 < len(failed) < 3
    assert all(ranks[0]["answers"][at] == of.answers[at][:2] for at in set(range(3)) - failed)


def test_ranks_without_memory_for_joins_and_scores_go_on(family: BuildFamily, tmp_path: Path) -> None:
    """Rank 0 alone has tables of penalties. Log-probabilities of prompts are computed after the step, by all ranks."""
    of = family("qwen3")
    params = msgspec.structs.replace(GREEDY, prompt_logprobs=2, logit_bias=((5, 1.0),), frequency_penalty=0.5)
    requests = [request._replace(tokens=2) for request in of.requests]
    expected = ask(device(of), requests, params=[params], budget=10).answers
    first = {number: 512 * (1 + number // 3) for number in range(1, 10, 3)}
    second = {number: 1024 * number for number in range(12, 60, 3)}
    work = Work(tokens=2, params=(params,), shortages={0: first, 1: second})
    ranks = [result[str(of.path)] for result in run_ranks(2, [of], tmp_path, slice(None), "cuda", work)]
    assert ranks[0] == ranks[1]
    answered = set(range(len(requests))) - set(ranks[0]["failed"])
    assert 0 < len(answered) < len(requests)
    assert all(ranks[0]["answers"][at] == expected[at] for at in answered)


def test_two_ranks_on_a_device_divide_images(family: BuildFamily, tmp_path: Path) -> None:
    work = Work(encoder_mode="data")
    ranks_must_answer(2, [family("qwen2_vl")], tmp_path, slice(0, 3), device="cuda", work=work)


def test_images_are_released_when_their_step_is_done(
    family: BuildFamily, on_double: NewDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each result releases what its step has copied: an idle worker keeps no image."""
    of, released, done = family("llava"), [], []
    monkeypatch.setattr(ImageEncoder, "release_copied", lambda encoder: released.append(len(done)))
    result = CudaPendingStep.result

    def counted(pending: CudaPendingStep) -> Any:
        before = len(released)
        output = result(pending)
        assert len(released) > before
        done.append(pending)
        return output

    monkeypatch.setattr(CudaPendingStep, "result", counted)
    assert on_double(of).ask(of.requests[:2]).answers == of.answers[:2]
    assert done


def test_images_of_a_device_are_answered_as_those_of_the_host(family: BuildFamily) -> None:
    """A program has the pixels on the device of the worker."""
    pytest.importorskip("cuda.bindings", reason="needs cuda-bindings: pip install 'penstock[cuda]'")
    from tests.support.libcuda import open_device

    of = family("llava")
    with open_device(), Store(1 << 22) as store:
        pool = CudaPool.create(1 << 22)
        tensors = CudaTensors(pool, store)
        with DeviceScope(tensors, store) as scope:
            handles = {
                key: scope.put({name: tensor.pin_memory().to("cuda") for name, tensor in value.items()})
                for key, value in of.images.items()
            }
            runner = device(
                of,
                device="cuda",
                token_budget=BUDGET,
                store=store,
                receives_tensors=True,
                open_handle=lambda handle: handles[handle.key].open(store),
            )
            assert ask(runner, of.requests[:2], budget=BUDGET).answers == of.answers[:2]
            assert runner._images is not None
            uploads, received = runner._images._encoder._uploads, runner._images._encoder._received
            assert uploads is not None and uploads.stats.copies == 0 and received is not None
            assert tensors.stats.puts == len(handles) and tensors.stats.overflowed == tensors.stats.foreign == 0
        received.close()
        assert uploads.close()
        eventually(pool.close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sampling_parameters_mean_what_they_mean_on_the_cpu(
    dtype: torch.dtype, family: BuildFamily, on_double: NewDouble
) -> None:
    """Rows with biases, or with ids that are ruled out, are sampled after their steps, beside others."""
    of = family("llama", max_position_embeddings=160)
    requests, options = of.requests[:8], {"seed": 3, "params": VARIED, "slots": 4, "budget": BUDGET}
    expected = ask(device(of), requests, **options)
    runner = on_double(of, dtype=str(dtype).removeprefix("torch."))
    result = runner.ask(requests, **options)
    assert runner.runner._cuda is not None
    assert result.preemptions > 0 and runner.runner._cuda.sampler.num_outside > 10
    assert not runner.faults()
    if dtype == torch.float32:
        assert result.answers == expected.answers
        for values, reference in zip(result.logprobs, expected.logprobs, strict=True):
            assert values == pytest.approx(reference, abs=1e-3)


def test_bad_words_are_avoided_without_a_wait(family: BuildFamily, on_double: NewDouble) -> None:
    of, options = family("llama"), {"seed": 3, "params": BAD_WORDS, "budget": BUDGET}
    requests = [request._replace(tokens=6) for request in of.requests[1:4]]
    expected = ask(device(of), requests, **options)
    runner = on_double(of, has_graphs=False)
    assert runner.ask(requests, **options).answers == expected.answers
    assert [answer[:6] for answer in of.answers[1:4]] != expected.answers
    assert not runner.faults()


@pytest.mark.parametrize("name", chosen("llama", "gemma2", "qwen2_vl"))
@pytest.mark.parametrize("budget", [6, BUDGET])
def test_prompts_have_the_logprobs_that_they_have_on_the_cpu(
    name: str, budget: int, family: BuildFamily, on_double: NewDouble
) -> None:
    """Beside requests that graphs compute: a step with such a part of a prompt runs without one."""
    of = family(name)
    requests = [request._replace(tokens=2) for request in of.requests if not request.inputs][:4]
    params = [msgspec.structs.replace(GREEDY, prompt_logprobs=count) for count in (2, 0)] + [GREEDY]
    options: dict[str, Any] = {"params": params, "budget": budget}
    expected = ask(device(of), requests, **options)
    runner = on_double(of)
    result = runner.ask(requests, **options)
    assert result.answers == expected.answers
    places = [(at, position) for at, request in enumerate(requests) for position in range(1, len(request.prompt))]
    assert sorted(result.prompt_logprobs) == [place for place in places if place[0] % 3 != 2]
    for place, values in expected.prompt_logprobs.items():
        assert result.prompt_logprobs[place] == pytest.approx(values, abs=1e-3)
    assert not runner.faults()


def test_grammars_are_followed_as_on_the_cpu(family: BuildFamily, on_double: NewDouble) -> None:
    """Their rows are sampled after the step, beside rows that the graph samples."""
    pytest.importorskip("llguidance")
    from tests.support.grammars import END, VOCABULARY, answers, cases, write_byte_tokenizer

    of = family("llama", vocab_size=VOCABULARY)
    write_byte_tokenizer(of.path)
    requests = cases(8)
    options = {"slots": 8, "blocks": 64, "block_size": 16, "end_ids": (END,), "open_handle": Handle.open}
    expected = answers(device(of, **options), requests, budget=BUDGET)
    on_device = on_double(of, **options)
    with on_device.double:
        assert answers(on_device.runner, requests, budget=BUDGET) == expected


def test_bfloat16_is_answered_nearly_as_on_the_cpu(family: BuildFamily, on_double: NewDouble) -> None:
    """Most tokens agree: kernels round as the modules do, but add up in another order."""
    of = family("llama", dtype=torch.bfloat16)
    answers = on_double(of, dtype="bfloat16").ask(of.requests[1:4]).answers
    pairs = [pair for own, other in zip(answers, of.answers[1:4], strict=True) for pair in zip(own, other, strict=True)]
    assert sum(own == other for own, other in pairs) >= len(pairs) / 2


# ── what a step costs ────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", chosen("llama", "gemma2", "qwen2_vl"))
@pytest.mark.parametrize("params", [GREEDY, PENALIZED], ids=["greedy", "random, cut and penalized"])
def test_decode_step_without_news_is_one_launch_and_one_copy_back(
    name: str, params: SamplingParams, family: BuildFamily, on_double: NewDouble
) -> None:
    of = family(name)
    runner = on_double(of, blocks=64)
    runner.ask([request._replace(tokens=14) for request in of.requests[:3]], params=[params])
    counts = runner.watcher.decode_counts(is_quiet=True)
    assert counts
    for step in counts:
        assert step == {"launches": 1, "allocations": 0, "copies_up": 0, "copies_back": 1, "pinned": 1}


def test_decode_step_with_news_is_two_launches_and_one_copy_up(family: BuildFamily, on_double: NewDouble) -> None:
    runner = on_double(family("llama"), blocks=64)
    runner.ask([request._replace(tokens=6) for request in family("llama").requests[:3]], params=[PENALIZED])
    counts = runner.watcher.decode_counts(is_quiet=False)
    assert counts
    for step in counts:
        assert step["launches"] <= 2 and step["copies_up"] <= 1 and step["copies_back"] <= 1, step
    assert max(step["copies_up"] for step in counts) == 1


def test_steps_write_the_places_of_their_tokens_alone(
    family: BuildFamily, on_double: NewDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows are padded to four, and chunks to 16 tokens."""
    of = family("llama")
    runner = on_double(of, blocks=64)
    caches = [cache.numbers for layer in runner.runner._memory.layers.values() for cache in layer]
    launch = ModelRunner.launch

    def compared(own: ModelRunner, batch: BatchState, step: Step) -> PendingStep:
        before = [cache.clone() for cache in caches]
        pending = launch(own, batch, step)
        places = set(build_batch(batch).places.tolist())
        for cache, old in zip(caches, before, strict=True):
            changed = (cache != old).flatten(1).any(1).nonzero()[:, 0].tolist()
            assert set(changed) == places
        return pending

    monkeypatch.setattr(ModelRunner, "launch", compared)
    assert runner.ask(of.requests[1:4]).answers == of.answers[1:4]


def test_ring_that_is_written_too_early_is_found_in_the_engine(
    family: BuildFamily, on_double: NewDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: one pinned memory for the inputs of all steps."""
    empty, rings = torch.empty, dict[Any, torch.Tensor]()

    def reused(*shape: Any, **options: Any) -> torch.Tensor:
        memory = empty(*shape, **options)
        return rings.setdefault(memory.shape, memory) if options.get("pin_memory") else memory

    runner = on_double(family("llama"))
    monkeypatch.setattr(input_batch.torch, "empty", reused)
    runner.ask(family("llama").requests[:4])
    faults = runner.faults()
    assert {fault.what for fault in faults} == {"pinned memory was written before its copy was done"}
    assert {fault.line.partition(":")[0] for fault in faults} <= {"state.py", "step_graphs.py"}


# ── what is recorded ─────────────────────────────────────────────────────────────────────────────────────────────────
class Recorder(CudaGraphs):
    """`fails_at`: the number of the recording that fails, from 1 on."""

    def __init__(self, fails_at: int = 0, error: type[Exception] = torch.OutOfMemoryError) -> None:
        super().__init__()
        self._fails_at = fails_at
        self._error = error
        self.calls = 0

    def record(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        self.calls += 1
        if self.calls == self._fails_at:
            raise self._error("not that")
        return super().record(compute)


class OtherRankFails(TPGroup):
    """Ranks of which another cannot record, from the second recording on."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def least(self, number: int) -> int:
        return step_graphs.REFUSED if self._recorder.calls == 2 else number


def reasons(caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    return {
        record.message: record.fields["why"]
        for record in caplog.records
        if hasattr(record, "fields") and "why" in record.fields
    }


class Tapes(CudaGraphs):
    """Keeps what is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []
        self.replays: list[Callable[[], torch.Tensor]] = []

    def record(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def noted() -> torch.Tensor:
            result = compute()
            self.operations += CudaDouble.current.tape or ()
            return result

        self.replays.append(super().record(noted))
        return self.replays[-1]


class AlikeRanks(TPGroup):
    """The first of two ranks. Tensors of the second rank have the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2

    def least_of_each(self, numbers: list[int]) -> list[int]:
        return numbers

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return tensor


@pytest.fixture
def alike_ranks(monkeypatch: pytest.MonkeyPatch) -> AlikeRanks:
    def all_gather(out: torch.Tensor, own: torch.Tensor) -> None:
        out.view(2, *own.shape).copy_(own)

    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", all_gather)
    return AlikeRanks()


def test_logits_of_ranks_are_copied_once_behind_the_collective(
    family: BuildFamily, on_double: NewDouble, alike_ranks: AlikeRanks
) -> None:
    """From what the ranks have gathered to the memory that the sampler reads. The last columns are padding."""
    runner = on_double(family("llama", vocab_size=123), ranks=alike_ranks, has_graphs=False)
    model = runner.runner._model
    assert model.stock.get_output_embeddings().weight.shape[0] == 64
    with runner.double, torch.inference_mode():
        hidden = torch.randn(3, model.stock.config.hidden_size).pin_memory().to("cuda", non_blocking=True)
        out = torch.empty(3, 123, device="cuda")
        with runner.double.watched() as report:
            logits = model.logits(hidden, out)
        part = (hidden @ model.stock.get_output_embeddings().weight.t()).tolist()
        assert logits.data_ptr() == out.data_ptr()
        assert out.tolist() == [[*row, *row[:59]] for row in part]
    counts = report.counts()
    assert counts["launches"] == 3, "a product, the collective and a copy"
    assert counts["allocations"] == 2, "of the product and of the collective"


@pytest.mark.parametrize(("name", "is_alone"), [("llama", True), ("gemma2", True), ("llama", False)])
def test_graphs_write_the_memory_of_one_result_without_a_copy(
    name: str, is_alone: bool, family: BuildFamily, on_double: NewDouble, alike_ranks: AlikeRanks
) -> None:
    """Logits of its own would be kept for each graph. Gemma 2 has a softcap behind its head."""
    with CudaDouble():
        recorder = Tapes()
    of = family(name)
    runner = on_double(of, recorder=recorder, slots=5, ranks=None if is_alone else alike_ranks)
    with runner.double:
        results = [replay() for replay in recorder.replays]
    assert [len(graphs) for graphs in runner.graphs] == [4, 1] and len(results) == 5
    assert {result.data_ptr() for result in results} == {results[0].data_ptr()}
    copied = [each.args[0] for each in recorder.operations if "copy_" in str(each.func)]
    assert recorder.operations and results[0].data_ptr() not in [tensor.data_ptr() for tensor in copied]
    if is_alone:
        assert runner.ask(of.requests[:4]).answers == of.answers[:4]


def test_all_sizes_are_recorded_before_the_first_request(family: BuildFamily, on_double: NewDouble) -> None:
    with CudaDouble():
        recorder = Recorder()
    of = family("llama")
    runner = on_double(of, recorder=recorder, slots=9, token_budget=40)
    assert [graphs.sizes for graphs in runner.graphs] == [[1, 2, 4, 8, 9], [16, 32, 40]]
    assert recorder.calls == 8 == sum(len(graphs) for graphs in runner.graphs)
    assert runner.ask(of.requests[:2]).answers == of.answers[:2]
    assert recorder.calls == 8


@pytest.mark.parametrize(
    ("fails_at", "error", "reason", "sizes"),
    [
        (1, RuntimeError, "mixed steps are not recorded", [[1, 2, 4], []]),
        (3, RuntimeError, "decode steps are not recorded", [[], [16]]),
        (1, torch.OutOfMemoryError, "mixed steps lack memory for graphs", [[1, 2, 4], []]),
        (2, torch.OutOfMemoryError, "decode steps lack memory for graphs", [[1, 2], [16]]),
        (3, torch.OutOfMemoryError, "decode steps lack memory for graphs", [[1, 4], [16]]),
    ],
)
def test_recording_that_fails_costs_its_kind_or_without_memory_its_size(
    fails_at: int,
    error: type[Exception],
    reason: str,
    sizes: list[list[int]],
    family: BuildFamily,
    on_double: NewDouble,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Recording 1 is of steps with chunks, 3 the second of decode steps. Other steps use a larger graph, or none."""
    with CudaDouble():
        recorder = Recorder(fails_at, error)
    of = family("llama")
    with caplog.at_level(logging.INFO, "penstock.engine"):
        runner = on_double(of, recorder=recorder)
    assert reasons(caplog) == {reason: f"{error.__name__}: not that"}
    assert [graphs.sizes if len(graphs) else [] for graphs in runner.graphs] == sizes
    assert runner.ask(of.requests[1:4]).answers == of.answers[1:4]
    assert not runner.faults()


def test_cuda_graph_that_a_rank_cannot_record_is_replayed_by_no_rank(
    family: BuildFamily, on_double: NewDouble, caplog: pytest.LogCaptureFixture
) -> None:
    with CudaDouble():
        recorder = Recorder()
    of = family("llama")
    with caplog.at_level(logging.INFO, "penstock.engine"):
        runner = on_double(of, recorder=recorder, ranks=OtherRankFails(recorder))
    assert reasons(caplog) == {"decode steps are not recorded": "another rank cannot"}
    assert [len(graphs) for graphs in runner.graphs] == [0, 1]
    assert runner.ask(of.requests[1:3]).answers == of.answers[1:3]


def test_model_that_waits_for_the_device_is_answered_without_graphs(
    family: BuildFamily,
    on_double: NewDouble,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A mixture that runs the experts of a token in turn."""
    of, load = family("qwen3_moe"), model_runner.model_loader.load

    def load_with_eager_experts(*arguments: Any, **options: Any) -> Any:
        model = load(*arguments, **options)
        model.stock.set_experts_implementation("eager")
        return model

    monkeypatch.setattr(model_runner.model_loader, "load", load_with_eager_experts)
    with caplog.at_level(logging.INFO, "penstock.engine"):
        runner = on_double(of)
    assert [len(graphs) for graphs in runner.graphs] == [0, 0]
    assert "called a synchronizing CUDA operation: nonzero" in reasons(caplog)["decode steps are not recorded"]
    assert runner.ask(of.requests[1:3]).answers == of.answers[1:3]


def test_step_larger_than_the_largest_graph_is_computed_without(
    family: BuildFamily, on_double: NewDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_graphs, "MAX_TOKENS", 8)
    of = family("gemma2")
    runner = on_double(of)
    assert runner.graphs[1].sizes == [8]
    assert runner.ask(of.requests[2:5]).answers == of.answers[2:5]
