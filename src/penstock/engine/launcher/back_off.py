"""How long a process waits before it is started again: longer, the more often it has failed or died early in a row.

A kill from outside says nothing about the next start, so only failures of the process itself, kills for want of memory,
and kills that may have been for want of memory are counted. A life of HEALTHY_UPTIME ends the row, also after a kill.
"""

from __future__ import annotations

SECONDS = (0.0, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # before the next start, by failed starts in a row …
MAX_SHORT_LIVES = 4  # … or by short lives in a row of one that served, up to this entry
HEALTHY_UPTIME = 30.0  # seconds from a start: one that dies earlier had a short life
MIN_START_INTERVAL_S = 1.0  # between two starts: a supervisor that kills each start must not keep a processor busy


class BackOff:
    """Counts the ends of one unit, or of one output processor."""

    def __init__(self) -> None:
        self.failed_starts = 0  # in a row, whatever ended them
        self.short_lives = 0  # in a row, of those that are counted
        self._failures = 0  # failed starts in a row, of those that are counted
        self._lived = 0.0
        self._is_counted = False  # the last end

    def count(self, is_failed_start: bool, lived: float, *, is_from_outside: bool) -> None:
        """Counts an end after `lived` seconds. `is_failed_start`: the unit has not served. `is_from_outside`: another
        process is known to have ended it."""
        self._lived, self._is_counted = lived, not is_from_outside
        if not is_failed_start:
            self.failed_starts = self._failures = 0
        if lived >= HEALTHY_UPTIME:
            self.short_lives = 0
        self.failed_starts += is_failed_start
        if self._is_counted:
            self._failures += is_failed_start
            self.short_lives += lived < HEALTHY_UPTIME

    @property
    def seconds(self) -> float:
        """Returns the seconds from the end to the next start."""
        pause = 0.0
        if self._is_counted:
            short_lives = min(max(self.short_lives - 1, 0), MAX_SHORT_LIVES)
            pause = SECONDS[max(min(self._failures, len(SECONDS) - 1), short_lives)]
        return max(pause, MIN_START_INTERVAL_S - self._lived)
