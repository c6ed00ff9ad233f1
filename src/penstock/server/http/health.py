"""`/health`: liveness of this process, readiness of the engine, and the state of every process.

Reads the status board and the server counters. The route needs no API key.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.cluster.migration_counters import MigrationCounters, QueueCounters
from penstock.engine.cluster.status_board import StatusBoard
from penstock.server.chat.streaming import json_response
from penstock.server.status.counters import ProcessCounters, ServerCounters


class HealthReport:
    def __init__(self, tally: ServerCounters, board: StatusBoard, me: int, node_of: Callable[[int], int]) -> None:
        self._tally = tally
        self._board = board
        self._groups = board.rows
        self._me = me
        self._node_of = node_of  # the node of a group

    @property
    def _is_ready(self) -> bool:
        return not self._board.is_draining and any(row[StatusBoard.SERVING] for row in self._groups)

    async def live(self, request: Request) -> Response:
        return json_response({"status": "live", "server": self._me, "pid": os.getpid()}, 200)

    async def ready(self, request: Request) -> Response:
        """Answers with 503 while no group serves, and while the server drains."""
        return json_response(self._status(), 200 if self._is_ready else 503)

    async def whole(self, request: Request) -> Response:
        servers = [
            {
                "server": number,
                "pid": row[ProcessCounters.PID],
                "serves": row[ProcessCounters.SERVING] == 1,
                "open": row[ProcessCounters.OPEN],
                "waiting": row.queue[QueueCounters.WAITING],
                "failed_starts": 0 if row[ProcessCounters.SERVING] else row[ProcessCounters.FAILED_STARTS],
            }
            for number, row in enumerate(self._tally.rows)
        ]
        groups = [
            {
                "group": number,
                "node": self._node_of(number),
                "incarnation": row[StatusBoard.SERVING],
                "serves": row[StatusBoard.SERVING] > 0,
                "open": row[StatusBoard.OPEN],
                "running": row[StatusBoard.RUNNING],
                "waiting": row[StatusBoard.WAITING],
                "free_blocks": row[StatusBoard.FREE_BLOCKS],
                "steps": row[StatusBoard.STEPS],
                "waiting_to_resume": self._waiting_to_resume(number),
                "failed_starts": 0 if row[StatusBoard.SERVING] else row[StatusBoard.FAILED_STARTS],
            }
            for number, row in enumerate(self._groups)
        ]
        return json_response({**self._status(), "servers": servers, "groups": groups}, 200 if self._is_ready else 503)

    def _waiting_to_resume(self, group: int) -> int:
        """Returns how many requests the group has lost that no group runs yet."""
        return sum(row.engines[group].migration[MigrationCounters.WAITING] for row in self._tally.rows)

    def _status(self) -> dict[str, Any]:
        is_ready, is_draining = self._is_ready, self._board.is_draining
        return {"status": "ready" if is_ready else "draining" if is_draining else "starting"}
