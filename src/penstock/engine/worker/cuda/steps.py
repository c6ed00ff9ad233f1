"""The steps of a model on a CUDA device: from the batch to sampled ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.columns import Index
from penstock.engine.protocol.messages import Ints, Step
from penstock.engine.worker.cuda.attention import FEW_ROWS
from penstock.engine.worker.cuda.state import DeviceState, JoinedSample
from penstock.engine.worker.cuda.step_graphs import DecodeSteps, GraphRecorder, MixedSteps, shared_result
from penstock.engine.worker.cuda.step_input import EMPTY, InputLayout, InputSizes, StepInput, StepTensors, chunk_queries
from penstock.engine.worker.cuda.step_room import StepRoom
from penstock.engine.worker.cuda.step_sampler import StepLogits, StepSampler, TokenChooser
from penstock.engine.worker.input_batch import InputBatch, pinned
from penstock.engine.worker.lora import AdapterRun
from penstock.engine.worker.model import InputEmbeds, LoadedModel
from penstock.engine.worker.paged_attention import KVCache
from penstock.engine.worker.sampler import Sampler, is_penalized, seed_of


class StepSizes(NamedTuple):
    """The largest sizes of steps."""

    slots: int
    max_blocks: int  # of a request
    tokens: int
    num_position_axes: int

    def nbytes(self, block_size: int, vocabulary: int) -> int:
        """Returns the bytes of what the device keeps by slot."""
        state = DeviceState.nbytes(self.slots, self.max_blocks, block_size, vocabulary)
        return state + TokenChooser.nbytes(self.slots, vocabulary)


class AgreedShortage(torch.OutOfMemoryError):
    """A rank lacks memory for a step. All ranks raise this in the same step, before any operation of all ranks."""


class CudaSteps:
    def __init__(
        self,
        model: LoadedModel,
        memory: KVCache,
        recorder: GraphRecorder | None,
        sizes: StepSizes,
        sampler: Sampler | None,
    ) -> None:
        """`sampler`: of rank 0, for rows that kernels do not sample."""
        slots, max_blocks, tokens, axes = sizes
        samples = sampler is not None
        self.state = DeviceState(slots, max_blocks, memory.block_size, model.device, model.vocab_size, samples=samples)
        self._sampler = sampler
        self.sampler = StepSampler(self.state, model.ranks, sampler)
        self._model = model
        self._memory = memory
        self._queries = chunk_queries(memory, model.heads)
        self._sizes = sizes
        self._room = StepRoom(model, tokens, slots) if model.ranks.size > 1 else None
        self._shortage: torch.OutOfMemoryError | None = None  # of this rank, which the other ranks do not know
        self._has_joins = False  # for which the ranks have not agreed
        self.state.compile()
        self.sampler.compile(model.logits_dtype)
        self._compile()
        result = None if recorder is None else shared_result(model, slots)
        self._decode = DecodeSteps(model, memory, self.state, self.sampler, recorder, result, axes)
        self._mixed = MixedSteps(model, memory, self.state, self.sampler, recorder, result, tokens, self._queries, axes)
        self._mixed.prepare()  # first: decode steps share its memory
        self._decode.prepare()

    @torch.inference_mode()
    def _compile(self) -> None:
        """Compiles the kernels of steps that are no graphs, with images and without: no request waits for that."""
        for rows in {1, min(FEW_ROWS + 1, self._sizes.slots)}:
            sizes = InputSizes(rows + 2, rows, 1, 1, rows, self._sizes.num_position_axes)
            tensors = self._brought(sizes, EMPTY)
            self.compute(tensors, None)
            if self._model.deepstack_layers:  # its decoder runs the modules then
                embeds = self._model.embeds(tensors.ids)
                places = torch.arange(len(embeds), device=embeds.device)
                self.compute(tensors, InputEmbeds(embeds, places, (embeds,) * self._model.deepstack_layers))

    @staticmethod
    def is_decoding(batch: BatchState) -> bool:
        """Whether each row of the step computes one token and samples, or waits."""
        counts = batch.counts[batch.rows]
        return bool(counts.max() == 1 and counts.sum() == batch.sampled.size)

    def follow(self, step: Step) -> None:
        self.state.follow(step)
        self._has_joins |= step.joined is not None or step.resumed is not None

    def join(self, slot: int, batch: BatchState, text: Ints, rope_offsets: Index | Ints) -> None:
        """A sample joins. `text`: ids of its prompt that penalties count. `rope_offsets`: `EncoderCache.offsets`."""
        params, prompt, generated = batch.params[slot], batch.prompts[slot], batch.generated[slot]
        assert params is not None, "a slot has joined without parameters"
        seed, sample = int(batch.seeds[slot]), int(batch.samples[slot])
        is_outside = self.sampler.join(slot, params, prompt.size, has_grammar=slot in batch.grammars)
        if is_outside and self._sampler is not None:
            own = msgspec.structs.replace(params, logprobs=None)  # of these rows, too, `sampler` computes them
            try:
                self._sampler.join(slot, own, text, seed=seed, sample=sample, generated=generated)
            except torch.OutOfMemoryError as error:
                if self._room is None:
                    raise
                self._shortage = error  # the joins of other slots have operations of all ranks
        is_penalized_here = is_penalized(params) and not is_outside
        joined = JoinedSample(prompt, text, generated, params, is_penalized_here, seed_of(seed, sample), rope_offsets)
        self.state.join(slot, joined)

    def decode(self, batch: BatchState) -> StepLogits:
        """Computes a decode step."""
        rows = batch.sampled.size
        self.require_room(rows, is_recorded=self._decode.graphs.padded(rows) is not None)
        self.state.update(batch, batch.sampled, is_decoding=True)
        return self._decode.compute(rows)

    def is_recorded(self, input_batch: InputBatch) -> bool:
        """Whether there is a graph for a step with chunks of this size."""
        return self._mixed.graphs.padded(input_batch.slots.size) is not None

    def input_of(self, batch: BatchState, input_batch: InputBatch, positions: Index) -> StepInput:
        self.state.update(batch, batch.rows, is_decoding=False)
        return StepInput(input_batch, positions, batch.sampled, self._queries)

    def replay(self, step: StepInput) -> StepLogits:
        """Computes a step with chunks by a graph."""
        return self._mixed.compute(step)

    def tensors(self, step: StepInput) -> StepTensors:
        """Brings a step to the device that is computed without a graph."""
        return self._brought(step.sizes, step.values)

    def _brought(self, sizes: InputSizes, values: Mapping[str, Index | Ints]) -> StepTensors:
        layout = InputLayout(sizes)
        here = pinned(layout.size, self.state.table.device)
        layout.write(values, here.numpy())
        return layout.tensors(here.to(self.state.table.device, non_blocking=True), self.state, self._memory)

    def compute(
        self, tensors: StepTensors, embeds: InputEmbeds | None, runs: Sequence[AdapterRun] = ()
    ) -> tuple[StepLogits, Tensor]:
        """Computes a step without a graph. Returns hidden states of all tokens, too. `embeds`: of its tokens, instead
        of those of their ids."""
        hidden = self._model.hidden(tensors.attention, tensors.ids, tensors.positions, embeds, runs)
        result = StepLogits(self._model.logits(hidden[tensors.last]), tensors.sampled)
        self.sampler.sample(result)
        return result, hidden

    @staticmethod
    def is_agreed(error: Exception) -> bool:
        """Returns whether all ranks have this error in this step."""
        return isinstance(error, AgreedShortage)

    def require_room(
        self, tokens: int, *, is_recorded: bool = False, has_embeds: bool = False, likeliest: int | None = None
    ) -> None:
        """Raises AgreedShortage on all ranks unless each has the memory of a step: a rank that ran out of memory within
        a step would leave the other ranks waiting. A step by a graph needs memory for joins alone. `has_embeds`,
        `likeliest`: see `StepRoom`. All ranks call this alike."""
        if self._room is None or (is_recorded and not self._has_joins):
            return
        shortage, self._shortage = self._shortage, None
        nbytes = 0 if is_recorded else self._room.nbytes(tokens, has_embeds=has_embeds, likeliest=likeliest)
        nbytes += self.state.news_nbytes() if self._has_joins else 0
        if shortage is None:
            try:  # torch keeps what is freed here for the tensors of the step
                torch.empty(nbytes, dtype=torch.uint8, device=self._model.device)
            except torch.OutOfMemoryError as error:
                shortage = error
        self._has_joins = False
        if not self._model.ranks.least(int(shortage is None)):
            raise AgreedShortage(f"a rank has no {nbytes} bytes for a step") from shortage
