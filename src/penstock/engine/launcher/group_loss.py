"""Why a group was lost: from outside or by itself, judged by the ends of its processes in the order of their arrival.

When the first process has ended, the launcher kills the rest. A process that was already ending was not killed by the
launcher, and its end counts as much as the first end. A worker that fails in a collective operation often ends before
the worker that was killed from outside, as the kernel frees the killed worker's memory first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from penstock.engine.cluster.process_end import ProcessEnd
from penstock.engine.cluster.verdict_board import Cause
from penstock.engine.launcher.oom_kills import count_oom_kills


class GroupLoss:
    """Finds the cause of one loss. `cause` is None until it is known."""

    def __init__(self, oom_kills: Callable[[], int | None] = count_oom_kills) -> None:
        self.cause: Cause | None = None
        self.is_oom_counted = True  # False: a kill by the kernel for want of memory looks like one from outside
        self._count_oom_kills = oom_kills
        self._oom_kills = self._recent_oom_kills = oom_kills()
        self._is_over = False  # a process has ended, and the launcher kills the others
        self._unseen: set[int] = set()  # pids that were ending before that; their ends have not been seen
        self._has_failed = False  # a process has failed by itself

    def plan(self) -> None:
        """Records that the launcher restarts the group as it was asked to."""
        self.cause = Cause.PLANNED

    def begin(self, pid: int, end: ProcessEnd, ending: Collection[int], is_any_stopped: bool) -> None:
        """Adds the first end, before the launcher kills the rest. `ending`: pids of processes that are ending already,
        or will report an end on a remote node. `is_any_stopped`: a process is stopped, and the rest may have waited for
        it in vain."""
        self._is_over = True
        self._unseen = {pid, *ending}
        if is_any_stopped and self.cause is None:
            self.cause = Cause.OUTSIDE
        self.add(pid, end)

    def add(self, pid: int, end: ProcessEnd) -> None:
        """Adds an end."""
        if self.cause is not None:
            return
        is_known = pid in self._unseen
        self._unseen.discard(pid)
        if end.cause not in (None, Cause.ITSELF):
            self.cause = end.cause
        elif is_known and (end.is_from_outside or (end.is_killed and not self._is_out_of_memory())):
            self.cause = Cause.OUTSIDE
        elif not end.is_caused_by_peer and (is_known or not (end.is_killed or end.is_from_outside)):
            self._has_failed = True
        if self.cause is None and self._has_failed and not self._unseen:
            self.cause = Cause.ITSELF

    def close(self) -> Cause:
        """Returns the cause, when all processes have ended. Where all were killed or ended because of a peer's death,
        one was killed from outside."""
        if self.cause is None:
            is_failure = self._has_failed or self._is_out_of_memory()
            self.cause = Cause.ITSELF if is_failure else Cause.OUTSIDE
        return self.cause

    def forget_oom_kills(self) -> None:
        """Forgets the kills before the last call. The kernel has killed a process that has ended meanwhile: perhaps a
        decoder of videos, perhaps a process of another program."""
        now = self._count_oom_kills()
        if now is not None:
            self._oom_kills, self._recent_oom_kills = self._recent_oom_kills, now

    @property
    def is_maybe_out_of_memory(self) -> bool:
        """Returns whether a kill may be the kernel's: its counter has moved, or cannot be read."""
        now = self._count_oom_kills()
        return now is None or self._oom_kills is None or now > self._oom_kills

    def _is_out_of_memory(self) -> bool:
        """Returns whether the kernel has killed a process of this control group lately, since the group was started."""
        now = self._count_oom_kills()
        if now is None or self._oom_kills is None:
            self.is_oom_counted = False
            return False
        return now > self._oom_kills
