"""Samples the rows of a step on a CUDA device, as the last part of what is recorded.

Two kernels read each row's parameters by slot, so a graph holds for greedy and random rows, cuts and penalties. Rows
with biases, allowed ids, `min_tokens` or a grammar are sampled again after the step, by operations of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import WARNING
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from penstock.engine.cluster.logs import event
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.columns import Index
from penstock.engine.protocol.messages import FinishReason, SamplingParams
from penstock.engine.worker.cuda import launcher
from penstock.engine.worker.cuda.pending_step import STUCK, CudaPendingStep
from penstock.engine.worker.cuda.sampling import GROUP, MAX_KEPT, finish, scan
from penstock.engine.worker.cuda.state import DeviceState
from penstock.engine.worker.grammars import TokenMasks
from penstock.engine.worker.input_batch import moved
from penstock.engine.worker.prompt_logprobs import PendingPromptLogprobs
from penstock.engine.worker.sampler import Sampler, TopLogprobs, has_ids, is_penalized
from penstock.engine.worker.tensor_parallel import TPGroup

FEW_SAMPLED = 8  # up to here, more programs share a row
SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


class StepLogits(NamedTuple):
    """Logits of the rows that sample, and their slots on the device, valid until the next step."""

    logits: Tensor
    slots: Tensor


class TokenChooser:
    """Chooses ids by the kernels. Steps share scratch memory and run in turn."""

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self._groups = triton.next_power_of_2(triton.cdiv(state.vocabulary, GROUP.value))
        self._width = 3 * self._groups + MAX_KEPT.value
        rows = state.rows.shape[0]
        self._scratch = torch.empty((rows, self._width), dtype=torch.float32, device=state.rows.device)

    @staticmethod
    def nbytes(rows: int, vocabulary: int) -> int:
        groups = int(triton.next_power_of_2(triton.cdiv(vocabulary, GROUP.value)))
        return 4 * rows * (3 * groups + int(MAX_KEPT.value))

    def choose(self, logits: Tensor, slots: Tensor, out: Tensor) -> None:
        """Writes an id for each row to `out` [rows, 2] (int32), and whether the row has failed. Padding has slot -1."""
        state, rows = self._state, logits.shape[0]
        sizes = {"GROUPS": self._groups, "WIDTH": self._width, "enable_fp_fusion": False}
        n, stride = state.vocabulary, logits.stride(0)
        groups_of_program, warps = (8, 4) if rows <= FEW_SAMPLED else (32, 8)
        grid = triton.cdiv(triton.cdiv(n, GROUP.value), groups_of_program), rows
        launcher.launch(
            scan, grid, logits, slots, state.params, state.counts, self._scratch, n, stride,
            S=groups_of_program, num_warps=warps, **sizes,
        )  # fmt: skip
        launcher.launch(
            finish, (rows,), logits, slots, state.params, state.counts, state.computed, self._scratch, out, n, stride,
            SHIFT=SHIFTS[logits.dtype], num_warps=16, **sizes,
        )  # fmt: skip


class StepSampler:
    """Samples on rank 0, and brings the ids to all ranks. Every rank knows the rows that are sampled after a step."""

    def __init__(self, state: DeviceState, ranks: TPGroup, sampler: Sampler | None) -> None:
        """`sampler`: of rank 0, for the rows that kernels do not sample."""
        slots = state.rows.shape[0]
        self._state = state
        self._ranks = ranks
        self._sampler = sampler
        self._chooser = None if sampler is None else TokenChooser(state)
        self._out = torch.zeros((slots, 2), dtype=torch.int32, device=state.rows.device)
        self._prompt_sizes = np.zeros(slots, np.int32)
        self._after = np.zeros(slots, np.int32)  # tokens before which a row is sampled after the step
        self._logprobs = np.zeros(slots, np.int32)  # 1 + the number of top log-probabilities; 0: none are wanted
        self.num_outside = 0  # rows that were sampled after a step

    def compile(self, dtype: torch.dtype) -> None:
        """Compiles the kernels for logits of a type: the compiler takes seconds, and no step waits for the compiler."""
        for rows in {1, min(FEW_SAMPLED + 1, self._out.shape[0])}:
            logits = self._out.new_zeros((rows, self._state.vocabulary), dtype=dtype)
            self.sample(StepLogits(logits, torch.full_like(self._out[:rows, 0], -1)))

    def join(self, slot: int, params: SamplingParams, prompt_size: int, *, has_grammar: bool = False) -> bool:
        """A sample joins. Returns whether the sampler needs the sample, too, for rows that are sampled after steps."""
        is_outside = has_ids(params) or has_grammar
        is_outside_for_good = is_outside and (
            has_grammar
            or params.allowed_token_ids is not None
            or bool(params.logit_bias or params.bad_words_ids)
            or is_penalized(params)
        )
        self._prompt_sizes[slot] = prompt_size
        self._after[slot] = np.iinfo(np.int32).max if is_outside_for_good else params.min_tokens
        self._logprobs[slot] = 0 if params.logprobs is None else min(params.logprobs, self._state.vocabulary) + 1
        return is_outside

    def sample(self, result: StepLogits) -> None:
        """Samples all rows, within a step."""
        out = self._out[: result.slots.shape[0]]
        if not out.shape[0]:
            return
        if self._chooser is not None:
            self._chooser.choose(result.logits, result.slots, out)
        self._ranks.broadcast(out)
        self._state.store(out, result.slots)

    def finish(
        self,
        result: StepLogits,
        batch: BatchState,
        failed: dict[int, FinishReason],
        masks: TokenMasks | None = None,
        prompts: tuple[PendingPromptLogprobs, ...] = (),
        release: Callable[[], object] = lambda: None,
    ) -> CudaPendingStep:
        """Samples the rows that kernels do not, after a step. `failed`: slots that failed in it. `masks`: of grammars,
        on rank 0. `prompts`: their copies to the host are queued. `release`: see `CudaPendingStep`."""
        slots = batch.sampled
        out = self._out[: slots.size]
        outside = np.flatnonzero(batch.computed[slots] - self._prompt_sizes[slots] < self._after[slots])
        if outside.size:
            if not self.num_outside:
                event(
                    "rows are sampled after their steps",
                    why="logit_bias, bad_words, allowed_token_ids, min_tokens or grammars",
                )
            self.num_outside += outside.size
            self._sample_outside(result, out, outside, slots, masks)
        asking = np.flatnonzero(self._logprobs[slots])
        likely = None
        if asking.size and self._sampler is not None:
            with self._surviving(out):
                where = moved(asking, out.device)
                likely = TopLogprobs.of(result.logits[where], out[where, 0], asking, self._logprobs[slots[asking]])
        failed = failed if masks is None else {**failed, **masks.failed}
        return CudaPendingStep(out, slots, likely, failed, prompts, release)

    def _sample_outside(
        self, result: StepLogits, out: Tensor, outside: Index, slots: Index, masks: TokenMasks | None
    ) -> None:
        if self._sampler is not None:
            with self._surviving(out):
                where = moved(outside, out.device)
                if masks is not None:  # rows with a grammar are among those outside
                    masks = masks._replace(rows=np.searchsorted(outside, masks.rows))
                chosen = self._sampler.sample(result.logits[where], slots[outside], masks)
                is_failed = out[where, 1] | chosen.is_failed
                if chosen.is_stuck is not None:
                    is_failed = is_failed.masked_fill(chosen.is_stuck, STUCK)
                out[where] = torch.stack((chosen.ids.masked_fill(is_failed != 0, 0), is_failed), 1)
        self._ranks.broadcast(out)
        self._state.store(out, result.slots[: slots.size])

    @contextmanager
    def _surviving(self, out: Tensor) -> Iterator[None]:
        """Fails all rows of the step if rank 0 runs out of memory in the block: the other ranks go on with the step,
        and wait for rank 0. A rank alone raises the error."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if self._ranks.size == 1:
                raise
            event("out of memory", WARNING, requests=out.shape[0], why=str(error).partition("\n")[0])
            out[:, 0] = 0
            out[:, 1] = 1
