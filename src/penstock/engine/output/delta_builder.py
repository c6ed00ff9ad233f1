"""What is said of the rows of a step: gathered by row, and put into the columns of a `Delta`.

Leaves to `output_state` what is said.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.engine.protocol.columns import Index, LogprobRows
from penstock.engine.protocol.messages import Delta, Finished, FinishReason, Ints, Requests, Slots


class SampleEnd(NamedTuple):
    reason: FinishReason
    stop: int | str | None = None


class FinishedWithoutToken(NamedTuple):
    """A sample that ended without another id."""

    server: int
    request: int
    sample: int
    cached: int
    reason: FinishReason


class DeltaBuilder:
    """Of samples that got an id each. A row's text and end are said later."""

    def __init__(self, slots: Index, ids: Ints, logprobs: LogprobRows | None) -> None:
        self.slots = slots
        self.ids = ids
        self.logprobs = logprobs
        self.texts: list[bytes] = []
        self.ends: dict[int, SampleEnd] = {}
        self.wrapped: list[int] = []  # rows with log-probabilities in their texts

    def of(self, rows: Index) -> DeltaBuilder:
        """These rows alone."""
        its = DeltaBuilder(self.slots[rows], self.ids[rows], None if self.logprobs is None else self.logprobs.of(rows))
        numbers = rows.tolist()
        if self.texts:
            its.texts = [self.texts[row] for row in numbers]
        if self.ends or self.wrapped:
            new = {row: number for number, row in enumerate(numbers)}
            its.ends = {new[row]: end for row, end in self.ends.items() if row in new}
            its.wrapped = [new[row] for row in self.wrapped if row in new]
        return its

    def delta(self, requests: Requests, samples: Slots, cached: Ints, silent: list[FinishedWithoutToken]) -> Delta:
        """With the columns of these rows; those of the silent ones come after them."""
        size = self.slots.size
        lengths = np.fromiter(map(len, self.texts), np.int32, size)
        counts = None
        if silent:
            none = np.zeros(len(silent), np.int32)
            requests = np.concatenate([requests, np.array([row.request for row in silent], np.int32)])
            lengths = np.concatenate([lengths, none])
            samples = np.concatenate([samples, np.array([row.sample for row in silent], np.uint16)])
            counts = np.concatenate([np.ones(size, np.uint16), none.astype(np.uint16)])
        return Delta(
            size + len(silent),
            np.concatenate([requests, lengths, self.ids]),
            b"".join(self.texts),
            counts,
            samples if samples.any() else None,
            self._finished(cached, silent) if self.ends or silent else None,
            None if self.logprobs is None else self.logprobs.columns(self.wrapped),
        )

    def _finished(self, cached: Ints, silent: list[FinishedWithoutToken]) -> Finished:
        size, ended = self.slots.size, list(self.ends)
        reasons = [*(end.reason for end in self.ends.values()), *(row.reason for row in silent)]
        stops = (*(end.stop for end in self.ends.values()), *[None] * len(silent))
        its_cached = np.concatenate([cached[ended], np.array([row.cached for row in silent], np.int32)])
        return Finished(
            np.array([*ended, *range(size, size + len(silent))], np.uint16),
            np.array(reasons, np.uint8),
            stops if any(stop is not None for stop in stops) else None,
            its_cached if its_cached.any() else None,
        )
