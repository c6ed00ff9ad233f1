"""The input of the model for one step: positions, places in the cache, block tables; and all token ids.

The tokens of a step are one sequence: first the rows that compute one token each, then the chunks of prompts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.columns import Index
from penstock.engine.protocol.messages import Ints


class PrefillChunk(NamedTuple):
    """Several tokens of one request."""

    first: int  # index of the first one among the tokens of the step
    tokens: int
    length: int  # computed tokens of the request, these included
    blocks: Ints


class InputBatch(NamedTuple):
    """The tokens of one step."""

    block_size: int
    slots: Index  # of each token's request
    positions: Index  # of each token in it
    places: Index  # of each token's keys and values in the cache
    rows: Index  # slots, in the order in which their tokens stand
    starts: Index  # where the tokens of each row begin
    counts: Index
    lengths: Index  # computed tokens of each row that computes one token now, this one included
    table: Ints  # their blocks, padded
    chunks: tuple[PrefillChunk, ...]
    last: Index  # the tokens to sample after, in the order of `BatchState.sampled`

    def firsts(self, window: int | None) -> Index:
        """Returns the first position that each row of one token attends to; `window`: of the model's layer, or None."""
        return np.zeros_like(self.lengths) if window is None else np.maximum(self.lengths - window, 0)


def build_batch(batch: BatchState) -> InputBatch:
    """Builds the input of the step that `batch` has just applied."""
    rows = batch.rows
    short, long = batch.counts[rows] == 1, batch.counts[rows] > 1
    rows = np.concatenate((rows[short], rows[long]))
    counts = batch.counts[rows].astype(np.intp)
    lengths = batch.computed[rows].astype(np.intp)
    singles = int(np.count_nonzero(short))
    ends = np.cumsum(counts)
    starts = ends - counts
    slots = np.repeat(rows, counts)
    positions = np.arange(slots.size) + np.repeat(lengths - ends, counts)
    block_size = batch.block_size
    places = batch.table[slots, positions // block_size].astype(np.intp) * block_size + positions % block_size
    width = int(batch.block_counts[rows[:singles]].max(initial=0))
    last = np.zeros(batch.slots, np.intp)
    last[rows] = ends - 1
    return InputBatch(
        block_size,
        slots,
        positions,
        places,
        rows,
        starts,
        counts,
        lengths[:singles],
        batch.table[rows[:singles], :width],
        tuple(
            PrefillChunk(int(starts[row]), int(counts[row]), int(lengths[row]), batch.blocks_of(int(rows[row])).copy())
            for row in range(singles, rows.size)
        ),
        last[batch.sampled],
    )


def trial_batch(tokens: int, block_size: int, *, is_chunk: bool) -> InputBatch:
    """Returns the input of a step of so many requests with one token each, or of one chunk."""
    numbers, ones = np.arange(tokens), np.ones(tokens, np.intp)
    if is_chunk:
        blocks = np.arange(-(-tokens // block_size), dtype=np.int32)
        chunk, row, none = PrefillChunk(0, tokens, tokens, blocks), np.zeros(1, np.intp), np.zeros(0, np.intp)
        rows = row, row, row + tokens, none, np.zeros((0, 0), np.int32)
        return InputBatch(block_size, 0 * numbers, numbers, numbers, *rows, (chunk,), row + tokens - 1)
    table = numbers[:, None].astype(np.int32)
    rows = numbers, numbers, ones, ones, table
    return InputBatch(block_size, numbers, 0 * numbers, numbers * block_size, *rows, (), numbers)


def pinned(size: int, device: torch.device) -> Tensor:
    """Returns int32 memory for copies to the device: pinned, so that no copy waits for the device."""
    return torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")


def moved(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copies an array to the device; pinned memory lets the copy be queued without waiting for the device's work."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def queued(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copies a tensor of the host to the device, in another type if there is one. The copy does not wait for a CUDA
    device's work: it reads pinned memory, into which this casts."""
    if device.type != "cuda":
        return tensor.to(device, dtype)
    here = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, pin_memory=True).copy_(tensor)
    return here.to(device, non_blocking=True)


def unpacked(bits: npt.NDArray[np.int32], count: int, device: torch.device) -> Tensor:
    """Returns the first `count` bits of each row as booleans, on the device."""
    if device.type == "cpu":
        flags = np.unpackbits(bits.view(np.uint8), axis=1, count=count, bitorder="little")
        return torch.from_numpy(flags.view(np.bool_))
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    return ((moved(bits, device)[:, :, None] >> shifts) & 1).flatten(1)[:, :count].bool()


class TokenTable:
    """The token ids of every slot, prompt and generated, on the device."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._ids = torch.zeros(slots, 256, dtype=torch.int32, device=device)

    def join(self, slot: int, ids: Ints) -> None:
        """`ids`: of the prompt, and those generated before the sample was resumed. The array must be writable."""
        self._make_room(ids.size)
        self._ids[slot, : ids.size] = moved(ids, self._ids.device)

    def read(self, slots: Tensor, positions: Tensor) -> Tensor:
        return self._ids[slots, positions]

    def write(self, slots: Index, positions: Ints, ids: Tensor) -> None:
        """Writes sampled ids, which the device may still be computing."""
        if slots.size:
            self._make_room(int(positions.max()) + 1)
            where = moved(np.stack((slots, positions.astype(np.intp))), ids.device)
            self._ids[where[0], where[1]] = ids.to(torch.int32)

    def _make_room(self, length: int) -> None:
        slots, there = self._ids.shape
        if length > there:
            wider = self._ids.new_zeros(slots, max(length, 2 * there))
            wider[:, :there] = self._ids
            self._ids = wider
