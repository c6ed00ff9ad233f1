"""What each server process has done: a row of numbers in shared memory, which any of them shows for all.

Each number is one word with one writer, as on the engine's board; a server that is started again goes on with its row.
Leaves to `metrics` how they are told.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import penstock

ROUTES = ("chat", "completions", "tokenize", "models")
STATUSES = (200, 400, 401, 404, 413, 422, 429, 499, 500, 503, 504)  # 499: the client has gone
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
WORD_NBYTES = 8


class Latency:
    """How often something took how long: words for each of SECONDS, for more, and for the sum in ns."""

    WORDS = len(SECONDS) + 2

    def __init__(self, words: Any, begin: int) -> None:
        self._words = words
        self._begin = begin

    def add(self, seconds: float, times: int = 1) -> None:
        words = self._words
        words[self._begin + bisect_left(SECONDS, seconds)] += times
        words[self._begin + len(SECONDS) + 1] += int(seconds * 1e9) * times

    @property
    def counts(self) -> list[int]:
        """For each of SECONDS, and for more."""
        return [int(one) for one in self._words[self._begin : self._begin + len(SECONDS) + 1]]

    @property
    def seconds(self) -> float:
        return float(self._words[self._begin + len(SECONDS) + 1]) / 1e9


class Row:
    """Of one server process: `row[Row.OPEN] += 1`."""

    PID = 0
    SERVING = 1  # 1: it takes connections; 2: no more, and it answers what is open
    OPEN = 2  # requests
    PROMPT_TOKENS = 3
    CACHED_TOKENS = 4
    COMPLETION_TOKENS = 5
    FAILED_STARTS = 6  # in a row: how often this server has ended before it served. The launcher's
    ANSWERED = 8  # from here on: by route and status
    LATENCIES = ANSWERED + len(ROUTES) * len(STATUSES)
    WORDS = LATENCIES + 3 * Latency.WORDS

    def __init__(self, words: Any) -> None:
        self._words = words
        first, between, whole = (self.LATENCIES + place * Latency.WORDS for place in range(3))
        self.first = Latency(words, first)  # from a request to the first piece of its answer
        self.between = Latency(words, between)  # one token and the next
        self.whole = Latency(words, whole)

    def __getitem__(self, word: int) -> int:
        number: int = self._words[word]
        return number

    def __setitem__(self, word: int, number: int) -> None:
        self._words[word] = number

    def answered(self, route: str, status: int) -> int:
        """The word that counts these answers."""
        known = status if status in STATUSES else 500 if status >= 500 else 400
        return self.ANSWERED + ROUTES.index(route) * len(STATUSES) + STATUSES.index(known)


class Tally:
    def __init__(self, segment: penstock.Segment, servers: int, *, writable: bool = False) -> None:
        self._words: Any = segment.view(writable=writable).cast("Q")
        self.rows = [Row(self._words[at : at + Row.WORDS]) for at in range(0, servers * Row.WORDS, Row.WORDS)]

    @staticmethod
    def lay(servers: int) -> penstock.Segment:
        return penstock.Segment.create(servers * Row.WORDS * WORD_NBYTES, name="tally")
