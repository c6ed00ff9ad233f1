"""Decode steps in a few fixed shapes, so that each shape is recorded once as a graph and replayed.

A bucket is a number of rows with block tables of one width. A step is padded to the next larger bucket: padding rows
keep their keys in a block of their own, and their results are ignored. A `GraphRecorder` records; the model runner runs
steps that fit no bucket.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from logging import WARNING
from typing import NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed
from torch import Tensor

from penstock.engine.cluster.logs import event
from penstock.engine.protocol.columns import Index
from penstock.engine.worker.input_batch import InputBatch
from penstock.engine.worker.model import LoadedModel
from penstock.engine.worker.paged_attention import DecodeAttention, KVCache

LEAST_POSITIONS = 256  # of the narrowest block table: fewer buckets, and short answers pay little for the padding
MAX_POSITIONS = 1 << 18  # of all rows together: beyond, the time of attention outweighs the cost of launching kernels

Replay: TypeAlias = Callable[[], Tensor]


class GraphRecorder(Protocol):
    def record(self, compute: Callable[[], Tensor]) -> Replay:
        """Records what `compute` does with its tensors; it may be called several times. Returns the replay, which
        computes with the tensors' contents of that time. Its result is valid until the next replay. Raises an error
        if `compute` cannot be recorded."""


class GraphBucket(NamedTuple):
    rows: int
    width: int  # blocks of each


class GraphBuckets:
    """All buckets: their number is bounded, whatever the number of slots and the length of requests."""

    def __init__(self, slots: int, blocks: int, block_size: int) -> None:
        self._max_blocks = MAX_POSITIONS // block_size
        narrowest = min(-(-LEAST_POSITIONS // block_size), blocks)
        max_rows = max(1, min(slots, self._max_blocks // narrowest))
        self.rows = sorted({*(count for count in (1, 2, 4) if count < max_rows), *range(8, max_rows, 8), max_rows})
        self.widths = [narrowest]
        while self.widths[-1] < min(blocks, self._max_blocks):
            self.widths.append(min(2 * self.widths[-1], blocks))

    def least(self, rows: int, width: int) -> GraphBucket | None:
        """Returns the smallest bucket with room for so many rows and blocks; None: the step fits no bucket."""
        row, column = bisect_left(self.rows, rows), bisect_left(self.widths, width)
        if row == len(self.rows) or column == len(self.widths):
            return None
        form = GraphBucket(self.rows[row], self.widths[column])
        return form if form.rows * form.width <= self._max_blocks else None


class GraphInputs(NamedTuple):
    """The inputs of a bucket on the device: views of one memory, with a column for each row of the input_batch."""

    ids: Tensor
    positions: Tensor  # [rows], or [num_position_axes, rows]
    lengths: Tensor
    table: Tensor  # [rows, width]


class DecodeGraphs:
    def __init__(
        self, model: LoadedModel, memory: KVCache, recorder: GraphRecorder, slots: int, num_position_axes: int = 1
    ) -> None:
        """The last block of `memory` pads a batch. `num_position_axes`: see `EncoderCache.positions`."""
        self._model = model
        self._memory = memory
        self._recorder = recorder
        self._planes = num_position_axes
        self._padding_block = memory.blocks - 1
        self.forms = GraphBuckets(slots, self._padding_block, memory.block_size)
        max_numbers = MAX_POSITIONS // memory.block_size + self.forms.rows[-1] * (num_position_axes + 2)
        self._numbers = torch.zeros(max_numbers, dtype=torch.int64, device=model.device)
        self._replays: dict[GraphBucket, Replay] = {}
        self._is_recording = True  # until a form cannot be recorded

    @torch.inference_mode()
    def prepare(self) -> None:
        """Records the buckets of short requests, so that these do not wait for a recording. The larger buckets come
        first: the smaller ones share their memory."""
        began = time.monotonic()
        for rows in reversed(self.forms.rows):
            form = GraphBucket(rows, self.forms.widths[0])
            self._write_inputs(form)
            if self._replay_of(form) is None:
                return
        event("decode steps recorded", forms=len(self._replays), seconds=time.monotonic() - began)

    def hidden(self, input_batch: InputBatch, ids: Tensor, positions: Index) -> Tensor | None:
        """Returns the hidden states of a step's tokens, valid until the next step; None: the step fits no bucket."""
        if input_batch.chunks or not self._is_recording:
            return None
        form = self.forms.least(input_batch.lengths.size, -(-int(input_batch.lengths.max()) // input_batch.block_size))
        if form is None:
            return None
        self._write_inputs(form, input_batch, ids, positions)
        replay = self._replay_of(form)
        return None if replay is None else replay()[: input_batch.lengths.size]

    def _inputs_of(self, form: GraphBucket) -> GraphInputs:
        numbers, num_position_axes = self._in_columns(self._numbers, form), self._planes
        positions = numbers[1] if num_position_axes == 1 else numbers[1 : 1 + num_position_axes]
        return GraphInputs(numbers[0], positions, numbers[1 + num_position_axes], numbers[2 + num_position_axes :].T)

    def _in_columns(self, numbers: Tensor, form: GraphBucket) -> Tensor:
        lines = 2 + self._planes + form.width
        return numbers[: lines * form.rows].view(lines, form.rows)

    def _write_inputs(
        self,
        form: GraphBucket,
        input_batch: InputBatch | None = None,
        ids: Tensor | None = None,
        positions: Index | int = 0,
    ) -> None:
        """Writes all inputs of a bucket, padding rows included: nothing of an earlier step is left in them."""
        num_position_axes, on_device = self._planes, self._in_columns(self._numbers, form)
        # A buffer of its own: no later step overwrites it before the device has read it; pinned, it needs no wait.
        here = torch.empty(on_device.shape, dtype=torch.int64, pin_memory=on_device.is_cuda)
        numbers = here.numpy()
        numbers[: 1 + num_position_axes] = 0
        numbers[1 + num_position_axes] = 1
        numbers[2 + num_position_axes :] = self._padding_block
        if input_batch is not None:
            rows, width = input_batch.lengths.size, min(form.width, input_batch.table.shape[1])
            numbers[1 : 1 + num_position_axes, :rows] = positions
            numbers[1 + num_position_axes, :rows] = input_batch.lengths
            numbers[2 + num_position_axes : 2 + num_position_axes + width, :rows] = input_batch.table[:, :width].T
        on_device.copy_(here, non_blocking=True)
        if ids is not None:
            on_device[0, : ids.shape[0]] = ids

    def _replay_of(self, form: GraphBucket) -> Replay | None:
        """None, from the first form on that cannot be recorded: what waits for the device in one, does so in all."""
        if form not in self._replays:
            failure, recorded = "another rank cannot", None
            try:
                recorded = self._recorder.record(lambda: self._compute(form))
            except torch.distributed.DistError:
                raise
            except Exception as error:
                cause = error.__context__ or error  # what ends a recording that has failed complains of that
                failure = f"{type(cause).__name__}: {cause}".partition("\n")[0]
            if not self._model.ranks.least(int(recorded is not None)) or recorded is None:
                self._is_recording = False  # what is recorded is kept: the device may be at it
                event("decode steps are not recorded", WARNING, why=failure, rows=form.rows, width=form.width)
                return None
            self._replays[form] = recorded
        return self._replays[form]

    def _compute(self, form: GraphBucket) -> Tensor:
        inputs = self._inputs_of(form)
        return self._model.hidden(
            DecodeAttention(self._memory, inputs.lengths, inputs.table), inputs.ids, inputs.positions
        )
