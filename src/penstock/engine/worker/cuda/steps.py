"""The steps of a model on a CUDA device: decode steps by `DecodeGraphs`, steps with chunks of prompts one by one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.engine.protocol.batch_state import BatchState
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
from penstock.engine.worker.cuda.decode_graphs import DecodeGraphs, GraphRecorder
from penstock.engine.worker.cuda.state import DeviceState
from penstock.engine.worker.input_batch import InputBatch, pinned
from penstock.engine.worker.model import LoadedModel
from penstock.engine.worker.paged_attention import KVCache


class StepTensors(NamedTuple):
    """The input of a step on the device."""

    ids: Tensor
    positions: Tensor
    last: Tensor  # tokens to sample after
    sampled: Tensor  # their slots
    attention: CudaAttention


class CudaSteps:
    def __init__(
        self,
        model: LoadedModel,
        memory: KVCache,
        recorder: GraphRecorder | None,
        slots: int,
        max_blocks: int,
        num_position_axes: int | None,
    ) -> None:
        """`max_blocks`: of a request. `num_position_axes`: of positions that the host brings; None: it brings none."""
        self.state = DeviceState(slots, max_blocks, memory.block_size, model.device)
        self._memory = memory
        self._heads = model.heads
        self.decoding = DecodeGraphs(model, memory, self.state, recorder, num_position_axes)
        self.decoding.prepare()

    @staticmethod
    def is_decoding(batch: BatchState) -> bool:
        """Whether each row of the step computes one token, and samples."""
        return batch.sampled is batch.rows and bool((batch.counts[batch.rows] == 1).all())

    def tensors(self, batch: BatchState, input_batch: InputBatch, positions: Index) -> StepTensors:
        return build_tensors(batch, input_batch, positions, self.state, self._memory, self._heads)


def build_tensors(
    batch: BatchState, input_batch: InputBatch, positions: Index, state: DeviceState, memory: KVCache, heads: int
) -> StepTensors:
    """Brings the input of a step with chunks to the device, in one copy. `heads`: of queries, in a layer."""
    keys = next(iter(memory.layers.values()))[0]
    tiles = chunk_tiles(heads // keys.shape[1], HeadSplit.of(keys.shape[2]), keys.dtype)
    chunks, singles = input_batch.chunks, input_batch.lengths.size
    first = chunks[0].first if chunks else 0
    starts = np.array([chunk.first - first for chunk in chunks] + [input_batch.slots.size - first], np.int32)
    lengths = np.concatenate((input_batch.lengths, np.array([chunk.length for chunk in chunks], np.int64)))
    items = chunk_items(chunks, query_tokens(tiles.m, heads // keys.shape[1])) if chunks else np.zeros((4, 0), np.int32)
    parts: list[Index | Ints] = [
        input_batch.slots, input_batch.positions, positions.reshape(-1), input_batch.places, input_batch.rows, starts,
        lengths, items.reshape(-1), input_batch.last, batch.sampled,
    ]  # fmt: skip
    slots, own, axes, places, rows, begins, sizes, item_numbers, last, sampled = move(parts, state.table.device)
    row_tensors = RowTensors(rows[:singles], sizes[:singles], begins) if singles else None
    chunk_tensors = None
    if chunks:
        chunk_tensors = ChunkTensors(rows[singles:], sizes[singles:], begins, item_numbers.view(4, -1))
    attention = CudaAttention(memory, state.table, places, row_tensors, chunk_tensors, batch.slots)
    return StepTensors(state.tokens[slots, own], axes.view(positions.shape), last, sampled, attention)


def move(parts: list[Index | Ints], device: torch.device) -> tuple[Tensor, ...]:
    """Copies arrays to the device, in one copy, as int32."""
    here = pinned(sum(part.size for part in parts), device)
    np.concatenate(parts, out=here.numpy(), casting="same_kind")
    return torch.split(here.to(device, non_blocking=True), [part.size for part in parts])
