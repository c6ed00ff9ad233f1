"""Decode steps on a CUDA device, recorded as graphs: one for each padded number of rows, for rows of all lengths.

A step is padded to the next larger form with rows of slot -1, which write nothing. All forms are recorded before the
first request. A `GraphRecorder` records; steps run without graphs where it cannot.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from logging import WARNING
from typing import Protocol, TypeAlias

import torch
import torch.distributed
from torch import Tensor

from penstock.engine.cluster.logs import event
from penstock.engine.protocol.columns import Index
from penstock.engine.worker.cuda import kernels
from penstock.engine.worker.cuda.attention import CudaAttention, RowTensors
from penstock.engine.worker.cuda.launcher import launch
from penstock.engine.worker.cuda.state import DeviceState
from penstock.engine.worker.input_batch import pinned
from penstock.engine.worker.model import LoadedModel
from penstock.engine.worker.paged_attention import KVCache

Replay: TypeAlias = Callable[[], Tensor]


class GraphRecorder(Protocol):
    def record(self, compute: Callable[[], Tensor]) -> Replay:
        """Records what `compute` does with its tensors; it may be called several times. Returns the replay, which
        computes with the tensors' contents of that time. Its result is valid until the next replay. Raises an error
        if `compute` cannot be recorded."""


def padded_rows(slots: int) -> list[int]:
    """Returns the numbers of rows of all forms."""
    return sorted({*(count for count in (1, 2, 4) if count < slots), *range(8, slots, 8), slots})


class DecodeGraphs:
    """Computes the logits of decode steps, in which each row of `state` computes one token and samples."""

    def __init__(
        self,
        model: LoadedModel,
        memory: KVCache,
        state: DeviceState,
        recorder: GraphRecorder | None,
        num_position_axes: int | None,
    ) -> None:
        """`num_position_axes`: of positions that the host brings, see `EncoderCache.positions`; None: the positions
        are the numbers of computed tokens. `recorder`: None if steps run without graphs."""
        self._model = model
        self._memory = memory
        self._state = state
        self._recorder = recorder
        self.slots = state.rows.shape[0]
        self.forms = padded_rows(self.slots)
        axes = () if num_position_axes in (None, 1) else (num_position_axes,)
        self._host_positions = None
        if num_position_axes is not None:
            self._host_positions = torch.zeros((*axes, self.slots), dtype=torch.int32, device=model.device)
        self._numbers = torch.zeros((4, self.slots), dtype=torch.int32, device=model.device)
        self._replays: dict[int, Replay] = {}

    @torch.inference_mode()
    def prepare(self) -> None:
        """Records all forms. The larger ones come first: the smaller ones share their memory."""
        if self._recorder is None:
            return
        began = time.monotonic()
        for rows in reversed(self.forms):
            failure = self._record(rows, self._recorder)
            if failure:
                event("decode steps are not recorded", WARNING, why=failure, rows=rows)
                self._replays.clear()
                return
        event("decode steps recorded", forms=len(self._replays), seconds=time.monotonic() - began)

    def _record(self, rows: int, recorder: GraphRecorder) -> str:
        """Returns why a form cannot be recorded, or an empty string."""
        failure, replay = "another rank cannot", None
        try:
            replay = recorder.record(lambda: self._compute(rows))
        except torch.distributed.DistError:
            raise
        except Exception as error:
            cause = error.__context__ or error  # the end of a failed recording raises an error of its own
            failure = f"{type(cause).__name__}: {cause}".partition("\n")[0]
        if not self._model.ranks.least(int(replay is not None)) or replay is None:
            return failure
        self._replays[rows] = replay
        return ""

    def logits(self, rows: int, positions: Index | None = None) -> Tensor:
        """Returns the logits of the first so many rows of the state, valid until the next step. `positions`: those
        that the host brings."""
        if self._host_positions is not None and positions is not None:
            here = pinned(positions.size, self._state.table.device)
            here.numpy()[:] = positions.reshape(-1)
            self._host_positions[..., :rows].copy_(here.view(positions.shape), non_blocking=True)
        form = self.forms[bisect_left(self.forms, rows)]
        replay = self._replays.get(form)
        return (self._compute(rows) if replay is None else replay())[:rows]

    def _compute(self, rows: int) -> Tensor:
        state = self._state
        slots = state.rows[:rows]
        ids, positions, lengths, places = (numbers[:rows] for numbers in self._numbers)
        launch(
            kernels.advance, (-(-rows // 64),),
            slots, state.computed, state.table, state.tokens, ids, positions, lengths, places, rows,
            state.table.stride(0), state.tokens.stride(0), BLOCK=self._memory.block_size, SIZE=64,
        )  # fmt: skip
        attention = CudaAttention(
            self._memory, state.table, places, RowTensors(slots, lengths, lengths), None, self.slots
        )
        if self._host_positions is not None:
            positions = self._host_positions[..., :rows]
        return self._model.logits(self._model.hidden(attention, ids, positions))
