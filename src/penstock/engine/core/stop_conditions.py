"""Which id or length ends a sample. The core tells output processors, which find the ends by a stop string."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import numpy as np

from penstock.engine._native import count_tokens
from penstock.engine.protocol.columns import Index
from penstock.engine.protocol.messages import Ended, FinishReason, Ints, SamplingParams

BUCKETS = 1 << 14  # stop ids are looked up by their low bits first, which few ids share


class StopConditions:
    """How many tokens each slot has generated, and when its sample ends. Arrays are by slot."""

    def __init__(self, slots: int, max_model_len: int, eos_ids: Collection[int]) -> None:
        """`eos_ids` end every sample that does not ignore them; `max_model_len` is for prompt and answer together."""
        self.generated = np.zeros(slots, np.int32)
        self.has_ended = np.ones(slots, np.bool_)  # free slots too: ids sampled there are discarded
        self.limits = np.zeros(slots, np.int32)  # tokens that the sample generates at most
        self._least = np.zeros(slots, np.int32)  # min_tokens
        self._stops: list[frozenset[int]] = [frozenset()] * slots
        self._heeds_eos = np.zeros(slots, np.bool_)
        self._max_model_len = max_model_len
        self._eos_ids = frozenset(eos_ids)
        self._users: Counter[int] = Counter()  # how many slots would end by an id of this bucket, where any would
        self._marks = np.zeros(BUCKETS // 8, np.uint8)  # a bit for each bucket that is used: 2 KB stay at hand
        for token in self._eos_ids:
            self._use(token % BUCKETS, 1)

    def join(self, slot: int, params: SamplingParams, prompt_length: int, generated: int = 0) -> None:
        """`generated`: tokens before the sample was resumed. Raises ValueError where the model has no
        room for a single token after this prompt."""
        room = self._max_model_len - prompt_length
        if room < 1:
            raise ValueError(
                f"expected a prompt of less than {self._max_model_len} tokens, as many as fit the model with an "
                f"answer, got {prompt_length}"
            )
        self._forget_stops(slot)
        self.generated[slot] = generated
        self.has_ended[slot] = False
        self.limits[slot] = room if params.max_tokens is None else min(room, params.max_tokens)
        self._least[slot] = params.min_tokens
        self._heeds_eos[slot] = not params.ignore_eos
        self._stops[slot] = frozenset(params.stop_token_ids)
        for token in self._stops[slot]:
            self._use(token % BUCKETS, 1)

    def leave(self, slot: int) -> None:
        self._forget_stops(slot)
        self.has_ended[slot] = True

    def end(self, slot: int) -> None:
        """Ends the sample for another reason: ids sampled for it from now on are discarded."""
        self.has_ended[slot] = True

    def may_stop(self, slot: int) -> bool:
        """Returns whether the token counted last may end the sample: `min_tokens` have come before."""
        return bool(self.generated[slot] > self._least[slot])

    def check(self, slots: Index, ids: Ints) -> list[Ended]:
        """Counts one more token of each slot, without duplicates. Returns and marks the samples that end.

        An id ends a sample only after `min_tokens` ids; the sampler does not choose end ids before. Ended slots are
        skipped.
        """
        rows = count_tokens(self.generated, self.limits, self._marks, slots, ids)
        if rows is None:
            return []
        ended: list[Ended] = []
        for slot, token in zip(slots[rows].tolist(), ids[rows].tolist(), strict=True):
            if self.has_ended[slot]:
                continue
            reason, stop = None, None
            if self.may_stop(slot):
                if token in self._eos_ids and self._heeds_eos[slot]:
                    reason = FinishReason.STOP
                elif token in self._stops[slot]:
                    reason, stop = FinishReason.STOP, token
            if reason is None and self.generated[slot] >= self.limits[slot]:
                reason = FinishReason.LENGTH
            if reason is not None:
                self.has_ended[slot] = True
                ended.append(Ended(slot, reason, stop))
        return ended

    def _forget_stops(self, slot: int) -> None:
        for token in self._stops[slot]:
            self._use(token % BUCKETS, -1)
        self._stops[slot] = frozenset()

    def _use(self, bucket: int, by: int) -> None:
        self._users[bucket] += by
        bit = 1 << bucket % 8
        if self._users[bucket]:
            self._marks[bucket // 8] |= bit
        else:
            self._marks[bucket // 8] &= ~bit & 0xFF
