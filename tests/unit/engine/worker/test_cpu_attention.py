"""Rows that attend where their keys and values lie: the same as attention that gathers them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'penstock[engine]'")
pytest.importorskip("penstock.engine.worker.stock", reason="needs transformers: pip install 'penstock[engine]'")

from penstock.engine import _native  # noqa: E402
from penstock.engine.worker import paged_attention  # noqa: E402
from penstock.engine.worker.cpu_kernels import set_threads  # noqa: E402
from penstock.engine.worker.input_batch import PrefillChunk  # noqa: E402
from penstock.engine.worker.paged_attention import (  # noqa: E402
    AttentionStyle,
    CpuRows,
    KVCache,
    KVCacheShape,
    attention,
)

BLOCK_SIZE, BLOCKS = 4, 40


class Given:
    """Rows with keys and values in blocks of their own, anywhere."""

    def __init__(self, seed: int, dtype: Any, heads: int = 6, groups: int = 2, size: int = 16) -> None:
        torch.manual_seed(seed)
        chance = np.random.default_rng(seed)
        self.memory = KVCache({0: KVCacheShape(groups, size, size)}, BLOCKS, BLOCK_SIZE, dtype, torch.device("cpu"))
        for tensor in self.memory.layers[0]:
            tensor.copy_(torch.randn(tensor.shape))
        table = chance.permutation(BLOCKS).reshape(4, 10).astype(np.int32)
        lengths = chance.integers(1, 10 * BLOCK_SIZE + 1, 4)
        self.rows = CpuRows(table, np.maximum(lengths - chance.integers(1, 60), 0), lengths)
        self.query = (
            torch.randn(heads, 5, size).to(dtype).transpose(0, 1)
        )  # one more than there are rows, and not whole
        self.sinks = torch.randn(heads)

    def ours(self, how: AttentionStyle) -> Any:
        attended = torch.full((5, *self.query.shape[1:]), 7.0, dtype=self.query.dtype)
        assert self.memory.on_cpu is not None
        self.memory.on_cpu.attend(0, self.query, attended, self.rows, how)
        assert bool((attended[4] == 7).all()), "whose row is not among them is left alone"
        return attended[:4].flatten(1)

    def stock(self, how: AttentionStyle) -> Any:
        positions = np.arange(10 * BLOCK_SIZE)
        places = torch.from_numpy(
            self.rows.table[:, positions // BLOCK_SIZE].astype(np.intp) * BLOCK_SIZE + positions % BLOCK_SIZE
        )
        is_seen = (positions >= self.rows.firsts[:, None]) & (positions < self.rows.lengths[:, None])
        keys, values = self.memory.layers[0]
        mask = torch.from_numpy(is_seen)[:, None]
        return attention(self.query[:4, None], keys[places], values[places], mask, how)[:, 0].flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "manner",
    [{}, {"softcap": 3.0}, {"sinks": True}, {"softcap": 2.0, "sinks": True}],
    ids=lambda options: "+".join(options) or "plain",
)
@pytest.mark.parametrize("seed", range(4))
def test_cpu_attention_of_rows_equals_attention_over_gathered_keys(
    dtype: Any, manner: dict[str, Any], seed: int
) -> None:
    case = Given(seed, dtype)
    how = AttentionStyle(0.25, softcap=manner.get("softcap"), sinks=case.sinks if "sinks" in manner else None)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(case.ours(how), case.stock(how), **near)


@pytest.mark.parametrize("window", [None, 3, 17])
@pytest.mark.parametrize("how", [{}, {"softcap": 2.0, "sinks": True}], ids=["plain", "softcap+sinks"])
@pytest.mark.parametrize(("tokens", "length"), [(1, 40), (9, 9), (33, 38)])
def test_cpu_attention_of_a_chunk_equals_attention_over_gathered_keys(
    window: int | None, how: dict[str, Any], tokens: int, length: int
) -> None:
    case = Given(length, torch.bfloat16)
    sinks = case.sinks if "sinks" in how else None
    style = AttentionStyle(0.25, window=window, softcap=how.get("softcap"), sinks=sinks)
    chunk = PrefillChunk(0, tokens, length, case.rows.table[0])
    query = torch.randn(6, tokens, 16).to(torch.bfloat16).transpose(0, 1)
    attended = torch.empty(tokens, 6, 16, dtype=torch.bfloat16)
    assert case.memory.on_cpu is not None
    case.memory.on_cpu.attend_chunk(0, query, attended, chunk, style)
    places, mask = paged_attention.reach_of_chunk(chunk, BLOCK_SIZE, window)
    keys, values = (tensor[places][None].float() for tensor in case.memory.layers[0])
    expected = attention(query[None].float(), keys, values, torch.from_numpy(mask)[None], style)[0]
    torch.testing.assert_close(attended.float(), expected, rtol=2e-2, atol=2e-2)


def test_cpu_attention_over_nan_is_nan() -> None:
    case = Given(0, torch.float32)
    case.memory.layers[0][0].fill_(float("nan"))
    assert bool(case.ours(AttentionStyle(0.25)).isnan().all())


def test_rows_attend_the_same_in_any_number_of_threads() -> None:
    before = torch.get_num_threads()
    case, how = Given(1, torch.float32, heads=24, size=128), AttentionStyle(0.25)
    try:
        set_threads(1)
        alone = case.ours(how)
        set_threads(3)
        torch.testing.assert_close(case.ours(how), alone, rtol=0, atol=0)
    finally:
        set_threads(1, before)


def kernel_arguments(**other: Any) -> dict[str, Any]:
    keys = np.zeros((BLOCKS * BLOCK_SIZE, 2, 8), np.float32)
    whole = {
        "queries": np.zeros((1, 4, 8), np.float32),
        "keys": keys,
        "values": keys,
        "out": np.zeros((1, 4, 8), np.float32),
        "block_tables": np.zeros((1, 3), np.int32),
        "first_positions": np.array([0]),
        "seq_lens": np.array([12]),
        "block_size": BLOCK_SIZE,
        "scale": 1.0,
    }
    return whole | other


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"seq_lens": np.array([13])}, "sequence 0 attends to positions 0 to 13 of 12"),
        ({"seq_lens": np.array([0])}, "sequence 0 attends to positions 0 to 0"),
        ({"first_positions": np.array([-1])}, "sequence 0 attends to positions -1"),
        ({"block_tables": np.full((1, 3), BLOCKS, np.int32)}, f"there is no block {BLOCKS}"),
        ({"block_tables": np.full((1, 3), -1, np.int32)}, "there is no block -1"),
        ({"block_tables": np.zeros((2, 3), np.int32)}, "a block table, a first position"),
        ({"queries": np.zeros((1, 3, 8), np.float32)}, "a multiple of the number of KV heads"),
        ({"queries": np.zeros((1, 4, 7), np.float32)}, "expected keys of the size of the queries"),
        ({"queries": np.zeros((1, 4, 8), np.uint16)}, "of one dtype"),
        ({"queries": np.zeros((1, 4, 8), np.float64)}, "of float32"),
        ({"queries": np.zeros((1, 4, 16), np.float32)[:, :, ::2]}, "queries with contiguous heads"),
        ({"keys": np.zeros((2 * BLOCKS * BLOCK_SIZE, 2, 8), np.float32)[::2]}, "queries with contiguous heads"),
        ({"values": np.zeros((4, 2, 8), np.float32)}, "expected keys of the size of the queries"),
        ({"out": np.zeros((1, 4, 9), np.float32)}, "a contiguous out with a value for each query"),
        ({"out": np.zeros((1, 4, 16), np.float32)[:, :, ::2]}, "a contiguous out with a value for each query"),
        ({"block_size": 0}, "a block size of 1 to"),
        ({"sinks": np.zeros(3, np.float32)}, "expected a sink"),
    ],
)
def test_paged_attention_refuses_arguments_that_do_not_fit(wrong: dict[str, Any], text: str) -> None:
    _native.paged_attention(**kernel_arguments())
    with pytest.raises(ValueError, match=text):
        _native.paged_attention(**kernel_arguments(**wrong))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"seq_len": 13}, "at most as many tokens"),
        ({"seq_len": 1}, "at most as many tokens"),
        ({"blocks": np.full(3, BLOCKS, np.int32)}, "expected blocks that are there"),
        ({"queries": np.zeros((2, 4, 8), np.float32)}, "the bits of bfloat16"),
        ({"queries": np.zeros((2, 3, 8), np.uint16)}, "a multiple of the number of KV heads"),
        ({"sinks": np.zeros(3, np.float32)}, "expected a sink"),
        ({"block_size": 0}, "at most as many tokens"),
    ],
)
def test_chunk_that_does_not_fit_is_refused(wrong: dict[str, Any], text: str) -> None:
    keys, queries = np.zeros((BLOCKS * BLOCK_SIZE, 2, 8), np.uint16), np.zeros((2, 4, 8), np.uint16)
    whole: dict[str, Any] = {"queries": queries, "keys": keys, "values": keys, "out": np.zeros((2, 4, 8), np.uint16)}
    whole |= {"blocks": np.zeros(3, np.int32), "seq_len": 12, "block_size": BLOCK_SIZE, "scale": 1.0}
    _native.prefill_attention(**whole)
    with pytest.raises(ValueError, match=text):
        _native.prefill_attention(**(whole | wrong))
