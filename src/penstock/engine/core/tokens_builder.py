"""Gathers the new samples, ids and ends of a step, in one `Tokens` message for each output processor.

The scheduler says what happens to each sample, and `engine_core` sends the messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.engine.core.request import Sample
from penstock.engine.protocol.columns import NOTHING, Index, LogprobRows
from penstock.engine.protocol.messages import CONTEXT, Ended, Ints, Logprobs, Started, Tokens


class TokensBuilder:
    """Collects what is due to each output processor: number r modulo `outputs` has the samples of request r."""

    def __init__(self, slots: int, outputs: int) -> None:
        self._outputs = range(outputs)
        self._output_of = np.zeros(slots, np.uint8)  # by slot
        self._started: list[list[Started]] = [[] for _ in self._outputs]
        self._aborted: list[list[int]] = [[] for _ in self._outputs]
        self._slots: list[Index | None] = [None for _ in self._outputs]  # of the last message with ids

    def start(self, sample: Sample, slot: int) -> None:
        output = sample.request.number % len(self._outputs)
        self._output_of[slot] = output
        self._started[output].append(_started(slot, sample))

    def abort(self, slot: int) -> None:
        """Records that the slot's sample has ended without another token."""
        self._aborted[self._output_of[slot]].append(slot)

    def forget(self, output: int) -> None:
        """Drops what is due to an output processor: its next life knows no slot."""
        self._started[output].clear()
        self._aborted[output].clear()
        self._slots[output] = None

    def build_started(self) -> list[tuple[int, Tokens]]:
        """Returns pairs of an output processor and its message, of those with new samples."""
        return [(output, self._build(output, NOTHING)) for output in self._outputs if self._started[output]]

    def build(
        self, slots: Index, ids: Ints, rows: Index | None, logprobs: Logprobs | None, ended: Sequence[Ended]
    ) -> list[tuple[int, Tokens]]:
        """Returns pairs of an output processor and its message, of those with something new. `rows`: which of the ids
        belong to samples that had not ended before; None: all."""
        if rows is not None:
            logprobs = _logprobs_of(rows, logprobs, slots.size)
            slots, ids = slots[rows], ids[rows]
        if len(self._outputs) == 1:
            is_new = bool(ids.size or ended or self._aborted[0])
            return [(0, self._build(0, ids, slots, logprobs, ended))] if is_new else []
        messages = []
        output_of = self._output_of[slots]
        for output in self._outputs:
            own_rows = np.flatnonzero(output_of == output)
            own_ends = [end for end in ended if self._output_of[end.slot] == output]
            if own_rows.size or own_ends or self._aborted[output]:
                own_logprobs = _logprobs_of(own_rows, logprobs, slots.size)
                messages.append((output, self._build(output, ids[own_rows], slots[own_rows], own_logprobs, own_ends)))
        return messages

    def _build(
        self,
        output: int,
        ids: Ints,
        slots: Index | None = None,
        logprobs: Logprobs | None = None,
        ended: Sequence[Ended] = (),
    ) -> Tokens:
        new_slots = None
        if ids.size and slots is not (before := self._slots[output]):
            self._slots[output] = slots
            assert slots is not None
            if before is None or not np.array_equal(slots, before):
                new_slots = slots.astype(np.uint16)
        tokens = Tokens(
            ids, new_slots, logprobs, tuple(self._aborted[output]), tuple(self._started[output]), tuple(ended)
        )
        self._aborted[output].clear()
        self._started[output].clear()
        return tokens


def _logprobs_of(rows: Index, logprobs: Logprobs | None, size: int) -> Logprobs | None:
    columns = LogprobRows.read(logprobs, size)
    return None if columns is None else columns.of(rows).columns([])


def _started(slot: int, sample: Sample) -> Started:
    request = sample.request
    context = tuple(request.prompt[-CONTEXT:].tolist())
    return Started(
        slot,
        request.number,
        request.params,
        context,
        request.chunk_format,
        request.server,
        sample.index,
        request.cached,
        tuple(sample.generated.tolist()),
    )
