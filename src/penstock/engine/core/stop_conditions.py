"""Which id or length ends a sample. Output processors are told so; they find what ends a sample by its text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from penstock.engine._native import count_tokens
from penstock.engine.protocol.columns import Index
from penstock.engine.protocol.messages import Bytes, FinishReason, Ints, SamplingParams

BUCKETS = 1 << 14  # stop ids are looked up by their low bits first: few other ids share them


class EndedSample(NamedTuple):
    """The samples that ended, one row each."""

    rows: Index  # where in the columns that were given, ascending
    reasons: Bytes  # FinishReason
    stops: list[int | None]  # the one of its `stop_token_ids` that ended it; None: the model's own end id, or a length


NONE_ENDED = EndedSample(np.zeros(0, np.intp), np.zeros(0, np.uint8), [])


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
        for one in self._eos_ids:
            self._use(one % BUCKETS, 1)

    def join(self, slot: int, params: SamplingParams, prompt_length: int) -> None:
        """Raises ValueError where the model has no room for a single token after this prompt."""
        room = self._max_model_len - prompt_length
        if room < 1:
            raise ValueError(
                f"expected a prompt of less than {self._max_model_len} tokens, as many as fit the model with an "
                f"answer, got {prompt_length}"
            )
        self._forget_stops(slot)
        self.generated[slot] = 0
        self.has_ended[slot] = False
        self.limits[slot] = room if params.max_tokens is None else min(room, params.max_tokens)
        self._least[slot] = params.min_tokens
        self._heeds_eos[slot] = not params.ignore_eos
        self._stops[slot] = frozenset(params.stop_token_ids)
        for one in self._stops[slot]:
            self._use(one % BUCKETS, 1)

    def leave(self, slot: int) -> None:
        self._forget_stops(slot)
        self.has_ended[slot] = True

    def end(self, slot: int) -> None:
        """Ends the sample for a reason that is not found here: ids sampled for it from now on are discarded."""
        self.has_ended[slot] = True

    def may_stop(self, slot: int) -> bool:
        """Returns whether the token counted last may end the sample: `min_tokens` have come before."""
        return bool(self.generated[slot] > self._least[slot])

    def check(self, slots: Index, ids: Ints) -> EndedSample:
        """Counts one more token of each slot, none of them twice. Returns the samples that end with it, and marks them.

        An id ends a sample only after `min_tokens` others; so the sampler does not choose it before. Slots that have
        ended already are skipped.
        """
        rows = count_tokens(self.generated, self.limits, self._marks, slots, ids)
        if rows is None:
            return NONE_ENDED
        ended: list[int] = []
        reasons: list[int] = []
        stops: list[int | None] = []
        for row, slot, one in zip(rows.tolist(), slots[rows].tolist(), ids[rows].tolist(), strict=True):
            if self.has_ended[slot]:
                continue
            stop = None
            reason = FinishReason.LENGTH
            if self.may_stop(slot):
                if one in self._eos_ids and self._heeds_eos[slot]:
                    reason = FinishReason.STOP
                elif one in self._stops[slot]:
                    reason, stop = FinishReason.STOP, one
            if reason == FinishReason.STOP or self.generated[slot] >= self.limits[slot]:
                self.has_ended[slot] = True
                ended.append(row)
                reasons.append(int(reason))
                stops.append(stop)
        return EndedSample(np.array(ended, np.intp), np.array(reasons, np.uint8), stops)

    def _forget_stops(self, slot: int) -> None:
        for one in self._stops[slot]:
            self._use(one % BUCKETS, -1)
        self._stops[slot] = frozenset()

    def _use(self, bucket: int, by: int) -> None:
        self._users[bucket] += by
        bit = 1 << bucket % 8
        if self._users[bucket]:
            self._marks[bucket // 8] |= bit
        else:
            self._marks[bucket // 8] &= ~bit & 0xFF
