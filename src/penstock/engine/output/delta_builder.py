"""The rows of a message to output processors, turned into the columns of a `Delta`, and outputs held for later ones."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from penstock.engine.protocol.columns import Index, LogprobRows
from penstock.engine.protocol.messages import (
    Began,
    Delta,
    Finished,
    FinishReason,
    Ints,
    Logprobs,
    Requests,
    Slots,
)
from penstock.engine.text.answer_text import Piece


class SampleEnd(NamedTuple):
    reason: FinishReason
    stop: int | str | None = None
    reasoning: int = 0  # ids of the sample's reasoning
    calls: int = 0  # tool calls in the chunks of the sample


class FinishedWithoutToken(NamedTuple):
    """A sample that ended without another id, with held output."""

    server: int
    request: int
    sample: int
    reason: FinishReason
    ids: list[int]
    text: bytes


class HeldOutput(NamedTuple):
    ids: list[int]
    texts: list[str]
    pieces: list[Piece]


class HeldOutputs:
    """Outputs of samples that wait for the end of an interval (`EngineConfig.stream_interval`), by slot."""

    def __init__(self) -> None:
        self._outputs: dict[int, HeldOutput] = {}

    def hold(self, slot: int, output: HeldOutput) -> None:
        """Adds an output to those that the slot has."""
        held = self._outputs.setdefault(slot, output)
        if held is not output:
            held.ids.extend(output.ids)
            held.texts.extend(output.texts)
            held.pieces.extend(output.pieces)

    def take(self, slot: int) -> HeldOutput:
        """Returns what the slot has, and forgets it."""
        return self._outputs.pop(slot, None) or HeldOutput([], [], [])


class DeltaBuilder:
    """The rows of samples that got an id each, for the columns of a Delta. Texts, ends and held ids are added later."""

    def __init__(self, slots: Index, ids: Ints, logprobs: LogprobRows | None) -> None:
        self.slots = slots
        self.ids = ids
        self.logprobs = logprobs
        self.texts: list[bytes] = []
        self.ends: dict[int, SampleEnd] = {}
        self.wrapped: list[int] = []  # rows with log-probabilities in their texts
        self.waiting: list[int] = []  # rows held back
        self.earlier: dict[int, list[int]] = {}  # held ids, by row

    def of(self, rows: Index) -> DeltaBuilder:
        """Returns a builder with these rows only."""
        selected = DeltaBuilder(
            self.slots[rows], self.ids[rows], None if self.logprobs is None else self.logprobs.of(rows)
        )
        numbers = rows.tolist()
        if self.texts:
            selected.texts = [self.texts[row] for row in numbers]
        if self.ends or self.wrapped or self.earlier:
            new = {row: number for number, row in enumerate(numbers)}
            selected.ends = {new[row]: end for row, end in self.ends.items() if row in new}
            selected.wrapped = [new[row] for row in self.wrapped if row in new]
            selected.earlier = {new[row]: ids for row, ids in self.earlier.items() if row in new}
        return selected

    def delta(
        self, requests: Requests, samples: Slots, without_token: list[FinishedWithoutToken], began: Began | None
    ) -> Delta:
        """Builds a Delta of these rows, followed by those that ended without a token."""
        texts, ids, counts = self.texts, self.ids, None
        logprobs = None if self.logprobs is None else self.logprobs.columns(self.wrapped)
        if without_token or self.earlier:
            groups = [[*self.earlier.get(row, ()), token_id] for row, token_id in enumerate(self.ids.tolist())]
            groups += [row.ids for row in without_token]
            counts = np.array([len(group) for group in groups], np.uint16)
            ids = np.fromiter(itertools.chain.from_iterable(groups), np.int32)
            if logprobs is not None:
                logprobs = _spread(logprobs, ids.size, np.cumsum(counts[: self.slots.size], dtype=np.intp) - 1)
        if without_token:
            requests = np.concatenate([requests, np.array([row.request for row in without_token], np.int32)])
            samples = np.concatenate([samples, np.array([row.sample for row in without_token], np.uint16)])
            texts = [*texts, *(row.text for row in without_token)]
        lengths = np.fromiter(map(len, texts), np.int32, len(texts))
        return Delta(
            len(texts),
            np.concatenate([requests, lengths, ids]),
            b"".join(texts),
            counts,
            samples if samples.any() else None,
            self._finished(without_token) if self.ends or without_token else None,
            logprobs,
            began,
        )

    def _finished(self, without_token: list[FinishedWithoutToken]) -> Finished:
        size, ended = self.slots.size, list(self.ends)
        reasons = [*(end.reason for end in self.ends.values()), *(row.reason for row in without_token)]
        stops = (*(end.stop for end in self.ends.values()), *[None] * len(without_token))
        reasoning = [*(end.reasoning for end in self.ends.values()), *[0] * len(without_token)]
        calls = [*(end.calls for end in self.ends.values()), *[0] * len(without_token)]
        return Finished(
            np.array([*ended, *range(size, size + len(without_token))], np.uint16),
            np.array(reasons, np.uint8),
            stops if any(stop is not None for stop in stops) else None,
            np.array(reasoning, np.int32) if any(reasoning) else None,
            np.array(calls, np.int32) if any(calls) else None,
        )


def _spread(logprobs: Logprobs, tokens: int, places: Index) -> Logprobs:
    """Returns the log-probabilities for more tokens, of which only the tokens at `places` have any."""
    counts, ranks = np.zeros(tokens, np.int32), np.zeros(tokens, np.int32)
    ranks[places] = logprobs.ranks
    if logprobs.counts is not None:
        counts[places] = logprobs.counts
    return Logprobs(logprobs.ids, logprobs.values, ranks, counts)
