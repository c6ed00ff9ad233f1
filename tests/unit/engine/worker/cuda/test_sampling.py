"""Sampling by kernels, run by Triton's interpreter, against operations of torch on the CPU."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.protocol.messages import SamplingParams
from penstock.engine.worker import sampler as sampler_module
from penstock.engine.worker.sampler import SampledTokens, Sampler, _seed, _uniforms
from tests.support.interpreter import device_arithmetic, require_interpreter

require_interpreter()

import triton.language as tl  # noqa: E402

from penstock.engine.worker.cuda import launcher, sampling  # noqa: E402
from penstock.engine.worker.cuda.sampling import GROUP, MAX_KEPT  # noqa: E402
from penstock.engine.worker.cuda.token_chooser import RowParams, TokenChooser  # noqa: E402

CPU = torch.device("cpu")
TYPES = (torch.float32, torch.bfloat16, torch.float16)
MIXED = (
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(top_k=1),
    SamplingParams(top_k=20),
    SamplingParams(top_p=0.9),
    SamplingParams(min_p=0.05),
    SamplingParams(top_k=9, top_p=0.8),
    SamplingParams(temperature=3.0, top_k=300, top_p=0.95, min_p=0.01),
    SamplingParams(temperature=2.0, top_p=0.99),
    SamplingParams(top_p=1e-6),
)


@pytest.fixture(autouse=True)
def rounded() -> Iterator[None]:
    with device_arithmetic():
        yield


class Pair:
    """A sampler that launches kernels, and one that does not."""

    def __init__(self, vocabulary: int, params: tuple[SamplingParams, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        self._slots = np.arange(len(params))
        self._plain = Sampler(len(params), vocabulary, (2,))
        monkeypatch.setattr(sampler_module, "build_chooser", TokenChooser)
        self._by_kernels = Sampler(len(params), vocabulary, (2,))
        prompt = np.array([1, 5, 7], np.int32)
        for slot, row in enumerate(params):
            for sampler in (self._plain, self._by_kernels):
                sampler.join(slot, row, prompt, seed=slot)

    def sample(self, logits: torch.Tensor) -> tuple[SampledTokens, SampledTokens]:
        return self._plain.sample(logits.clone(), self._slots), self._by_kernels.sample(logits.clone(), self._slots)

    def assert_equal(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the ids."""
        expected, result = self.sample(logits)
        assert result.ids.dtype == torch.int32 and torch.equal(result.ids, expected.ids)
        slots, failed = result.failed(self._slots), expected.failed(self._slots)
        assert (slots is None and failed is None) or np.array_equal(slots, failed)
        return result.ids


def normal(rows: int, vocabulary: int, deviation: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, deviation, (rows, vocabulary)).astype(np.float32))


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [*itertools.product((24, GROUP.value, 1001), TYPES), (151_936, torch.bfloat16)]
)
def test_mixed_rows_get_the_ids_of_the_cpu(
    vocabulary: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    Pair(vocabulary, MIXED, monkeypatch).assert_equal(normal(len(MIXED), vocabulary).to(dtype))


@pytest.mark.parametrize("params", MIXED, ids=str)
def test_a_row_alone_gets_the_ids_of_the_cpu(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches what rows of one kind need, for three steps."""
    pair = Pair(700, (params,), monkeypatch)
    for step in range(3):
        pair.assert_equal(normal(1, 700, seed=step))


def test_many_rows_get_the_ids_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    params = tuple(SamplingParams(temperature=0.1 * row, top_k=(row * 7) % 50) for row in range(40))
    Pair(9000, params, monkeypatch).assert_equal(normal(40, 9000))


@pytest.mark.parametrize("dtype", TYPES)
def test_flat_row_has_more_candidates_than_a_program_holds(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search narrows its bounds by passes over the row."""
    params = (
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=MAX_KEPT.value + 1000),
        SamplingParams(top_k=MAX_KEPT.value + 9000, top_p=0.95, temperature=2),
    )
    Pair(4 * MAX_KEPT.value + 5, params, monkeypatch).assert_equal(
        normal(3, 4 * MAX_KEPT.value + 5, 0.3, seed=1).to(dtype)
    )


@pytest.mark.parametrize("seed", range(4))
def test_odd_rows_get_the_ids_of_the_cpu(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs hold 32 candidates: most searches need passes over the row."""
    monkeypatch.setattr(sampling, "MAX_KEPT", tl.constexpr(32))
    chance = random.Random(seed)
    params = tuple(
        SamplingParams(
            temperature=chance.choice([0.0, 1e-4, 0.1, 1.0, 5.0, 100.0]),
            top_k=chance.choice([0, 1, 20, 64, 1000, 1999]),
            top_p=chance.choice([1.0, 0.999999, 0.95, 0.5, 1e-6]),
            min_p=chance.choice([0.0, 0.1, 1.0]),
        )
        for _ in range(8)
    )
    logits = normal(8, 2000, seed=seed)
    logits[1] *= 1e30
    logits[2] = (logits[2] * 2).round() / 2
    logits[3, :3] += 20.0
    logits[4, 100:1900] = -torch.inf
    logits[5] *= normal(1, 2000, seed=seed)[0].exp()
    logits[6] *= 0.01
    Pair(2000, params, monkeypatch).assert_equal(logits.to(TYPES[seed % 3]))


def test_kernels_are_launched_for_all_batches_before_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[str, str]] = []

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        launched.append((kernel.__name__, str(sorted(options.items()))))

    monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.setattr(sampler_module, "build_chooser", TokenChooser)
    Sampler(64, 100).compile(torch.bfloat16)
    before, launched[:] = set(launched), []
    chooser = TokenChooser(64, 100, CPU)
    for rows, dtype, kind in itertools.product((1, 8, 9, 64), TYPES[:2], ((False, False), (True, False), (True, True))):
        values = torch.zeros(4, rows)
        chooser.choose(torch.zeros(rows, 100, dtype=dtype), RowParams(values, *kind), values[0])
    assert set(launched) == before


@pytest.mark.parametrize("vocabulary", [300, 2 * MAX_KEPT.value])
def test_ids_as_likely_as_the_last_are_kept(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    params = (
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.5),
        SamplingParams(top_k=10, top_p=0.3),
        SamplingParams(temperature=0),
    )
    levels = torch.from_numpy(np.random.default_rng(5).integers(-2, 3, (4, vocabulary)).astype(np.float32))
    levels[levels == 0] = torch.where(torch.arange(int((levels == 0).sum())) % 2 == 0, 0.0, -0.0)
    pair = Pair(vocabulary, params, monkeypatch)
    for logits in (levels, torch.zeros_like(levels), levels.clamp(max=0)):
        ids = pair.assert_equal(logits)
        assert ids[3] == logits[3].argmax()


def test_rows_without_finite_maximum_fail_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    params = tuple(row for row in (MIXED[0], MIXED[1], MIXED[7]) for _ in range(5))
    logits = normal(len(params), 400)
    for first in (0, 5, 10):
        logits[first, 399] = torch.nan
        logits[first + 1, 3] = torch.inf
        logits[first + 2] = -torch.inf
        logits[first + 3, 5:] = -torch.inf
    ids = Pair(400, params, monkeypatch).assert_equal(logits)
    assert not ids[[0, 1, 2, 5, 6, 7, 10, 11, 12]].any() and (ids[[3, 8, 13]] < 5).all()


def test_ids_that_are_ruled_out_are_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of most groups, all ids are ruled out; the largest draws end at the last id that is not."""
    logits = torch.full((4, 1000), -torch.inf)
    logits[:, [130, 140, 900]] = torch.tensor([1.0, 2.0, 1.5])
    chooser = TokenChooser(4, 1000, CPU)
    values = torch.tensor([[1.0] * 4, [1000.0, 1000, 5, 2], [1.0, 0.9, 1, 1], [0.0] * 4])
    for draw in (0.0, 0.5, 1 - 2.0**-23):
        ids, _ = chooser.choose(logits, RowParams(values, True, True), torch.full((4,), draw))
        assert set(ids.tolist()) <= {130, 140, 900}


def test_adjusted_logits_are_sampled_as_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    params: tuple[SamplingParams, ...] = (
        SamplingParams(presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.3),
        SamplingParams(temperature=0, logit_bias=((3, 9.0), (4, -100.0))),
        SamplingParams(allowed_token_ids=(1, 5, 9), top_k=2),
        SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(7, 8), logprobs=3),
        SamplingParams(logprobs=0),
    )
    pair = Pair(200, params, monkeypatch)
    for step in range(3):
        logits = normal(len(params), 200, seed=step)
        logits[3, 7] = 50.0
        expected, result = pair.sample(logits)
        assert torch.equal(result.ids, expected.ids)
        result_logprobs, expected_logprobs = result.logprobs(), expected.logprobs()
        assert result_logprobs is not None and expected_logprobs is not None
        assert np.array_equal(result_logprobs.ids, expected_logprobs.ids) and np.array_equal(
            result_logprobs.ranks, expected_logprobs.ranks
        )
    logits[0, 3] = torch.nan
    assert pair.assert_equal(logits)[0] == 0


def test_draws_from_seeds_and_counts_are_the_samplers() -> None:
    """With two ids, the draw decides where their weights meet: 200 draws agree."""
    seeds = np.array([_seed(seed, sample) for seed in range(50) for sample in range(4)], np.uint64)
    counts = np.arange(200) * 37
    logits = normal(200, 24)
    chooser = TokenChooser(200, 24, CPU)
    params = RowParams(torch.tensor([[1.0], [24.0], [1.0], [0.0]]).expand(4, 200).contiguous(), True, False)
    ids, _ = chooser.choose(logits, params, torch.from_numpy(_uniforms(seeds, counts)))
    by_seeds, _ = chooser.choose(logits, params, torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(counts))
    assert torch.equal(ids, by_seeds)


def test_result_is_written_where_the_caller_says() -> None:
    out = torch.full((2,), -1, dtype=torch.int32), torch.ones(2, dtype=torch.bool)
    params = RowParams(torch.tensor([[0.0, 0], [9, 9], [1, 1], [0, 0]]), False, False)
    result: Any = TokenChooser(2, 9, CPU).choose(normal(2, 9), params, out=out)
    assert result is out or all(a is b for a, b in zip(result, out, strict=True))
    assert out[0].tolist() == normal(2, 9).argmax(-1).tolist() and not out[1].any()
