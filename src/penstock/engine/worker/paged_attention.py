"""Attention over the paged KV cache, which the layers of stock models call instead of their own.

`input_batch` says which tokens a step computes, and where in the cache their keys and values are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine import _native
from penstock.engine.protocol.columns import Index
from penstock.engine.protocol.messages import Ints
from penstock.engine.worker.cpu_kernels import huge_pages, kernel_threads
from penstock.engine.worker.input_batch import InputBatch, PrefillChunk, moved
from penstock.engine.worker.kv_pages import KVPages
from penstock.engine.worker.stock import AttentionInterface

NAME = "penstock"  # of this attention in transformers' registry; no mask function has this name, so no mask is built
PAGE_NBYTES = 4096
MAX_GATHERED = 1 << 16  # positions with keys and values gathered at a time: the copy is short-lived, but large
CPU_DTYPES = (torch.float32, torch.bfloat16)
CHUNK_KERNELS = ("amx", "avx512_bf16")  # products with which chunks in bfloat16 are as fast as torch's, or faster


class KVCacheShape(NamedTuple):
    """Keys and values that one layer keeps of a token."""

    heads: int
    key_size: int
    value_size: int


class Attention(Protocol):
    """Attention of one step, which the layers of a model call."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: AttentionStyle) -> Tensor:
        """Writes keys and values [tokens, heads, size] to the cache, and attends with the queries to all tokens up to
        their own."""


class Probe:
    """Replaces `PagedAttention` in a trial run: records how each layer attends, and attends to nothing."""

    def __init__(self) -> None:
        self.shapes: dict[int, KVCacheShape] = {}
        self.styles: dict[int, AttentionStyle] = {}
        self.heads: dict[int, int] = {}  # of queries

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: AttentionStyle) -> Tensor:
        self.shapes[layer] = KVCacheShape(key.shape[1], key.shape[2], value.shape[2])
        self.styles[layer], self.heads[layer] = how, query.shape[1]
        return query.new_zeros(*query.shape[:2], value.shape[2])


class KVCache:
    """Keys and values of all layers, in the blocks that the core's `BlockCache` numbers."""

    def __init__(
        self,
        shapes: dict[int, KVCacheShape],
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        pages: KVPages | None = None,
    ) -> None:
        """`pages`: where the memory lies if it outlives the process."""
        self.blocks = blocks
        self.block_size = block_size
        rows = blocks * block_size
        tensors = [
            (rows, shape.heads, size) for shape in shapes.values() for size in (shape.key_size, shape.value_size)
        ]
        sizes = [-(-math.prod(shape) * dtype.itemsize // PAGE_NBYTES) * PAGE_NBYTES for shape in tensors]
        memory = None if pages is None or device.type != "cpu" else pages.open(blocks, sum(sizes))
        parts = [None if memory is None else memory[end - size : end] for end, size in zip(accumulate(sizes), sizes)]
        filled = iter([_zeros(shape, dtype, device, part) for shape, part in zip(tensors, parts, strict=True)])
        self.layers = {layer: (next(filled), next(filled)) for layer in shapes}
        self.on_cpu = None
        if device.type == "cpu" and dtype in CPU_DTYPES:
            self.on_cpu = CpuKVCache(self.layers, blocks, block_size)

    @staticmethod
    def nbytes_of_block(shapes: dict[int, KVCacheShape], block_size: int, dtype: torch.dtype) -> int:
        sizes = (shape.heads * (shape.key_size + shape.value_size) for shape in shapes.values())
        return sum(sizes) * block_size * dtype.itemsize


def _zeros(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, memory: memoryview | None) -> Tensor:
    """Returns a tensor in `memory`; None: zeros. On a CPU, pages are allocated when written to, large ones where there
    are any: a process with few pages ends soon, and until it has ended no peer learns of its death."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape)
    return torch.frombuffer(memory or huge_pages(count * dtype.itemsize), dtype=dtype, count=count).view(shape)


class AttentionStyle(NamedTuple):
    """How a layer attends."""

    scale: float
    window: int | None = None  # a token sees so many, itself among them
    softcap: float | None = None
    sinks: Tensor | None = None  # per head: a score that takes its share of the attention and gives nothing

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None


class PagedAttention:
    """Attention of one step: the layers call `attend`."""

    def __init__(self, memory: KVCache, input_batch: InputBatch, device: torch.device) -> None:
        self._memory = memory
        self._input_batch = input_batch
        self._device = device
        self._places = moved(input_batch.places, device)
        self._decodes: dict[int | None, list[tuple[Tensor, Tensor, Tensor]]] = {}  # by window
        self._chunks: dict[int | None, list[tuple[Tensor, Tensor]]] = {}
        self._rows: dict[int | None, CpuRows] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: AttentionStyle) -> Tensor:
        """Writes keys and values [tokens, heads, size] to the cache, and attends with the queries to all tokens up to
        their own."""
        keys, values = self._memory.layers[layer]
        keys.index_copy_(0, self._places, key.to(keys.dtype))
        values.index_copy_(0, self._places, value.to(values.dtype))
        return self._attend(layer, query, how)

    def attend_written(
        self, layer: int, write: Callable[[Tensor, Tensor, Tensor], Tensor], how: AttentionStyle
    ) -> Tensor:
        """As `attend`. `write` writes keys and values to the places of the layer's cache, and returns the queries."""
        return self._attend(layer, write(self._places, *self._memory.layers[layer]), how)

    @functools.cached_property
    def native_step(self) -> _native.AttentionStep | None:
        """The step for native layers; None: torch computes some of its attention."""
        on_cpu = self._memory.on_cpu
        return None if on_cpu is None else on_cpu.step(self._input_batch)

    def _attend(self, layer: int, query: Tensor, how: AttentionStyle) -> Tensor:
        keys, values = self._memory.layers[layer]
        attended = query.new_empty(*query.shape[:2], values.shape[2])
        on_cpu = self._memory.on_cpu
        if on_cpu is None:
            for rows, places, mask in self._reach_of_rows(how.window):
                attended[rows] = attention(query[rows, None], keys[places], values[places], mask[:, None], how)[:, 0]
        elif (input_batch := self._input_batch).lengths.size:
            if how.window not in self._rows:
                self._rows[how.window] = CpuRows(input_batch.table, input_batch.firsts(how.window), input_batch.lengths)
            on_cpu.attend(layer, query, attended, self._rows[how.window], how)
        for number, chunk in enumerate(self._input_batch.chunks):
            part = slice(chunk.first, chunk.first + chunk.tokens)
            if on_cpu is not None and on_cpu.has_chunk_kernel:
                on_cpu.attend_chunk(layer, query[part], attended[part], chunk, how)
                continue
            own = query[None, part]
            if chunk.tokens == chunk.length and how.is_plain and (how.window is None or how.window >= chunk.length):
                places = self._places[part]
                attended[part] = _from_the_start(own, keys[places][None], values[places][None], how.scale)[0]
                continue
            places, mask = self._reach_of_chunks(how.window)[number]
            attended[part] = attention(own, keys[places][None], values[places][None], mask[None], how)[0]
        return attended

    def _reach_of_rows(self, window: int | None) -> list[tuple[Tensor, Tensor, Tensor]]:
        if window not in self._decodes:
            self._decodes[window] = [self._moved(*piece) for piece in pieces(self._input_batch, window)]
        return self._decodes[window]

    def _reach_of_chunks(self, window: int | None) -> list[tuple[Tensor, Tensor]]:
        if window not in self._chunks:
            block_size = self._memory.block_size
            self._chunks[window] = [
                self._moved(*reach_of_chunk(chunk, block_size, window)) for chunk in self._input_batch.chunks
            ]
        return self._chunks[window]

    def _moved(self, *arrays: Any) -> Any:
        return tuple(moved(array, self._device) for array in arrays)


# ── decoding on a CPU ────────────────────────────────────────────────────────────────────────────────────────────────
class CpuRows(NamedTuple):
    """The rows of a step that compute one token each, with the positions that each attends to."""

    table: Ints  # block table [rows, width]
    firsts: Index  # first position
    lengths: Index  # position after the last


class CpuKVCache:
    """The KV cache of all layers as arrays: a native kernel reads the keys and values of each row in their blocks.

    Nothing is gathered, padded or masked, which would be most of the cost of a decode step. With
    `has_chunk_kernel`, another kernel does so for chunks of several tokens. Otherwise, chunks are products of matrices,
    as on other devices.
    """

    def __init__(self, layers: Mapping[int, tuple[Tensor, Tensor]], blocks: int, block_size: int) -> None:
        self._blocks = blocks
        self._layers = {layer: (_numbers(keys), _numbers(values)) for layer, (keys, values) in layers.items()}
        self._block_size = block_size
        self._is_bfloat16 = all(keys.dtype == torch.bfloat16 for keys, _ in layers.values())
        self.has_chunk_kernel = self._is_bfloat16 and _native.linear_kernel() in CHUNK_KERNELS
        self._addresses = np.zeros((max(layers) + 1, 2), np.int64)
        for layer, tensors in layers.items():
            self._addresses[layer] = [tensor.data_ptr() for tensor in tensors]

    def step(self, input_batch: InputBatch) -> _native.AttentionStep | None:
        """Returns the step for native layers; None: they do not compute all of its attention."""
        if input_batch.chunks and not self.has_chunk_kernel:
            return None
        blocks, block_size = self._blocks, self._block_size
        rows = input_batch.places, input_batch.table, input_batch.lengths
        is_float32 = not self._is_bfloat16
        return _native.AttentionStep(self._addresses, blocks, block_size, *rows, input_batch.chunks, is_float32)

    def attend(self, layer: int, query: Tensor, attended: Tensor, rows: CpuRows, how: AttentionStyle) -> None:
        """Computes attention for the first rows of `query` [tokens, heads, size], into the first rows of `attended`."""
        count = rows.lengths.size
        keys, values = self._layers[layer]
        sinks = None if how.sinks is None else how.sinks.float().numpy()
        vectors = (_numbers(query[:count]), keys, values, _numbers(attended[:count]))
        arguments = (*vectors, *rows, self._block_size, how.scale, how.softcap or 0.0, sinks)
        _native.paged_attention(*arguments, kernel_threads())

    def attend_chunk(
        self, layer: int, query: Tensor, attended: Tensor, chunk: PrefillChunk, how: AttentionStyle
    ) -> None:
        """Computes attention for the tokens of a chunk in bfloat16."""
        sinks = None if how.sinks is None else how.sinks.float().numpy()
        _native.prefill_attention(
            _numbers(query),
            *self._layers[layer],
            _numbers(attended),
            blocks=chunk.blocks,
            seq_len=chunk.length,
            block_size=self._block_size,
            scale=how.scale,
            window=how.window or 0,
            softcap=how.softcap or 0.0,
            sinks=sinks,
            threads=kernel_threads(),
        )


def _numbers(tensor: Tensor) -> npt.NDArray[Any]:
    """Returns an array of the tensor's own memory; of bfloat16, which NumPy does not know, an array of the bits."""
    if tensor.dtype == torch.float32:
        return tensor.numpy()
    return tensor.view(torch.int16).numpy().view(np.uint16)


# ── the products ─────────────────────────────────────────────────────────────────────────────────────────────────────
def pieces(input_batch: InputBatch, window: int | None) -> Iterator[tuple[Any, Any, Any]]:
    """Yields groups of decode rows of similar length: the rows, the cache places that each row attends to (padded), and
    a mask of the places that are not padding."""
    block_size = input_batch.block_size
    lengths = input_batch.lengths
    first = input_batch.firsts(window)
    first_block = first // block_size
    block_counts = -(-lengths // block_size) - first_block
    order = np.argsort(block_counts, kind="stable")
    while order.size:  # from the longest to the shortest
        num_blocks = int(block_counts[order[-1]])
        rows = order[-max(1, MAX_GATHERED // (num_blocks * block_size)) :]
        order = order[: -rows.size]
        columns = first_block[rows, None] + np.arange(num_blocks)
        blocks = input_batch.table[rows[:, None], np.minimum(columns, input_batch.table.shape[1] - 1)]
        offsets = np.arange(block_size)
        places = (blocks[:, :, None] * block_size + offsets).reshape(rows.size, -1)
        positions = (columns[:, :, None] * block_size + offsets).reshape(rows.size, -1)
        is_seen = (positions >= first[rows, None]) & (positions < lengths[rows, None])
        own = input_batch.places[rows, None]  # padding: the rest of a block may hold NaN of another request
        yield rows, np.where(is_seen, places, own), is_seen


def reach_of_chunk(chunk: PrefillChunk, block_size: int, window: int | None) -> tuple[Any, Any]:
    """Returns the cache places that the tokens of a chunk attend to, and the mask of each token."""
    queries = np.arange(chunk.length - chunk.tokens, chunk.length)
    first = 0 if window is None else max(0, int(queries[0]) + 1 - window)
    positions = np.arange(first, chunk.length)
    places = chunk.blocks[positions // block_size] * block_size + positions % block_size
    sees = positions <= queries[:, None]
    if window is not None:
        sees &= positions > queries[:, None] - window
    return places, sees


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, how: AttentionStyle) -> Tensor:
    """Attends with query [rows, tokens, heads, size] to key and value [rows, positions, key heads, size], where the
    mask [rows, tokens, positions] is true. Heads that share a key head are treated as more tokens."""
    rows, tokens, heads, size = query.shape
    groups = heads // key.shape[2]
    packed = query.view(rows, tokens, -1, groups, size).permute(0, 2, 3, 1, 4).reshape(rows, -1, groups * tokens, size)
    mask = mask[:, None].repeat(1, 1, groups, 1) if tokens > 1 and groups > 1 else mask[:, None]
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    if how.is_plain:
        attended = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=how.scale)
    else:
        scores = (packed @ key.transpose(2, 3)) * how.scale
        if how.softcap is not None:
            scores = torch.tanh(scores / how.softcap) * how.softcap
        scores = scores.masked_fill(~mask, float("-inf"))
        if how.sinks is not None:
            sinks = how.sinks.view(1, -1, groups, 1, 1).expand(rows, -1, -1, tokens, 1).flatten(2, 3)
            scores = torch.cat((scores, sinks.to(scores.dtype)), dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
        attended = weights[..., : key.shape[2]] @ value
    return attended.view(rows, -1, groups, tokens, value.shape[3]).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _from_the_start(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attends within a chunk with nothing before it: no mask is needed, and without one there are faster ways."""
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    shares = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=shares).transpose(
        1, 2
    )


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    paged: Attention,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls: takes [1, heads, tokens, size], returns [1, tokens, heads, size]."""
    how = AttentionStyle(query.shape[3] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return paged.attend(module.layer_idx, queries, keys, values, how)[None], None


AttentionInterface.register(NAME, _attend)
