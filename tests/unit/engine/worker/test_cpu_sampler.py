"""The native choice of tokens beside a reference in float64, with rows of many blocks."""

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from penstock.engine.worker.cpu_kernels import SamplingRows  # noqa: E402  (it needs torch)
from penstock.engine.worker.grammars import TokenMasks  # noqa: E402

SIZES = [1, 3, 33, 1000, 1024, 1025, 5003, 40_000]


def kept_weights(logits: Any, temperature: float, top_k: int, top_p: float, min_p: float) -> Any:
    """Weights of float64, 0 for tokens that the limits leave out."""
    weights = np.exp((logits - logits.max()) / temperature)
    best = np.sort(weights)[::-1][:top_k]
    sums = np.cumsum(best)
    last = np.flatnonzero(sums - best < top_p * sums[-1])[-1] if top_p < 1 else len(best) - 1
    return np.where((weights >= best[last]) & (weights >= min_p), weights, 0)


def rows_of(count: int, temperature: float = 1.0, top_k: int = 1 << 40, top_p: float = 1.0, min_p: float = 0.0) -> Any:
    columns = (temperature, np.float32), (top_k, np.int64), (top_p, np.float32), (min_p, np.float32)
    return SamplingRows(*(np.full(count, value, dtype) for value, dtype in columns))


def packed(is_allowed: Any) -> Any:
    rows, size = is_allowed.shape
    padded = np.zeros((rows, -(-size // 32) * 32), np.bool_)
    padded[:, :size] = is_allowed
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def require_near(weights: Any, draw: float, token: int, slack: float) -> None:
    """The token is the one at `draw` of the sum of the weights, or a neighbour with an end that near to it."""
    sums = np.concatenate([[0], np.cumsum(weights)]) / weights.sum()
    assert weights[token] > 0
    assert sums[token] - slack <= draw <= sums[token + 1] + slack


@pytest.mark.parametrize("is_masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"temperature": 0.05},
        {"temperature": 30.0},
        {"top_k": 1},
        {"top_k": 20},
        {"top_k": 999},
        {"top_p": 0.001},
        {"top_p": 0.9},
        {"top_p": 0.9999},
        {"top_k": 50, "top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 3000, "top_p": 0.95, "min_p": 0.01, "temperature": 0.7},
    ],
    ids=str,
)
def test_token_is_the_one_at_the_draw(limits: dict[str, Any], size: int, is_masked: bool) -> None:
    chance = np.random.default_rng(size)
    count = 24
    logits = chance.normal(0, 2, (count, size)).astype(np.float32)
    logits[1] = np.round(logits[1])  # many are equal
    logits[2] = 5.0
    draws = chance.random(count, np.float32)
    draws[:3] = 0.0
    draws[3:6] = 1 - 2.0**-23
    is_allowed = np.ones((count, size), np.bool_)
    masks = None
    if is_masked:
        is_allowed = chance.random((count, size)) < chance.random((count, 1))
        is_allowed[:, size // 2] = True
        masks = TokenMasks(np.arange(count), packed(is_allowed), {})
    ids, is_failed, is_stuck = rows_of(count, **limits).choose(torch.from_numpy(logits.copy()), masks, draws)
    assert not is_failed.any() and not is_stuck.any()
    for row in range(count):
        whole = np.where(is_allowed[row], logits[row].astype(np.float64), -np.inf)
        weights = kept_weights(whole, **{"temperature": 1.0, "top_k": size, "top_p": 1.0, "min_p": 0.0, **limits})
        require_near(weights, float(draws[row]), int(ids[row]), 1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_first_of_the_greatest_logits_is_the_likeliest(size: int) -> None:
    logits = np.random.default_rng(size).integers(-4, 4, (64, size)).astype(np.float32)
    is_allowed = logits < 2
    is_allowed[:, -1] = True
    masked = np.where(is_allowed, logits, -np.inf)
    for masks, expected in (None, logits), (TokenMasks(np.arange(64), packed(is_allowed), {}), masked):
        ids, *_ = rows_of(64, 0.0).choose(torch.from_numpy(logits.copy()), masks, np.zeros(64, np.float32))
        assert ids.tolist() == expected.argmax(1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("size", SIZES[1:])
def test_rows_without_a_number_or_without_an_allowed_token_fail(size: int, temperature: float) -> None:
    logits = np.zeros((5, size), np.float32)
    logits[0, -1] = math.nan
    logits[1, 1] = math.inf
    logits[2] = -math.inf
    is_allowed = np.ones((4, size), np.bool_)
    is_allowed[0, -1] = False  # NaN fails a row wherever it is
    is_allowed[3] = False
    masks = TokenMasks(np.arange(4), packed(is_allowed), {})
    ids, is_failed, is_stuck = rows_of(5, temperature).choose(torch.from_numpy(logits), masks, np.zeros(5, np.float32))
    assert is_failed.tolist() == [True, True, True, True, False]
    assert is_stuck.tolist() == [False, False, False, True, False]
    assert ids[:4].tolist() == [0] * 4


def test_columns_that_do_not_fit_are_refused() -> None:
    logits, draws = torch.zeros(2, 40), np.zeros(2, np.float32)
    for masks in (
        TokenMasks(np.array([0, 1]), np.zeros((1, 2), np.int32), {}),
        TokenMasks(np.array([0]), np.zeros((1, 1), np.int32), {}),
        TokenMasks(np.array([2]), np.zeros((1, 2), np.int32), {}),
        TokenMasks(np.array([-1]), np.zeros((1, 2), np.int32), {}),
    ):
        with pytest.raises(ValueError):
            rows_of(2).choose(logits, masks, draws)
    with pytest.raises(ValueError):
        rows_of(3).choose(logits, None, draws)
    with pytest.raises(ValueError):
        rows_of(2, top_k=0).choose(logits, None, draws)
    with pytest.raises(ValueError):
        rows_of(2).choose(logits[:1], None, draws)
