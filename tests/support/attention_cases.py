"""Rows and chunks over a paged KV cache, and what their attention is in float64."""

from __future__ import annotations

import itertools
import math
from contextlib import AbstractContextManager
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from penstock.engine.worker.cuda import attention
from penstock.engine.worker.cuda.attention import ChunkTensors, CudaAttention, HeadSplit, RowTensors
from penstock.engine.worker.input_batch import PrefillChunk
from penstock.engine.worker.paged_attention import AttentionStyle, KVCache, KVCacheShape
from penstock.engine.worker.paged_attention import attention as plain_attention

KV_HEADS = 2
SLOTS = 11
STYLES = ("plain", "window", "softcap", "sinks", "all")
# Errors: of float32 the largest, of others the norm of the error divided by the norm of the result.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}
BESIDE_PLAIN = 1.25  # times the error of plain attention in the same type


class Case(NamedTuple):
    key_size: int = 64
    value_size: int = 64
    groups: int = 2
    block_size: int = 16
    style: str = "plain"
    dtype: torch.dtype = torch.float32
    rows: tuple[int, ...] = (261, 5, 33, 1)  # lengths; the first has more parts than `merge` loads at a time
    chunks: tuple[tuple[int, int], ...] = ((75, 20), (9, 9), (40, 2))  # lengths, and the tokens of the step

    def __str__(self) -> str:
        shape = f"{self.key_size}/{self.value_size} groups {self.groups} block {self.block_size}"
        return f"{str(self.dtype)[6:]} {shape} {self.style}"


def cases(dtype: torch.dtype) -> list[Case]:
    """Returns all head sizes with all styles, and group and block sizes in turn."""
    sizes = [(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256)]
    groups, blocks = (1, 3, 4, 7, 8), (4, 16, 32, 64)
    return [
        Case(*size, groups[(number + number // len(STYLES)) % len(groups)], blocks[number % len(blocks)], style, dtype)
        for number, (size, style) in enumerate(itertools.product(sizes, STYLES))
    ]


class Scene:
    """A cache in which all that a case does not attend to is NaN, and the tensors of one step."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        self._chance = np.random.default_rng(seed)
        torch.manual_seed(seed)
        lengths = [*case.rows, *(length for length, _ in case.chunks)]
        counts = [-(-length // case.block_size) for length in lengths]
        blocks = self._chance.permutation(sum(counts) + 1)
        self._spare = int(blocks[-1])  # stands in the table where no block does, and is NaN
        self.slots = self._chance.permutation(SLOTS)[: len(lengths)]
        self.table = torch.full((SLOTS, max(counts) + 2), self._spare, dtype=torch.int32)
        for slot, end, count in zip(self.slots, itertools.accumulate(counts), counts, strict=True):
            self.table[slot, :count] = torch.from_numpy(blocks[end - count : end].astype(np.int32))
        shape = KVCacheShape(KV_HEADS, case.key_size, case.value_size)
        self.memory = KVCache({0: shape}, sum(counts) + 1, case.block_size, case.dtype, torch.device("cpu"))
        self.heads = KV_HEADS * case.groups
        tokens = len(case.rows) + sum(count for _, count in case.chunks)
        self.query = torch.randn(tokens, self.heads, case.key_size).to(case.dtype)
        self.how = AttentionStyle(
            1.3 / math.sqrt(case.key_size),
            20 if case.style in ("window", "all") else None,
            3.0 if case.style in ("softcap", "all") else None,
            torch.randn(self.heads).to(case.dtype) if case.style in ("sinks", "all") else None,
        )
        self._fill(lengths)

    def _fill(self, lengths: list[int]) -> None:
        for cache in self.memory.layers[0]:
            cache.fill_(torch.nan)
            for slot, length in zip(self.slots, lengths, strict=True):
                places = self.places(slot, length)
                cache[places] = torch.randn(length, *cache.shape[1:]).to(cache.dtype)

    def places(self, slot: int, length: int) -> Tensor:
        positions = torch.arange(length)
        size = self.case.block_size
        return self.table[slot, positions // size].long() * size + positions % size

    # ── by kernels ──
    def attend(self, programs: int = 12) -> Tensor:
        """Attends with one row and one item more than there are. `programs`: of rows, for each KV head."""
        case, rows = self.case, len(self.case.rows)
        slots = torch.from_numpy(self.slots.astype(np.int32))
        nothing = torch.tensor([-1], dtype=torch.int32)
        row_lengths = torch.tensor([*case.rows, 0], dtype=torch.int32)
        chunks, first = [], rows
        for length, count in case.chunks:
            chunks.append(PrefillChunk(first, count, length, np.zeros(1, np.int32)))
            first += count
        split = HeadSplit.of(case.key_size)
        queries = attention.query_tokens(attention.chunk_tiles(case.groups, split, case.dtype).m, case.groups)
        items = np.pad(attention.chunk_items(chunks, queries), ((0, 0), (0, 1)), constant_values=-1)
        of_rows = RowTensors(torch.cat((slots[:rows], nothing)), row_lengths, row_lengths)
        of_chunks = ChunkTensors(
            slots[rows:],
            torch.tensor([length for length, _ in case.chunks], dtype=torch.int32),
            torch.tensor([*(chunk.first for chunk in chunks), first], dtype=torch.int32),
            torch.from_numpy(items),
        )
        with multiprocessors(programs * KV_HEADS // attention.PROGRAMS):
            kernels = CudaAttention(self.memory, self.table, nothing, of_rows, of_chunks, max_rows=8)
        return kernels.attend_written(0, self.query, self.how)

    # ── by torch ──
    def expected(self, dtype: torch.dtype) -> Tensor:
        """Returns plain attention in `dtype`, of the numbers that the cache has."""
        how = self.how._replace(sinks=None if self.how.sinks is None else self.how.sinks.to(dtype))
        steps = [(length, 1) for length in self.case.rows] + list(self.case.chunks)
        results, first = [], 0
        for slot, (length, count) in zip(self.slots, steps, strict=True):
            keys, values = (cache[self.places(slot, length)].to(dtype) for cache in self.memory.layers[0])
            position, other = torch.arange(length - count, length)[:, None], torch.arange(length)[None, :]
            is_seen = other <= position
            if how.window is not None:
                is_seen &= other > position - how.window
            query = self.query[first : first + count].to(dtype)
            results.append(plain_attention(query[None], keys[None], values[None], is_seen[None], how)[0])
            first += count
        return torch.cat(results)


def multiprocessors(count: int) -> AbstractContextManager[object]:
    """Until the block ends, a CPU has what a device has."""
    return mock.patch.multiple(attention, multiprocessors=lambda _: count, device_kind=lambda _: attention.HOPPER)


def error(result: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    difference = result.double() - expected
    if dtype == torch.float32:
        return float(difference.abs().max())
    return float(difference.norm() / expected.norm())


def check_attention(case: Case) -> None:
    """Raises AssertionError where the kernels attend to something else."""
    scene = Scene(case)
    expected = scene.expected(torch.float64)
    own = error(scene.attend(), expected, case.dtype)
    plain = error(scene.expected(case.dtype), expected, case.dtype)
    assert own <= LIMITS[case.dtype], (case, own, plain)
    assert own <= max(BESIDE_PLAIN * plain, LIMITS[case.dtype] / 4), (case, own, plain)


def check_far_cache() -> None:
    """Raises an error where the kernels compute places of a cache of more than 2^31 numbers in 32 bits. Keys and values
    lie in one memory, of which few pages are touched."""
    case = Case(dtype=torch.float16, rows=(70, 3), chunks=((40, 20),))
    scene = Scene(case)
    expected = scene.attend()
    keys, values = scene.memory.layers[0]
    size, width = keys.shape[0], keys.stride(0)
    far = -(-(1 << 31) // width // case.block_size) * case.block_size  # rows in front
    memory = torch.from_numpy(np.zeros(((far + 2 * size) * width,), np.float16)).view(-1, *keys.shape[1:])
    scene.memory.layers[0] = memory, memory[size:]
    memory[far : far + size], memory[far + size :] = keys, values
    scene.table += far // case.block_size
    assert torch.equal(scene.attend(), expected)
    key, value = torch.randn(2, 1, *keys.shape[1:]).to(case.dtype)
    with multiprocessors(1):
        places = torch.tensor([far + size - 1], dtype=torch.int32)
        kernels = CudaAttention(scene.memory, scene.table, places, None, None)
    kernels.attend(0, scene.query[:1], key, value, scene.how)
    assert torch.equal(memory[far + size - 1], key[0]) and torch.equal(memory[far + 2 * size - 1], value[0])
