"""A histogram in words of shared memory, with one writer; its bounds are those of vLLM's metrics of the same meaning.

Leaves to `server.metrics` how it is written for Prometheus.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

Bounds = tuple[float, ...]

FIRST_TOKEN_SECONDS: Bounds = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
TOKEN_SECONDS: Bounds = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS: Bounds = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)


def words_of(bounds: Bounds) -> int:
    """Returns the number of words of a histogram: one for each bound, one for larger values, and the sum in ns."""
    return len(bounds) + 2


class Histogram:
    def __init__(self, words: Any, begin: int, bounds: Bounds) -> None:
        self._words = words
        self._begin = begin
        self._bounds = bounds
        self._sum = begin + len(bounds) + 1

    def add(self, seconds: float, times: int = 1) -> None:
        words = self._words
        words[self._begin + bisect_left(self._bounds, seconds)] += times
        words[self._sum] += int(seconds * 1e9) * times

    @property
    def counts(self) -> list[int]:
        """Returns a count for each bound, of values up to it and above the one before; and one of values above all."""
        return [int(count) for count in self._words[self._begin : self._sum]]

    @property
    def seconds(self) -> float:
        return float(self._words[self._sum]) / 1e9
