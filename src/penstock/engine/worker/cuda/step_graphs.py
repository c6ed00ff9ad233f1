"""Steps on a CUDA device, recorded as graphs: one for each padded size of a step, whatever the lengths of its requests.

A decode step is padded to a number of rows, and begins with what the device has: without changes it needs no input.
A step with chunks of prompts is padded to a number of tokens. Padding has slot, row or place -1, and writes nothing.
A step ends with its sampled ids, so a decode step is one launch. All graphs are recorded before the first request. A
`GraphRecorder` records; steps run without graphs where it cannot, and where they are larger than the largest graph.
Where memory is short, all ranks leave out the same sizes.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from logging import WARNING
from typing import Protocol, TypeAlias

import torch
import torch.distributed
from torch import Tensor

from penstock.engine.cluster.logs import event
from penstock.engine.protocol.columns import Index
from penstock.engine.protocol.messages import Ints
from penstock.engine.worker.cuda import kernels, launcher
from penstock.engine.worker.cuda.attention import CudaAttention, RowTensors
from penstock.engine.worker.cuda.graphs import InvalidatedCapture
from penstock.engine.worker.cuda.state import DeviceState
from penstock.engine.worker.cuda.step_input import EMPTY, InputLayout, StepInput, graph_sizes, round_up
from penstock.engine.worker.cuda.step_room import is_out_of_memory
from penstock.engine.worker.cuda.step_sampler import StepLogits, StepSampler
from penstock.engine.worker.input_batch import pinned
from penstock.engine.worker.model import LoadedModel
from penstock.engine.worker.paged_attention import KVCache

INVALIDATED, REFUSED, NO_MEMORY, RECORDED = range(4)  # the state of a size on a rank: the least of all ranks counts
HINT = "lower --gpu-memory-utilization"
MAX_LENGTH = 1 << 30  # of a prompt: all have short rotary frequencies
MAX_TOKENS = 2048  # of a recorded step with chunks: beyond, the device computes longer than the host needs to launch
Replay: TypeAlias = Callable[[], Tensor]


class GraphRecorder(Protocol):
    def record(self, compute: Callable[[], Tensor]) -> Replay:
        """Records what the last of several calls of `compute` does with its tensors. Returns the replay, which computes
        with the tensors' contents of that time. Its result is valid until the next replay. Raises an error if
        `compute` cannot be recorded."""


class Recordings:
    """Graphs by the size of a step. All ranks have graphs of the same sizes."""

    def __init__(self, model: LoadedModel, recorder: GraphRecorder | None, sizes: list[int]) -> None:
        self._ranks = model.ranks
        self._recorder = recorder
        self._all_sizes = sizes
        self.sizes: list[int] = []  # of the graphs, in order
        self._replays: dict[int, Replay] = {}

    def __len__(self) -> int:
        return len(self._replays)

    def record(
        self, compute: Callable[[int], Tensor], kind: str, prepare: Callable[[int], None] = lambda _: None
    ) -> None:
        """Records steps of all sizes. The larger ones come first: the smaller ones share their memory.

        A size for which a rank lacks memory is left out. Without any graph from some size on, larger steps run without.
        Raises InvalidatedCapture on all ranks if a rank cannot go on.
        """
        if self._recorder is None:
            return
        began, why = time.monotonic(), ""
        lacking: list[int] = []
        for size in reversed(self._all_sizes):
            state, reason = self._try_to_record(size, self._recorder, compute, prepare)
            if state == NO_MEMORY:
                lacking.append(size)
                why = reason
                torch.cuda.empty_cache()
            elif state == INVALIDATED:
                raise InvalidatedCapture(
                    f"the CUDA graph of a {kind} step of size {size} was invalidated ({reason}), and this process can "
                    "no longer return memory to the device: --enforce-eager runs steps without graphs"
                )
            elif state == REFUSED:
                event(f"{kind} steps are not recorded", WARNING, why=reason, size=size)
                self._replays.clear()
                return
        self.sizes = sorted(self._replays)
        if lacking:
            event(f"{kind} steps lack memory for graphs", WARNING, why=why, sizes=lacking[::-1], hint=HINT)
        event(f"{kind} steps recorded", graphs=len(self._replays), seconds=time.monotonic() - began)

    def _try_to_record(
        self, size: int, recorder: GraphRecorder, compute: Callable[[int], Tensor], prepare: Callable[[int], None]
    ) -> tuple[int, str]:
        """Returns the least state of all ranks, and why this rank cannot record the size."""
        attempt, replay = Attempt(), None
        with attempt:
            prepare(size)
            if self._ranks.size > 1:
                # A rank that runs out of memory in an operation of all ranks would leave the other ranks waiting. So
                # each rank first finds out alone whether it has the memory.
                with self._ranks.alone():
                    compute(size)
        state = self._ranks.least(attempt.state)
        if state == RECORDED:
            with attempt:
                replay = recorder.record(lambda: compute(size))
            state = self._ranks.least(attempt.state)
        if state == RECORDED and replay is not None:
            self._replays[size] = replay
        return state, attempt.why

    def padded(self, size: int) -> int | None:
        """Returns the least recorded size from `size` up; None: there is none."""
        index = bisect_left(self.sizes, size)
        return self.sizes[index] if index < len(self.sizes) else None

    def replay(self, size: int) -> Tensor:
        return self._replays[size]()


class Attempt:
    """Catches the error of a recording, and says what it means for the size."""

    def __init__(self) -> None:
        self.state = RECORDED
        self.why = "another rank cannot"

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, torch.distributed.DistError):
            return False
        cause = error.__context__ or error  # the end of a failed recording raises an error of its own
        if isinstance(error, InvalidatedCapture):
            self.state, self.why = INVALIDATED, str(error)
            return True
        self.state = NO_MEMORY if is_out_of_memory(cause) or is_out_of_memory(error) else REFUSED
        self.why = f"{type(cause).__name__}: {cause}".partition("\n")[0]
        return True


class DecodeSteps:
    """Computes decode steps, in which each row of `state` computes one token and samples."""

    def __init__(
        self,
        model: LoadedModel,
        memory: KVCache,
        state: DeviceState,
        sampler: StepSampler,
        recorder: GraphRecorder | None,
        result: Tensor | None,
        num_position_axes: int,
    ) -> None:
        """`recorder`: None if steps run without graphs. `result`: of all graphs; see `shared_result`."""
        self._model = model
        self._memory = memory
        self._state = state
        self._sampler = sampler
        self._result = result
        self._axes = num_position_axes
        self._slots = slots = state.rows.shape[0]
        self.graphs = Recordings(model, recorder, [*(rows for rows in padded_rows(slots) if rows < slots), slots])
        # Each line at an address of 16 bytes: kernels are compiled for that.
        self._numbers = torch.zeros((3 + num_position_axes, round_up(slots)), dtype=torch.int32, device=model.device)

    @torch.inference_mode()
    def prepare(self) -> None:
        self.graphs.record(self._compute, "decode")
        if not self.graphs:
            self._compute(1)  # compiles `advance`: no request waits for that

    def compute(self, rows: int) -> StepLogits:
        """Computes the first so many rows of the state."""
        size = self.graphs.padded(rows)
        logits = self._compute(rows) if size is None else self.graphs.replay(size)
        return StepLogits(logits, self._state.rows)

    def _compute(self, rows: int) -> Tensor:
        state = self._state
        slots = state.rows[:rows]
        ids, lengths, places = (numbers[:rows] for numbers in self._numbers[:3])
        positions = self._numbers[3:, :rows]
        max_short_prompt = self._model.max_short_prompt
        launcher.launch(
            kernels.advance, (-(-rows // 64),),
            slots, state.computed, state.table, state.tokens, state.params, ids, lengths, places, positions, rows,
            MAX_LENGTH if max_short_prompt is None else max_short_prompt, state.table.stride(0),
            state.tokens.stride(0), positions.stride(0), BLOCK=self._memory.block_size, AXES=self._axes, SIZE=64,
        )  # fmt: skip
        attention = CudaAttention(
            self._memory, state.table, places, RowTensors(slots, lengths, lengths), None, self._slots
        )
        hidden = self._model.hidden(attention, ids, positions[0] if self._axes == 1 else positions)
        logits = self._model.logits(hidden, None if self._result is None else self._result[:rows])
        self._sampler.sample(StepLogits(logits, slots))
        return logits


class MixedSteps:
    """Computes steps with chunks of prompts, in which all tokens come from the host."""

    def __init__(
        self,
        model: LoadedModel,
        memory: KVCache,
        state: DeviceState,
        sampler: StepSampler,
        recorder: GraphRecorder | None,
        result: Tensor | None,
        token_budget: int,
        queries: int,
        num_position_axes: int,
    ) -> None:
        """`result`: of all graphs; see `shared_result`. `queries`: tokens of an item of chunks."""
        self._model = model
        self._memory = memory
        self._state = state
        self._sampler = sampler
        self._result = result
        largest = min(token_budget, MAX_TOKENS)
        sizes = [*(size for size in padded_tokens() if size < largest), largest]
        slots = state.rows.shape[0]
        self.graphs = Recordings(model, recorder, sizes)
        self._layouts = {size: InputLayout(graph_sizes(size, slots, queries, num_position_axes)) for size in sizes}
        self._numbers = torch.empty(self._layouts[largest].size, dtype=torch.int32, device=model.device)

    @torch.inference_mode()
    def prepare(self) -> None:
        self.graphs.record(self._compute, "mixed", lambda size: self._write(size, EMPTY))

    def compute(self, step: StepInput) -> StepLogits:
        """Computes a step that is not larger than the largest graph."""
        size = self.graphs.padded(step.sizes.tokens)
        assert size is not None, "the step is larger than any graph"
        self._write(size, step.values)
        return StepLogits(self.graphs.replay(size), self._layouts[size].part(self._numbers, "sampled"))

    def _write(self, size: int, values: Mapping[str, Index | Ints]) -> None:
        layout = self._layouts[size]
        here = pinned(layout.size, self._numbers.device)
        layout.write(values, here.numpy())
        self._numbers[: layout.size].copy_(here, non_blocking=True)

    def _compute(self, size: int) -> Tensor:
        tensors = self._layouts[size].tensors(self._numbers, self._state, self._memory)
        hidden = self._model.hidden(tensors.attention, tensors.ids, tensors.positions)
        rows = tensors.last.shape[0]
        logits = self._model.logits(hidden[tensors.last], None if self._result is None else self._result[:rows])
        self._sampler.sample(StepLogits(logits, tensors.sampled))
        return logits


def shared_result(model: LoadedModel, slots: int) -> Tensor:
    """Returns memory for the logits of one step, to which all graphs write: else each graph would keep logits of its
    own, outside the memory that graphs share. A step reads its logits before the next step, in order of the stream."""
    return torch.empty((slots, model.vocab_size), dtype=model.logits_dtype, device=model.device)


def padded_rows(slots: int) -> list[int]:
    """Returns sizes from 1 to `slots` and above: every 8th, and beyond 256 sizes that pad by at most a sixteenth."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < slots:
        sizes.append(sizes[-1] + max(8, (1 << (sizes[-1].bit_length() - 1)) // 16))
    return sizes


def padded_tokens() -> list[int]:
    """Returns sizes that pad few tokens by more than an eighth."""
    sizes = [16, 32, 64, 96]
    while sizes[-1] < MAX_TOKENS:
        power = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + max(32, power // 8))
    return sizes
