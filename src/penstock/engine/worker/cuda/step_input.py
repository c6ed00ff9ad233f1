"""The input of a step with chunks of prompts: numbers that the host brings to the device in one copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from torch import Tensor

from penstock.engine.protocol.columns import Index
from penstock.engine.protocol.messages import Ints
from penstock.engine.worker.cuda.attention import (
    ChunkTensors,
    CudaAttention,
    HeadSplit,
    RowTensors,
    chunk_items,
    chunk_tiles,
    query_tokens,
)
from penstock.engine.worker.cuda.state import DeviceState
from penstock.engine.worker.input_batch import InputBatch
from penstock.engine.worker.paged_attention import KVCache


class StepTensors(NamedTuple):
    """The input of a step on the device."""

    ids: Tensor
    positions: Tensor
    last: Tensor  # tokens to sample after
    sampled: Tensor  # their slots
    attention: CudaAttention


class InputSizes(NamedTuple):
    tokens: int
    rows: int  # of one token
    chunks: int
    items: int  # of chunks
    sampled: int
    axes: int  # of positions


class InputPart(NamedTuple):
    """A part of an input."""

    size: Callable[[InputSizes], int]
    padding: int = 0
    has_lines: bool = False


PARTS = {
    "slots": InputPart(lambda sizes: sizes.tokens),
    "positions": InputPart(lambda sizes: sizes.tokens),
    "rope_positions": InputPart(lambda sizes: sizes.axes * sizes.tokens, has_lines=True),
    "places": InputPart(lambda sizes: sizes.tokens, padding=-1),
    "row_slots": InputPart(lambda sizes: sizes.rows, padding=-1),
    "row_lengths": InputPart(lambda sizes: sizes.rows),
    "chunk_slots": InputPart(lambda sizes: sizes.chunks),
    "chunk_lengths": InputPart(lambda sizes: sizes.chunks),
    "starts": InputPart(lambda sizes: sizes.chunks + 1),
    "items": InputPart(lambda sizes: 4 * round_up(sizes.items), padding=-1, has_lines=True),
    "last": InputPart(lambda sizes: sizes.sampled),
    "sampled": InputPart(lambda sizes: sizes.sampled, padding=-1),
}
EMPTY: Mapping[str, Ints] = dict.fromkeys(PARTS, np.zeros(0, np.int32))  # a step without tokens


class InputLayout:
    """Where the parts of an input lie. `sizes` are those of one step, or the largest of all steps of one graph."""

    def __init__(self, sizes: InputSizes) -> None:
        self.sizes = sizes
        self._ranges: dict[str, tuple[int, int]] = {}
        self.size = 0
        for name, part in PARTS.items():
            self._ranges[name] = self.size, self.size + part.size(sizes)
            self.size = round_up(self._ranges[name][1])  # an address of 16 bytes: kernels are compiled for that

    def write(self, values: Mapping[str, Index | Ints], numbers: Ints) -> None:
        """Writes the parts of a step, and padding behind each."""
        for name, (begin, end) in self._ranges.items():
            numbers[begin:end] = PARTS[name].padding
            value = values[name]
            if PARTS[name].has_lines and value.size:
                numbers[begin:end].reshape(value.shape[0], -1)[:, : value.shape[1]] = value
            elif value.size:
                numbers[begin : begin + value.size] = value

    def part(self, numbers: Tensor, name: str) -> Tensor:
        begin, end = self._ranges[name]
        return numbers[begin:end]

    def tensors(self, numbers: Tensor, state: DeviceState, memory: KVCache) -> StepTensors:
        part = {name: numbers[begin:end] for name, (begin, end) in self._ranges.items()}
        rows = chunks = None
        if self.sizes.rows:
            rows = RowTensors(part["row_slots"], part["row_lengths"], part["row_lengths"])
        if self.sizes.items:
            items = part["items"].view(4, -1)
            chunks = ChunkTensors(part["chunk_slots"], part["chunk_lengths"], part["starts"], items)
        attention = CudaAttention(memory, state.table, part["places"], rows, chunks, state.rows.shape[0])
        positions = part["rope_positions"]
        if self.sizes.axes > 1:
            positions = positions.view(self.sizes.axes, -1)
        ids = state.tokens[part["slots"], part["positions"]]
        return StepTensors(ids, positions, part["last"], part["sampled"], attention)


def round_up(size: int) -> int:
    """Returns the least multiple of 4 from `size` up."""
    return -(-size // 4) * 4


def chunk_queries(memory: KVCache, heads: int) -> int:
    """Returns the tokens of an item of chunks. `heads`: of queries, in a layer."""
    keys = next(iter(memory.layers.values()))[0]
    groups = heads // keys.shape[1]
    return query_tokens(chunk_tiles(groups, HeadSplit.of(keys.shape[2]), keys.dtype).m, groups)


def graph_sizes(tokens: int, slots: int, queries: int, axes: int) -> InputSizes:
    """Returns sizes with room for all steps of up to so many tokens."""
    rows, chunks = min(slots, tokens), min(slots, tokens // 2)
    return InputSizes(tokens, rows, chunks, tokens // queries + chunks, rows, axes)


class StepInput:
    """The input of one step on the host."""

    def __init__(self, input_batch: InputBatch, positions: Index, sampled: Index, queries: int) -> None:
        """`positions` [tokens] or [axes, tokens]: of the rotary embedding. `queries`: see `chunk_queries`."""
        chunks, singles = input_batch.chunks, input_batch.lengths.size
        ends = [chunk.first + chunk.tokens for chunk in chunks]
        items = chunk_items(chunks, queries) if chunks else np.zeros((4, 0), np.int32)
        rope_positions = positions.reshape(-1, positions.shape[-1])
        self.values: dict[str, Index | Ints] = {
            "slots": input_batch.slots,
            "positions": input_batch.positions,
            "rope_positions": rope_positions,
            "places": input_batch.places,
            "row_slots": input_batch.rows[:singles],
            "row_lengths": input_batch.lengths,
            "chunk_slots": input_batch.rows[singles:],
            "chunk_lengths": np.array([chunk.length for chunk in chunks], np.int32),
            "starts": np.array([*(chunk.first for chunk in chunks), *ends[-1:]], np.int32),
            "items": items,
            "last": input_batch.last,
            "sampled": sampled,
        }
        self.sizes = InputSizes(
            input_batch.slots.size, singles, len(chunks), items.shape[1], sampled.size, rope_positions.shape[0]
        )
