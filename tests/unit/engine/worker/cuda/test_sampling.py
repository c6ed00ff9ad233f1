"""Sampling by kernels, run by Triton's interpreter, against operations of torch on the CPU."""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.protocol.columns import NOTHING
from penstock.engine.protocol.messages import SamplingParams
from penstock.engine.worker.sampler import SampledTokens, Sampler, is_penalized, seed_of
from penstock.engine.worker.tensor_parallel import TPGroup
from tests.support.interpreter import require_interpreter

require_interpreter()

import triton.language as tl  # noqa: E402
from triton.runtime.errors import InterpreterError  # noqa: E402

from penstock.engine.worker.cuda import launcher, sampling, step_sampler  # noqa: E402
from penstock.engine.worker.cuda.sampling import GROUP, MAX_KEPT  # noqa: E402
from penstock.engine.worker.cuda.state import DeviceState, JoinedSample  # noqa: E402
from penstock.engine.worker.cuda.step_sampler import StepSampler, TokenChooser  # noqa: E402

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
    SamplingParams(temperature=0, frequency_penalty=0.7),
    SamplingParams(presence_penalty=0.5, frequency_penalty=-0.3, repetition_penalty=1.3),
    SamplingParams(repetition_penalty=0.7, top_k=20, top_p=0.9),
    SamplingParams(presence_penalty=2.0, min_p=0.02),
)
PROMPT = np.array([1, 5, 7, 5], np.int32)


class Kernels:
    """Samples by kernels. Slots are in another order than rows."""

    def __init__(self, vocabulary: int, params: tuple[SamplingParams, ...], generated: np.ndarray) -> None:
        size = len(params)
        self.state = DeviceState(size, 1, 16, CPU, vocabulary, samples=True)
        self._chooser = TokenChooser(self.state)
        self._slots = np.arange(size)[::-1].copy()
        for row, slot in enumerate(self._slots.tolist()):
            own = params[row]
            sample = JoinedSample(PROMPT, PROMPT, NOTHING, own, is_penalized(own), seed_of(row, 0), NOTHING)
            self.state.join(slot, sample)
        self._computed = np.zeros(size, np.int32)
        self._computed[self._slots] = PROMPT.size + generated
        nothing = np.zeros((size, 1), np.int32)
        batch: Any = SimpleNamespace(block_counts=nothing[:, 0], table=nothing, computed=self._computed)
        self.state.update(batch, self._slots, is_decoding=False)

    def sample(self, logits: torch.Tensor) -> SampledTokens:
        out = torch.full((len(self._slots), 2), -1, dtype=torch.int32)
        self._chooser.choose(logits, torch.from_numpy(self._slots.astype(np.int32)), out)
        self.state.computed += 1
        return SampledTokens(out[:, 0], out[:, 1] == 1, None)


class Pair:
    """A sampler, and the kernels."""

    def __init__(self, vocabulary: int, params: tuple[SamplingParams, ...], generated: np.ndarray | int = 0) -> None:
        self._slots = np.arange(len(params))
        self._plain = Sampler(len(params), vocabulary, (2,))
        for slot, row in enumerate(params):
            self._plain.join(slot, row, PROMPT, seed=slot)
        self._plain._generated[:] = generated
        self.kernels = Kernels(vocabulary, params, np.zeros(len(params), np.int32) + generated)

    def assert_equal(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the ids."""
        expected, result = self._plain.sample(logits.clone(), self._slots), self.kernels.sample(logits.clone())
        assert result.ids.dtype == torch.int32 and torch.equal(result.ids, expected.ids)
        assert result.failed(self._slots) == expected.failed(self._slots)
        return result.ids


def normal(rows: int, vocabulary: int, deviation: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, deviation, (rows, vocabulary)).astype(np.float32))


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [*itertools.product((24, GROUP.value, 1001), TYPES), (151_936, torch.bfloat16)]
)
def test_mixed_rows_get_the_ids_of_the_cpu(vocabulary: int, dtype: torch.dtype) -> None:
    Pair(vocabulary, MIXED).assert_equal(normal(len(MIXED), vocabulary).to(dtype))


@pytest.mark.parametrize("params", MIXED, ids=str)
def test_a_row_alone_gets_the_ids_of_the_cpu(params: SamplingParams) -> None:
    """For six steps of few ids: penalties count what the steps before have sampled."""
    pair = Pair(40, (params,))
    for step in range(6):
        pair.assert_equal(normal(1, 40, 1.0, seed=step))


def test_many_rows_get_the_ids_of_the_cpu() -> None:
    params = tuple(SamplingParams(temperature=0.1 * row, top_k=(row * 7) % 50) for row in range(40))
    Pair(9000, params).assert_equal(normal(40, 9000))


@pytest.mark.parametrize("dtype", TYPES)
def test_flat_row_has_more_candidates_than_a_program_holds(dtype: torch.dtype) -> None:
    """The search narrows its bounds by passes over the row."""
    params = (
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=MAX_KEPT.value + 1000),
        SamplingParams(top_k=MAX_KEPT.value + 9000, top_p=0.95, temperature=2),
    )
    Pair(4 * MAX_KEPT.value + 5, params).assert_equal(normal(3, 4 * MAX_KEPT.value + 5, 0.3, seed=1).to(dtype))


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
            frequency_penalty=chance.choice([0.0, 0.0, 0.4]),
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
    Pair(2000, params).assert_equal(logits.to(TYPES[seed % 3]))


def test_kernels_are_launched_for_all_batches_before_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[str, str]] = []

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        launched.append((kernel.__name__, str(sorted(options.items()))))

    monkeypatch.setattr(launcher, "launch", launch)
    state = DeviceState(64, 1, 16, CPU, 100, samples=True)
    StepSampler(state, TPGroup(), Sampler(64, 100)).compile(torch.bfloat16)
    before, launched[:] = set(launched) - {("store_ids", "[('SIZE', 256)]")}, []
    for rows in (1, 8, 9, 64):
        logits, slots = torch.zeros(rows, 100, dtype=torch.bfloat16), torch.zeros(rows, dtype=torch.int32)
        TokenChooser(state).choose(logits, slots, torch.zeros(rows, 2, dtype=torch.int32))
    assert set(launched) == before


@pytest.mark.parametrize("vocabulary", [300, 2 * MAX_KEPT.value])
def test_ids_as_likely_as_the_last_are_kept(vocabulary: int) -> None:
    params = (
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.5),
        SamplingParams(top_k=10, top_p=0.3),
        SamplingParams(temperature=0),
    )
    levels = torch.from_numpy(np.random.default_rng(5).integers(-2, 3, (4, vocabulary)).astype(np.float32))
    levels[levels == 0] = torch.where(torch.arange(int((levels == 0).sum())) % 2 == 0, 0.0, -0.0)
    pair = Pair(vocabulary, params)
    for logits in (levels, torch.zeros_like(levels), levels.clamp(max=0)):
        ids = pair.assert_equal(logits)
        assert ids[3] == logits[3].argmax()


def test_rows_without_finite_maximum_fail_alone() -> None:
    params = tuple(row for row in (MIXED[0], MIXED[1], MIXED[7]) for _ in range(5))
    logits = normal(len(params), 400)
    for first in (0, 5, 10):
        logits[first, 399] = torch.nan
        logits[first + 1, 3] = torch.inf
        logits[first + 2] = -torch.inf
        logits[first + 3, 5:] = -torch.inf
    ids = Pair(400, params).assert_equal(logits)
    assert not ids[[0, 1, 2, 5, 6, 7, 10, 11, 12]].any() and (ids[[3, 8, 13]] < 5).all()


@pytest.mark.parametrize("draw", [0.0, 0.5, 1 - 2.0**-23])
def test_ids_that_are_ruled_out_are_never_drawn(draw: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of most groups, all ids are ruled out; the largest draws end at the last id that is not."""
    monkeypatch.setattr(sampling, "_uniform", lambda *_: draw)
    logits = torch.full((4, 1000), -torch.inf)
    logits[:, [130, 140, 900]] = torch.tensor([1.0, 2.0, 1.5])
    params = SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=5), SamplingParams(top_k=2)
    ids = Kernels(1000, params, np.zeros(4, np.int32)).sample(logits).ids
    assert set(ids.tolist()) <= {130, 140, 900}


def test_draws_from_seeds_and_counts_are_the_samplers() -> None:
    """Few ids with like weights: 200 draws agree."""
    Pair(24, (SamplingParams(),) * 200, np.arange(200) * 37).assert_equal(normal(200, 24, 0.1))


def check_slots() -> None:
    """Samples for several steps, and padding."""
    for dtype in (torch.bfloat16, torch.float32):
        pair = Pair(60, MIXED * 3)
        for step in range(4):
            pair.assert_equal(normal(len(MIXED) * 3, 60, 1.0, seed=step).to(dtype))
    pair = Pair(60, (SamplingParams(top_k=1, frequency_penalty=-1e-3),) * 4)
    for _ in range(4):  # penalties have results that a bfloat16 cannot tell apart
        pair.assert_equal(torch.ones(4, 60, dtype=torch.bfloat16))
    state = DeviceState(3, 1, 16, CPU, 50, samples=True)
    state.params[:] = 1  # of slot -1: the last one
    out = torch.full((3, 2), 7, dtype=torch.int32)
    TokenChooser(state).choose(normal(3, 50), torch.full((3,), -1, dtype=torch.int32), out)
    assert (out == 7).all() and not state.counts.any()


def test_rows_are_sampled_by_the_parameters_of_their_slots() -> None:
    check_slots()


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("counts == 0, x,", "counts == 5, x,"),
        ("x > 0, tl.div_rn(x, repetition), x * repetition", "x < 0, tl.div_rn(x, repetition), x * repetition"),
        ("tl.where(counts > 0, _param(params, PRESENCE), 0.0)", "_param(params, PRESENCE)"),
        ("counts & (IN_PROMPT - 1)", "counts"),
        ("tl.load(at) + 1", "tl.load(at)"),
        ("tl.where(row[3], 0, SHIFT)", "SHIFT"),
        ("(count + 1)", "count"),
        (" << 32)", " << 31)"),
        ("if slot < 0:", "if slot < -1:"),
        ("params += slot * PARAMS_SIZE", "params += place * PARAMS_SIZE"),
    ],
    ids=str,
)
def test_planted_fault_of_sampling_is_found(
    text: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(sampling.__file__).read_text()
    assert text in source, text
    path = tmp_path / "mutant_of_sampling.py"
    path.write_text(source.replace(text, other))
    spec = importlib.util.spec_from_file_location("mutant_of_sampling", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutant_of_sampling", module)
    spec.loader.exec_module(module)
    for name in ("scan", "finish"):
        monkeypatch.setattr(step_sampler, name, getattr(module, name))
    with pytest.raises((AssertionError, InterpreterError)) as caught:
        check_slots()
    assert caught.type is AssertionError or "are in no tensor" in str(caught.value)
