"""Splits a Delta, which has columns of many requests, into one OutputChunk for each row.

The client passes each chunk to the stream of its request.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

from penstock.engine.client.stream import OutputChunk
from penstock.engine.protocol.messages import Delta, FinishReason, Logprobs


def split_delta(delta: Delta) -> Iterator[tuple[int, OutputChunk]]:
    """Yields the request number and the chunk of each row."""
    rows = delta.rows
    numbers = delta.numbers.tolist()
    counts = repeat(1, rows) if delta.counts is None else delta.counts.tolist()
    samples = repeat(0, rows) if delta.samples is None else delta.samples.tolist()
    text = bytes(delta.text)
    text_at, at = 0, 2 * rows
    splitter = None if delta.logprobs is None else _LogprobsSplitter(delta.logprobs, len(numbers) - at)
    chunks: list[tuple[int, OutputChunk]] = []
    for request, nbytes, count, sample in zip(numbers[:rows], numbers[rows:at], counts, samples, strict=True):
        piece = OutputChunk(sample, text[text_at : text_at + nbytes], numbers[at : at + count])
        if splitter is not None:
            piece.logprobs = splitter.next(count)
        chunks.append((request, piece))
        text_at += nbytes
        at += count
    if delta.finished is not None:
        finished = delta.finished
        for end, (row, reason) in enumerate(zip(finished.rows.tolist(), finished.reasons.tolist(), strict=True)):
            piece = chunks[row][1]
            piece.reason = FinishReason(reason)
            piece.stop = None if finished.stops is None else finished.stops[end]
            piece.cached = 0 if finished.cached is None else int(finished.cached[end])
    return iter(chunks)


class _LogprobsSplitter:
    """Splits the log-probabilities of a Delta into those of its rows, in order."""

    def __init__(self, whole: Logprobs, tokens: int) -> None:
        self._whole = whole
        self._each = whole.ids.size // tokens if whole.counts is None and tokens else 0
        self._token = self._at = 0

    def next(self, tokens: int) -> Logprobs:
        whole, token, at = self._whole, self._token, self._at
        self._token += tokens
        counts = None if whole.counts is None else whole.counts[token : self._token]
        self._at += tokens * self._each if counts is None else int(counts.sum())
        entries, ranks = slice(at, self._at), whole.ranks[token : self._token]
        return Logprobs(whole.ids[entries], whole.values[entries], ranks, counts)
