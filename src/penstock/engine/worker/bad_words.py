"""Sequences of ids that an answer may not have, compared on the device of the sampler: no step waits for its ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from penstock.engine.protocol.messages import Ints
from penstock.engine.worker.input_batch import moved

ANY_ID, NO_ID = -1, -2


class BadWords:
    """The sequences of one answer, and the last ids of the answer."""

    def __init__(
        self, sequences: Sequence[Sequence[int]], vocabulary: int, generated: Ints, device: torch.device
    ) -> None:
        """Sequences with ids beyond the vocabulary cannot come, and are left out."""
        known = [ids for ids in sequences if all(0 <= token_id < vocabulary for token_id in ids)]
        width = max((len(ids) - 1 for ids in known), default=0)
        before = np.full((len(known), width), ANY_ID, np.int64)
        for row, ids in enumerate(known):
            before[row, width - len(ids) + 1 :] = ids[:-1]
        last = np.full(width, NO_ID, np.int64)
        if width:
            last[max(0, width - generated.size) :] = generated[-width:]
        self._before = moved(before, device)
        self._is_any = moved(before == ANY_ID, device)
        self._ends = moved(np.array([ids[-1] for ids in known], np.int64), device)
        self._last = moved(last, device)

    def add(self, token_id: torch.Tensor) -> None:
        """`token_id` [1]."""
        self._last = torch.cat([self._last, token_id.long()])[1:]

    def ban(self, logits: torch.Tensor) -> None:
        """Rules out the ids that would complete a sequence. `logits`: of the row, float32."""
        is_complete = (self._is_any | (self._before == self._last)).all(-1)
        banned = torch.zeros_like(self._ends, dtype=torch.float32).masked_fill(is_complete, -torch.inf)
        logits.index_put_((self._ends,), banned, accumulate=True)  # several sequences may have one end
