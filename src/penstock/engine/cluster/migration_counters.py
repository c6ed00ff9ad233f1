"""Counters of a client in words of shared memory: of requests resumed after the loss of a group, and of new requests.

One client writes them: `MigrationCounters` for each group, `QueueCounters` for all groups together.
`server.status.counters` has a place for them, and `server.http.metrics` writes them for Prometheus.
"""

from __future__ import annotations

from typing import Any

from penstock.engine.cluster.histogram import Bounds, Histogram, words_of
from penstock.engine.cluster.verdict_board import Cause

PAUSE_SECONDS: Bounds = (
    *(0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0),
    *(300.0, 600.0),
)
OUTPUT = "output"  # an output processor ended, and its group serves
CAUSES = {
    Cause.OUTSIDE: "died",
    Cause.ITSELF: "failed",
    Cause.PLANNED: "planned",
    Cause.UNKNOWN: "unknown",
}
MIGRATION_CAUSES = (*CAUSES.values(), OUTPUT)


class MigrationCounters:
    WAITING = 0  # requests that the group has lost and that no group has taken yet
    KEPT_TOKENS = 1  # of open requests: prompts, and generated ids
    GIVEN_UP = 2  # requests that were answered with an error, as they could not be resumed
    TRIALS = 3  # failures of a group while one request ran alone
    TRIALS_REFUSED = 4  # suspects of an account that had had all of its trials
    CONVICTIONS = 5  # requests that have made a group fail twice so
    QUARANTINED = 6  # requests that were refused as their prompt was in quarantine
    MIGRATIONS = 7  # by MIGRATION_CAUSES
    _PAUSE = MIGRATIONS + len(MIGRATION_CAUSES)
    WORDS = _PAUSE + words_of(PAUSE_SECONDS)

    def __init__(self, words: Any = None) -> None:
        """`words`: where to count; None: in memory of this process."""
        self._words = [0] * self.WORDS if words is None else words
        self.pause = Histogram(self._words, self._PAUSE, PAUSE_SECONDS)  # from the loss to the next chunk

    def __getitem__(self, word: int) -> int:
        number: int = self._words[word]
        return number

    def __setitem__(self, word: int, number: int) -> None:
        self._words[word] = number

    def count(self, cause: str) -> None:
        self._words[self.MIGRATIONS + MIGRATION_CAUSES.index(cause)] += 1

    def clear_gauges(self) -> None:
        """Forgets what was open in a client that has ended."""
        self._words[self.WAITING] = self._words[self.KEPT_TOKENS] = 0


class QueueCounters:
    """Counters of the new requests of one client: requests that no group has taken yet."""

    WAITING = 0  # requests that wait while a lost group is started again
    TIMEOUTS = 1  # requests that were refused because no group has served within `queue_timeout`
    WORDS = 2

    def __init__(self, words: Any = None) -> None:
        """`words`: where to count; None: in memory of this process."""
        self._words = [0] * self.WORDS if words is None else words

    def __getitem__(self, word: int) -> int:
        number: int = self._words[word]
        return number

    def __setitem__(self, word: int, number: int) -> None:
        self._words[word] = number
