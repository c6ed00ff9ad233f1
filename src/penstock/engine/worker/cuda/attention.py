"""Attention over the paged KV cache on a CUDA device, for rows of one token and for chunks of prompts.

The positions of all rows are cut into items of one size, by the device: so a recorded step holds any lengths, and one
long row is shared among many programs. The items of chunks are made by the host.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.engine.protocol.messages import Ints
from penstock.engine.worker.cuda import kernels, launcher
from penstock.engine.worker.input_batch import PrefillChunk
from penstock.engine.worker.paged_attention import AttentionStyle, KVCache

LEAST_TILES = 2  # of an item of rows: shorter items cost more in `merge` than they gain
PROGRAMS = 4  # of rows, for each multiprocessor of the device
FEW_ROWS = 4  # a step with so few rows has half as many programs: each has little to do
SMALLEST_DOT = 16  # of a size of a product, in Triton
PLANNED = 4096  # elements that a program of `plan_rows` compares
MERGED = 4  # parts that `merge` loads at a time


class Tiles(NamedTuple):
    """Sizes of tiles, and how a kernel is compiled."""

    m: int  # queries of a program
    tile: int  # positions that a program attends to at a time
    warps: int
    stages: int


class RowTensors(NamedTuple):
    """The rows of a step that compute one token each. Padding rows have length 0."""

    slots: Tensor
    lengths: Tensor
    starts: Tensor  # unused by kernels of rows


class ChunkTensors(NamedTuple):
    """The chunks of a step. The tokens of chunk i are `starts[i]` up to `starts[i + 1]`."""

    slots: Tensor
    lengths: Tensor
    starts: Tensor
    items: Tensor  # [4, items]: chunk, begin, end, first query; a window cuts the begin


class RowPlan(NamedTuple):
    items: Tensor  # [5, items]
    firsts: Tensor  # item of each row
    counts: Tensor  # items of each row


class HeadSplit(NamedTuple):
    """A head size as a power of two, and a smaller one for the rest: 80 is 64 and 32, not 128."""

    low: int
    rest: int

    @classmethod
    def of(cls, size: int) -> HeadSplit:
        low = max(SMALLEST_DOT, 1 << (size.bit_length() - 1))
        rest = max(32, power_of_two(size - low)) if size > low else 0
        return cls(low, rest) if rest < low else cls(2 * low, 0)


def power_of_two(size: int) -> int:
    """Returns the least power of two from `size` up."""
    return 1 << max(size - 1, 0).bit_length()


def row_tiles(groups: int, split: HeadSplit, dtype: torch.dtype, block_size: int) -> Tiles:
    m = max(16, power_of_two(groups))
    if dtype == torch.float32:  # tiles of 32 spill
        return Tiles(m, 16, 8, 2)
    if split.low + split.rest > 128:
        return Tiles(m, 32, 4, 3)
    return Tiles(m, 64 if block_size % 64 == 0 else 32, 4, 3)


class DeviceKind(NamedTuple):
    has_group_mma: bool  # products of four warps together
    has_small_memory: bool  # 99 KiB for the tiles of a program

    @classmethod
    def of(cls, capability: tuple[int, int]) -> DeviceKind:
        return cls(capability[0] in (9, 10), capability in ((8, 6), (8, 9)) or capability[0] == 12)


HOPPER = DeviceKind.of((9, 0))


def chunk_tiles(groups: int, split: HeadSplit, dtype: torch.dtype, kind: DeviceKind = HOPPER) -> Tiles:
    m = max(64, power_of_two(groups))
    if dtype == torch.float32:
        return Tiles(max(16, power_of_two(groups)), 16, 8, 2)
    if split.low + split.rest > 128:
        return Tiles(m, 32, 8, 2)
    tile = 32 if kind.has_small_memory and split.low + split.rest > 64 else 64
    return Tiles(m, tile, 4 if kind.has_group_mma else 8, 3)  # products of one warp each spill in 4 warps


def chunk_items(chunks: Sequence[PrefillChunk], queries: int) -> Ints:
    """Returns the items [4, items] of chunks, `queries` tokens each."""
    columns = []
    for index, chunk in enumerate(chunks):
        first = np.arange(0, chunk.tokens, queries, dtype=np.int32)
        end = np.minimum(chunk.length - chunk.tokens + first + queries, chunk.length)
        columns.append(np.stack((np.full_like(first, index), np.zeros_like(first), end.astype(np.int32), first)))
    items: Ints = np.concatenate(columns, axis=1)
    return items[:, ::-1].copy()  # the last items of a chunk attend to most positions: they begin first


class CudaAttention:
    """Attention of one step: the layers call `attend`, and fused layers `attend_written`."""

    def __init__(
        self,
        memory: KVCache,
        table: Tensor,
        places: Tensor,
        rows: RowTensors | None,
        chunks: ChunkTensors | None,
        max_rows: int = 1,
    ) -> None:
        """`table`: block tables of all slots. `places` [tokens]: of rows, then of chunks. `max_rows`: of any step."""
        self._max_rows = max_rows
        self._memory = memory
        self._table = table
        self.places = places
        self._rows = rows
        self._chunks = chunks
        self._plans: dict[tuple[int, int, int], RowPlan] = {}  # by window, tile and KV heads
        self._multiprocessors = multiprocessors(places.device)
        self._kind = device_kind(places.device)

    def cache_of(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._memory.layers[layer]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: AttentionStyle) -> Tensor:
        """Writes keys and values [tokens, heads, size] to the cache, and attends with the queries to all tokens up to
        their own."""
        keys, values = self._memory.layers[layer]
        key, value = key.to(keys.dtype).contiguous(), value.to(values.dtype).contiguous()
        key_size, value_size = keys.stride(0), values.stride(0)
        launcher.launch(
            kernels.write_cache, (key.shape[0],),
            key, value, keys, values, self.places, key.stride(0), value.stride(0), key_size, value_size,
            KEY_SIZE=key_size, KP=power_of_two(key_size), VALUE_SIZE=value_size, VP=power_of_two(value_size),
        )  # fmt: skip
        return self.attend_written(layer, query.contiguous(), how)

    def attend_written(self, layer: int, query: Tensor, how: AttentionStyle) -> Tensor:
        """Attends with contiguous queries [tokens, heads, size]. Their keys and values have been written."""
        out = query.new_empty(*query.shape[:2], self._memory.layers[layer][1].shape[2])
        if self._rows is not None:
            self._attend_rows(layer, query, out, self._rows, how)
        if self._chunks is not None:
            self._attend_chunks(layer, query, out, self._chunks, how)
        return out

    def _attend_rows(self, layer: int, query: Tensor, out: Tensor, rows: RowTensors, how: AttentionStyle) -> None:
        keys, values = self._memory.layers[layer]
        tiles = row_tiles(query.shape[1] // keys.shape[1], HeadSplit.of(keys.shape[2]), keys.dtype, self._block_size)
        plan = self._plan(rows, how.window, tiles.tile, keys.shape[1])
        num_items, heads = plan.items.shape[1], query.shape[1]
        parts = query.new_empty((num_items, heads, values.shape[2]), dtype=torch.float32)
        stats = query.new_empty((num_items, heads, 2), dtype=torch.float32)
        self._launch(layer, query, out, parts, stats, plan.items, plan.items, rows, how, tiles, is_rows=True)
        value_size = values.shape[2]
        launcher.launch(
            kernels.merge, (rows.slots.shape[0], heads),
            out, parts, stats, plan.firsts, plan.counts, out.stride(0),
            V=value_size, VP=power_of_two(value_size), SIZE=MERGED,
        )  # fmt: skip

    def _attend_chunks(self, layer: int, query: Tensor, out: Tensor, chunks: ChunkTensors, how: AttentionStyle) -> None:
        keys = self._memory.layers[layer][0]
        groups, split = query.shape[1] // keys.shape[1], HeadSplit.of(keys.shape[2])
        tiles = chunk_tiles(groups, split, keys.dtype, self._kind)
        items = chunks.items
        if how.window is not None:
            begin = (items[2] - query_tokens(tiles.m, groups) - how.window).clamp(min=0)
            items = torch.stack((items[0], begin // tiles.tile * tiles.tile, items[2], items[3]))
        self._launch(layer, query, out, query, query, items, items[3], chunks, how, tiles, is_rows=False)

    def _launch(
        self, layer: int, query: Tensor, out: Tensor, parts: Tensor, stats: Tensor, items: Tensor,
        first_queries: Tensor, tokens: RowTensors | ChunkTensors, how: AttentionStyle, tiles: Tiles, *, is_rows: bool,
    ) -> None:  # fmt: skip
        keys, values = self._memory.layers[layer]
        kv_heads, key_size, value_size = keys.shape[1], keys.shape[2], values.shape[2]
        (k0, k1), (v0, v1) = HeadSplit.of(key_size), HeadSplit.of(value_size)
        sinks = query if how.sinks is None else how.sinks
        launcher.launch(
            kernels.attend, (items.shape[1], kv_heads),
            query, keys, values, out, parts, stats, sinks, items, first_queries, tokens.slots, tokens.starts,
            tokens.lengths, self._table, items.shape[1], how.scale, how.softcap or 0.0, query.stride(0), out.stride(0),
            keys.stride(0), values.stride(0), self._table.stride(0),
            HEADS=query.shape[1], GROUPS=query.shape[1] // kv_heads, BLOCK=self._block_size, TILE=tiles.tile, M=tiles.m,
            K=key_size, K0=k0, K1=k1, V=value_size, V0=v0, V1=v1, WINDOW=how.window or 0,
            SOFTCAP=how.softcap is not None, SINKS=how.sinks is not None, IS_ROWS=is_rows,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip

    @property
    def _block_size(self) -> int:
        return self._memory.block_size

    def _plan(self, rows: RowTensors, window: int | None, tile: int, kv_heads: int) -> RowPlan:
        key = window or 0, tile, kv_heads
        if key not in self._plans:
            programs = PROGRAMS * self._multiprocessors // (2 if rows.slots.shape[0] <= FEW_ROWS else 1)
            target = -(-programs // kv_heads)
            self._plans[key] = plan_rows(rows.lengths, window or 0, tile, target, power_of_two(self._max_rows))
        return self._plans[key]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def device_kind(device: torch.device) -> DeviceKind:
    return DeviceKind.of(torch.cuda.get_device_capability(device))


def query_tokens(m: int, groups: int) -> int:
    """Returns the tokens of an item of chunks."""
    return m // groups


def plan_rows(lengths: Tensor, window: int, tile: int, target: int, max_rows: int) -> RowPlan:
    """Returns about `target` items, and one more for each row at most. `max_rows`: a power of two."""
    num_rows = lengths.shape[0]
    num_items = num_rows + target
    size = max(1, min(16, PLANNED // max_rows))
    items = lengths.new_empty((5, num_items))
    plan = RowPlan(items, torch.empty_like(lengths), torch.empty_like(lengths))
    launcher.launch(
        kernels.plan_rows, (-(-num_items // size),),
        plan.items, plan.firsts, plan.counts, lengths, num_rows, num_items,
        ROWS=max_rows, SIZE=size, TARGET=target, LEAST=LEAST_TILES, TILE=tile, WINDOW=window,
    )  # fmt: skip
    return plan
