"""How long a process waits before it is started again: longer, the more often it has failed or died early in a row."""

from __future__ import annotations

SECONDS = (0.0, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # before the next start, by failed starts in a row …
MAX_SHORT_LIVES = 4  # … or by short lives in a row of one that served, up to this entry
HEALTHY_UPTIME = 30.0  # seconds from a start: one that dies earlier had a short life


class BackOff:
    """Counts the ends of one unit, or of one output processor."""

    def __init__(self) -> None:
        self.failures = 0  # starts in a row that did not serve
        self.short_lives = 0  # in a row

    def count(self, is_failure: bool, lived: float) -> None:
        """Counts an end after `lived` seconds. `is_failure`: it has not served."""
        self.failures = self.failures + 1 if is_failure else 0
        self.short_lives = self.short_lives + 1 if lived < HEALTHY_UPTIME else 0

    @property
    def seconds(self) -> float:
        """Returns the seconds before the next start."""
        short_lives = min(max(self.short_lives - 1, 0), MAX_SHORT_LIVES)
        return SECONDS[max(min(self.failures, len(SECONDS) - 1), short_lives)]
