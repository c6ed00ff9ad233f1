"""New requests wait here while no group serves and a lost group is started again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from penstock.engine.client.stream import EngineError
from penstock.engine.cluster.migration_counters import QueueCounters
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import AGAIN
from penstock.engine.protocol.config import EngineConfig


class NoGroupServes(EngineError):
    """No group serves at the moment."""


class GroupReturn:
    """The return of a group to which one client can submit. One task reads the boards for all requests that wait."""

    def __init__(
        self, config: EngineConfig, board: StatusBoard, counters: QueueCounters, can_submit: Callable[[], bool]
    ) -> None:
        self._is_awaited = config.migration_limit > 0
        self._timeout = config.queue_timeout
        self._board = board
        self._counters = counters
        self._can_submit = can_submit
        self._task: asyncio.Task[None] | None = None

    def is_due(self) -> bool:
        """Returns whether no group serves, and one that has served is started again."""
        if self._can_submit() or not self._is_awaited or self._board.is_draining:
            return False
        # The launcher writes the one word before it clears the other.
        return any(row[StatusBoard.SERVING] for row in self._board.rows) or bool(
            self._board.cluster[StatusBoard.SERVED]
        )

    async def wait(self, deadline: float, began: float) -> None:
        """Returns when the return of a group is not due. Both times are on the monotonic clock.

        Raises EngineError 504 at `deadline`, the end of the request's time, and 503 when `queue_timeout` seconds have
        passed since `began`.
        """
        if not self.is_due():
            return
        until = min(deadline, began + self._timeout)
        self._counters[QueueCounters.WAITING] += 1
        try:
            while self.is_due() and (remaining := until - time.monotonic()) > 0:
                await self._wait_for_task(remaining)
        finally:
            self._counters[QueueCounters.WAITING] -= 1
        if not self.is_due():
            return
        if until == deadline:
            raise EngineError(504, "no group of the engine has served in the time of the request")
        self._counters[QueueCounters.TIMEOUTS] += 1
        raise EngineError(
            503,
            f"no group of the engine serves now, and none has within {self._timeout:g} s (--queue-timeout): send the "
            "request again",
        )

    async def _wait_for_task(self, timeout: float) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())
        await asyncio.wait([self._task], timeout=timeout)

    async def _run(self) -> None:
        while self.is_due():
            await asyncio.sleep(AGAIN)

    def end(self) -> None:
        """Lets no request wait any more."""
        self._is_awaited = False

    async def close(self) -> None:
        """Returns when the board is not read any more."""
        self.end()
        if self._task is not None:
            await asyncio.wait([self._task])
