"""New requests wait here while no group serves and one is started again, as requests that their group has lost do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import AGAIN
from penstock.engine.protocol.config import EngineConfig


class GroupReturn:
    """The return of a group to which one client can submit. One task reads the boards for all requests that wait."""

    def __init__(self, config: EngineConfig, board: StatusBoard, can_submit: Callable[[], bool]) -> None:
        self._is_awaited = config.migration_limit > 0
        self._timeout = config.migration_timeout
        self._board = board
        self._can_submit = can_submit
        self._task: asyncio.Task[None] | None = None

    @property
    def is_due(self) -> bool:
        """Returns whether no group serves, and one that has served is started again."""
        if self._can_submit() or not self._is_awaited or self._board.is_draining:
            return False
        # The launcher writes the one word before it clears the other.
        return any(row[StatusBoard.SERVING] for row in self._board.rows) or bool(self._board.tree[StatusBoard.SERVED])

    async def wait(self, deadline: float) -> None:
        """Waits while it is due, until `deadline` on the monotonic clock, and for `migration_timeout` at most."""
        if not self.is_due:
            return
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())
        await asyncio.wait([self._task], timeout=max(0.0, min(self._timeout, deadline - time.monotonic())))

    async def _run(self) -> None:
        while self.is_due:
            await asyncio.sleep(AGAIN)

    def end(self) -> None:
        """Lets no request wait any more."""
        self._is_awaited = False

    async def close(self) -> None:
        """Returns when the board is not read any more."""
        self.end()
        if self._task is not None:
            await asyncio.wait([self._task])
