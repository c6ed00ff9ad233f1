"""Log-probabilities of the tokens of prompts, computed chunk by chunk beside the step that computes the chunk."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.messages import Ints, Logprobs, PromptLogprobs
from penstock.engine.worker.input_batch import InputBatch
from penstock.engine.worker.model import LoadedModel
from penstock.engine.worker.sampler import TopLogprobs

MAX_ROWS = 64  # of logits at a time: 39 MB with 152,000 ids, and as much again for each of three temporaries


class PromptScorer:
    """Knows the samples that want log-probabilities of their prompts. Every rank computes logits, rank 0 uses them."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._slots: dict[int, int] = {}  # 1 + the number of likeliest ids, by slot

    def join(self, slot: int, batch: BatchState) -> None:
        """A sample joins. A resumed sample that has generated ids has delivered its log-probabilities."""
        params = batch.params[slot]
        if params is None or params.prompt_logprobs is None or batch.generated[slot].size:
            self._slots.pop(slot, None)
        else:
            self._slots[slot] = 1 + min(params.prompt_logprobs, self._model.vocab_size)

    def leave(self, slots: Collection[int]) -> None:
        for slot in slots:
            self._slots.pop(slot, None)

    def score(
        self, input_batch: InputBatch, batch: BatchState, hidden: Tensor, *, is_used: bool
    ) -> tuple[PromptLogprobs, ...]:
        """Returns the log-probabilities of the tokens that follow those of the step in their prompts. `is_used`: False
        on other ranks than 0, where the result is empty."""
        if not self._slots:
            return ()
        entries = []
        for row, slot in enumerate(input_batch.rows.tolist()):
            count = self._slots.get(slot)
            end = int(batch.computed[slot])
            begin = end - int(input_batch.counts[row])
            targets = batch.prompts[slot][begin + 1 : end + 1]
            if count is None or not targets.size:
                continue
            start = int(input_batch.starts[row])
            parts = [
                self._columns(hidden[start + at : start + at + MAX_ROWS], targets[at : at + MAX_ROWS], count)
                for at in range(0, targets.size, MAX_ROWS)
            ]
            entries.append(PromptLogprobs(slot, begin + 1, _joined(parts)))
        return tuple(entries) if is_used else ()

    def _columns(self, hidden: Tensor, ids: Ints, count: int) -> Logprobs:
        logits = self._model.logits(hidden[: ids.size])
        rows = np.arange(ids.size)
        counts = np.full(ids.size, count, np.int32)
        return TopLogprobs.of(logits, torch.from_numpy(ids.astype(np.int64)), rows, counts).columns(ids.size)


def _joined(parts: list[Logprobs]) -> Logprobs:
    if len(parts) == 1:
        return parts[0]
    columns = ([getattr(part, name) for part in parts] for name in ("ids", "values", "ranks", "counts"))
    return Logprobs(*map(np.concatenate, columns))
