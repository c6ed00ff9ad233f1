"""Log-probabilities of the tokens of prompts, computed chunk by chunk beside the step that computes the chunk."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
from torch import Tensor

from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.messages import Ints, Logprobs, PromptLogprobs
from penstock.engine.worker.input_batch import InputBatch, moved
from penstock.engine.worker.model import LoadedModel
from penstock.engine.worker.sampler import TopLogprobs

MAX_ROWS = 64  # of logits at a time: 39 MB with 152,000 ids, and as much again for each of three temporaries


class PendingPromptLogprobs(NamedTuple):
    """Log-probabilities of a part of a prompt. Of a CUDA device, they are there when the step is done."""

    slot: int
    position: int  # of the first token
    parts: list[TopLogprobs]  # on the host

    def result(self) -> PromptLogprobs:
        columns = [part.columns(part.rows.size) for part in self.parts]
        names = ("ids", "values", "ranks", "counts")
        joined = (np.concatenate([getattr(part, name) for part in columns]) for name in names)
        return PromptLogprobs(self.slot, self.position, Logprobs(*joined))


class PromptScorer:
    """Knows the samples that want log-probabilities of their prompts. Every rank computes logits, rank 0 uses them."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self.slots: dict[int, int] = {}  # 1 + the number of likeliest ids, by slot. Empty: no sample wants any

    def join(self, slot: int, likeliest: int) -> None:
        self.slots[slot] = 1 + min(likeliest, self._model.vocab_size)

    def leave(self, slots: Collection[int]) -> None:
        for slot in slots:
            self.slots.pop(slot, None)

    def likeliest(self, input_batch: InputBatch, batch: BatchState) -> int | None:
        """Returns the most likeliest ids that a prompt wants of which the step computes a part; None: no prompt with
        log-probabilities is among them."""
        due = [self.slots[slot] - 1 for _, slot, targets in self._due(input_batch, batch) if targets.size]
        return max(due, default=None)

    def _due(self, input_batch: InputBatch, batch: BatchState) -> Iterator[tuple[int, int, Ints]]:
        """Yields row, slot and the prompt's tokens that follow those of the step."""
        for row, slot in enumerate(input_batch.rows.tolist()):
            if slot in self.slots:
                end = int(batch.computed[slot])
                yield row, slot, batch.prompts[slot][end - int(input_batch.counts[row]) + 1 : end + 1]

    def score(
        self, input_batch: InputBatch, batch: BatchState, hidden: Tensor, *, is_used: bool
    ) -> tuple[PendingPromptLogprobs, ...]:
        """Returns the log-probabilities of the tokens that follow those of the step in their prompts. `is_used`: False
        on other ranks than 0, where the result is empty."""
        entries = []
        for row, slot, targets in self._due(input_batch, batch):
            if not targets.size:
                continue
            start = int(input_batch.starts[row])
            parts = [
                self._part(hidden[start + at : start + at + MAX_ROWS], targets[at : at + MAX_ROWS], self.slots[slot])
                for at in range(0, targets.size, MAX_ROWS)
            ]
            position = int(batch.computed[slot] - input_batch.counts[row]) + 1
            entries.append(PendingPromptLogprobs(slot, position, parts))
        return tuple(entries) if is_used else ()

    def _part(self, hidden: Tensor, ids: Ints, count: int) -> TopLogprobs:
        logits = self._model.logits(hidden[: ids.size])
        rows, counts = np.arange(ids.size), np.full(ids.size, count, np.int32)
        return TopLogprobs.of(logits, moved(ids.astype(np.int64), logits.device), rows, counts).on_host()
