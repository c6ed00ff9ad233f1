"""Attention kernels, run by Triton's interpreter, against attention in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'penstock[engine]'")

from tests.support.interpreter import require_interpreter  # noqa: E402

require_interpreter()

from penstock.engine.worker.cuda.attention import HeadSplit, chunk_items, plan_rows  # noqa: E402
from penstock.engine.worker.input_batch import PrefillChunk  # noqa: E402
from tests import tiers  # noqa: E402
from tests.support.attention_cases import LIMITS, Case, Scene, cases, check_attention, check_far_cache, error  # noqa: E402

TYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = [case for dtype in TYPES for case in cases(dtype)]


@pytest.mark.parametrize("case", CASES if tiers.TIER != "push" else CASES[::9], ids=str)
def test_rows_and_chunks_attend_as_in_float64(case: Case) -> None:
    """Unwritten cache is NaN, slots and blocks are shuffled, one row has many parts, chunks have cached prefixes."""
    check_attention(case)


@pytest.mark.parametrize("style", ["plain", "all"])
def test_row_of_25_parts_is_merged(style: str) -> None:
    check_attention(Case(style=style, rows=(801, 1), chunks=((3, 2),)))


def test_cache_may_have_more_than_2_31_numbers() -> None:
    check_far_cache()


@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
def test_chunk_does_not_read_tiles_before_its_window(dtype: torch.dtype) -> None:
    """There is NaN: a weight of 0 would not hide them."""
    scene = Scene(Case(style="window", dtype=dtype, block_size=64, rows=(1,), chunks=((300, 9), (230, 30))))
    expected = scene.expected(torch.float64)
    for slot, (length, count) in zip(scene.slots[1:], scene.case.chunks, strict=True):
        end = (length - count + 1 - (scene.how.window or 0)) // 64 * 64
        assert end > 0
        for cache in scene.memory.layers[0]:
            cache[scene.places(slot, end)] = torch.nan
    assert error(scene.attend(), expected, dtype) <= LIMITS[dtype]


def test_head_size_is_split_into_two_powers_of_two() -> None:
    for size in range(1, 300):
        low, rest = HeadSplit.of(size)
        assert low >= 16 and low & (low - 1) == 0 and low + rest >= size
        assert rest == 0 or (32 <= rest < low and rest & (rest - 1) == 0)


# ── items ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def random_lengths() -> list[list[int]]:
    chance = np.random.default_rng(5)
    few = [[1], [0, 0, 3], [64], [65, 0, 1], [100_000], [100_000, 500, 500, 0], [16, 17, 15, 1, 0, 256]]
    return [*few, *(chance.integers(0, 2000, chance.integers(1, 33)).tolist() for _ in range(13))]


@pytest.mark.parametrize(("window", "tile", "target"), [(0, 16, 6), (0, 64, 40), (100, 16, 6), (7, 64, 3)])
def test_items_of_rows_have_each_position_once(window: int, tile: int, target: int) -> None:
    for lengths in random_lengths():
        plan = plan_rows(torch.tensor(lengths, dtype=torch.int32), window, tile, target, 64)
        items = plan.items.T.tolist()
        assert len(items) == len(lengths) + target
        used = [item for item in items if item[0] >= 0]
        by_row = {row: list(group) for row, group in itertools.groupby(used, lambda item: item[0])}
        assert sum(len(group) for group in by_row.values()) == len(used) and items[: len(used)] == used
        for row, length in enumerate(lengths):
            first = max(length - window, 0) // tile * tile if window else 0
            group = by_row.get(row, [])
            assert plan.counts[row] == len(group)
            ends = [first, *(end for _, _, end, _, _ in group)]
            assert [begin for _, begin, *_ in group] == ends[:-1] and ends[-1] == (length if group else 0)
            assert all((end - begin) % tile == 0 for _, begin, end, *_ in group[:-1])
            assert all(item[3:] == [len(group), first] for item in group)
            if group:
                assert used.index(group[0]) == plan.firsts[row]


def test_items_of_chunks_have_each_query_once_and_its_positions() -> None:
    chunks = [PrefillChunk(3, 20, 75, np.zeros(1, np.int32)), PrefillChunk(23, 9, 9, np.zeros(1, np.int32))]
    assert chunk_items(chunks, 8).T.tolist() == [
        [1, 0, 9, 8], [1, 0, 8, 0], [0, 0, 75, 16], [0, 0, 71, 8], [0, 0, 63, 0]
    ]  # fmt: skip
