"""The steps of a model on a CUDA device: from the batch to logits."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.columns import Index
from penstock.engine.worker.cuda.state import DeviceState
from penstock.engine.worker.cuda.step_graphs import DecodeSteps, GraphRecorder, MixedSteps
from penstock.engine.worker.cuda.step_input import InputLayout, StepInput, StepTensors, chunk_queries
from penstock.engine.worker.input_batch import InputBatch, pinned
from penstock.engine.worker.model import InputEmbeds, LoadedModel
from penstock.engine.worker.paged_attention import KVCache


class StepLogits(NamedTuple):
    logits: Tensor  # valid until the next step
    slots: Tensor  # of each row


class CudaSteps:
    def __init__(
        self,
        model: LoadedModel,
        memory: KVCache,
        recorder: GraphRecorder | None,
        slots: int,
        max_blocks: int,
        token_budget: int,
        num_position_axes: int | None,
    ) -> None:
        """`max_blocks`: of a request. `num_position_axes`: of positions that the host brings; None: it brings none."""
        self.state = DeviceState(slots, max_blocks, memory.block_size, model.device)
        self._model = model
        self._memory = memory
        self._queries = chunk_queries(memory, model.heads)
        self.state.compile()
        self._decode = DecodeSteps(model, memory, self.state, recorder, num_position_axes)
        self._mixed = MixedSteps(
            model, memory, self.state, recorder, token_budget, self._queries, num_position_axes or 1
        )
        self._mixed.prepare()  # first: decode steps share its memory
        self._decode.prepare()

    @staticmethod
    def is_decoding(batch: BatchState) -> bool:
        """Whether each row of the step computes one token and samples, or waits."""
        counts = batch.counts[batch.rows]
        return bool(counts.max() == 1 and counts.sum() == batch.sampled.size)

    def decode(self, batch: BatchState, positions: Index | None) -> StepLogits:
        """Computes a decode step. `positions`: those that the host brings."""
        self.state.update(batch, batch.sampled, is_decoding=True)
        rows = batch.sampled.size
        return StepLogits(self._decode.logits(rows, positions), self.state.rows[:rows])

    def input_of(self, batch: BatchState, input_batch: InputBatch, positions: Index) -> StepInput:
        self.state.update(batch, batch.rows, is_decoding=False)
        return StepInput(input_batch, positions, batch.sampled, self._queries)

    def replay(self, step: StepInput) -> StepLogits | None:
        """Computes a step with chunks by a graph; None: there is none for it."""
        result = self._mixed.logits(step)
        return None if result is None else StepLogits(*result)

    def tensors(self, step: StepInput) -> StepTensors:
        """Brings a step to the device that is computed without a graph."""
        layout = InputLayout(step.sizes)
        here = pinned(layout.size, self.state.table.device)
        layout.write(step.values, here.numpy())
        return layout.tensors(here.to(self.state.table.device, non_blocking=True), self.state, self._memory)

    def compute(self, tensors: StepTensors, embeds: InputEmbeds | None) -> StepLogits:
        """Computes a step without a graph. `embeds`: of its tokens, instead of those of their ids."""
        hidden = self._model.hidden(tensors.attention, tensors.ids, tensors.positions, embeds)
        return StepLogits(self._model.logits(hidden[tensors.last]), tensors.sampled)
