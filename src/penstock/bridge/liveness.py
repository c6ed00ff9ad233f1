"""When a side of a link sends a heartbeat, and when it takes the remote side for dead. No clock of its own.

Any byte is a sign of life, so a long frame on a slow line needs no heartbeat between its pieces. A side that was
stopped itself must read what has come meanwhile before it judges: `is_silent` is asked after a look at the connection.
"""

from __future__ import annotations


class Liveness:
    def __init__(self, heartbeat_s: float, silence_s: float, now: float) -> None:
        self.heartbeat_s = heartbeat_s
        self.silence_s = silence_s
        self.heard_at = now
        self._beat_at = now  # when the next heartbeat is due: at once

    def hear(self, now: float) -> None:
        """Bytes have come."""
        self.heard_at = now

    def resume(self, now: float) -> None:
        """The connection is a new one: a heartbeat is due at once."""
        self.heard_at = self._beat_at = now

    def beat(self, now: float) -> bool:
        """Returns whether a heartbeat is due now; then the next one is due a heartbeat later."""
        if now < self._beat_at:
            return False
        self._beat_at = now + self.heartbeat_s
        return True

    def silent_for(self, now: float) -> float:
        return now - self.heard_at

    def is_silent(self, now: float) -> bool:
        return now - self.heard_at >= self.silence_s

    @property
    def due_at(self) -> float:
        """When something is to be done, if nothing comes before."""
        return min(self._beat_at, self.heard_at + self.silence_s)
