"""The lives of a group's output processors: one that is killed alone is started again in its place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from penstock.engine.cluster.process_end import KILLS, ProcessEnd
from penstock.engine.cluster.topology import ProcessId
from penstock.engine.launcher.back_off import MAX_SHORT_LIVES, BackOff


class OutputLives:
    """Schedules the next lives in one incarnation of a group. `start` gets the index and the number of the life."""

    def __init__(self, start: Callable[[int, int], None]) -> None:
        self._start = start
        self._group_started = time.monotonic()
        self._started: dict[int, float] = {}  # by index: the start of the present life, if it is not the first
        self._back_offs: dict[int, BackOff] = {}
        self._again: dict[int, asyncio.TimerHandle] = {}

    def restart(self, member: ProcessId, end: ProcessEnd, is_maybe_out_of_memory: bool) -> bool:
        """Schedules the next life of an output processor that was killed from outside. Returns False where the whole
        group has to be restarted: another process has died, lives were short again and again and the kernel may have
        ended them for want of memory, or the output processor has failed by itself: then a request may be the reason,
        and the loss of a group is what finds it."""
        if member.kind != "output" or end.death.signal not in KILLS:
            return False
        index = member.index
        back_off = self._back_offs.setdefault(index, BackOff())
        lived = time.monotonic() - self._started.get(index, self._group_started)
        back_off.count(False, lived, is_from_outside=end.is_from_outside or not is_maybe_out_of_memory)
        if back_off.short_lives >= MAX_SHORT_LIVES:
            return False
        loop = asyncio.get_running_loop()
        self._again[index] = loop.call_later(back_off.seconds, self._begin, index, member.life + 1)
        return True

    def _begin(self, index: int, life: int) -> None:
        self._started[index] = time.monotonic()
        self._start(index, life)

    def cancel(self) -> None:
        """Cancels all starts that are due."""
        for again in self._again.values():
            again.cancel()
        self._again.clear()
