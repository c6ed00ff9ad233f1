"""The groups of the engine as one client sees them: the choice of a group, messages to its core, and its return.

A core that is started again receives from the same channel: the death of the core before it is raised once, late.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from penstock import PeerDied, PenstockError
from penstock.engine.client.stream import EngineError, Placement
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.migration_counters import QueueCounters
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import AGAIN, Cluster, ProcessId
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import Abort, AdapterChange, Submit

REMEMBERED = 1 << 15  # prefixes and images, 10 bytes each
SLACK = 8  # a group may have so many requests, and a fourth, more than the least loaded before affinity is given up
SEND_TIMEOUT = 5.0  # seconds; for a core that takes no requests


class GroupLost(EngineError):
    """The group of a request has died."""


class NoGroupServes(EngineError):
    """No group serves at the moment."""


class Router:
    """Chooses the group with the fewest open requests, or a group that had the prefix or the images before.

    The status board counts the open requests of each group.
    """

    def __init__(self, seed: int | None = None) -> None:
        # The last group of each trace, in a table of fixed size: a trace replaces the trace before it in the slot of
        # its hash. No trace has the initial hash of its slot.
        self._hashes = array("q", range(1, REMEMBERED + 1))
        self._groups = array("h", bytes(2 * REMEMBERED))
        self._chance = random.Random(seed)

    def choose(self, loads: Mapping[int, int], traces: Sequence[bytes]) -> int:
        """Returns one of the groups in `loads`, which has the number of open requests of each."""
        least = min(loads.values())
        hashes = [hash(trace) for trace in traces]
        votes = Counter(self._groups[key % REMEMBERED] for key in hashes if self._hashes[key % REMEMBERED] == key)
        chosen = None
        for group, _ in votes.most_common():
            if group in loads and loads[group] <= least + SLACK + least // 4:
                chosen = group
                break
        if chosen is None:
            chosen = self._chance.choice([group for group, load in loads.items() if load == least])
        for key in hashes:
            self._hashes[key % REMEMBERED], self._groups[key % REMEMBERED] = key, chosen
        return chosen


class CoreSenders:
    def __init__(self, cluster: Cluster, me: ProcessId) -> None:
        self._server = me.index
        self._senders = [inbox.open_async_sender(me.index, name=str(me)) for inbox in cluster.inboxes]
        self._dead = [0] * len(cluster.inboxes)  # the last incarnation of each group that is known to be dead
        self._aborting: set[asyncio.Task[None]] = set()

    def is_dead(self, group: int, incarnation: int) -> bool:
        return incarnation <= self._dead[group]

    def mark_dead(self, group: int, incarnation: int) -> None:
        self._dead[group] = max(self._dead[group], incarnation)

    async def send(self, place: Placement, message: Submit | Abort | AdapterChange, until: float = math.inf) -> None:
        """Sends a message to a group. Raises GroupLost if that is dead, EngineError if it does not receive in time."""
        deadline = min(until, time.monotonic() + SEND_TIMEOUT)
        while True:
            try:
                return await self._senders[place.group].send(message, max(0.0, deadline - time.monotonic()))
            except PeerDied as death:  # perhaps the incarnation before: its death is new in this channel
                dead = ProcessId.of(death.name)
                if dead is not None and dead.incarnation >= place.incarnation:
                    self.mark_dead(place.group, dead.incarnation)
                    raise GroupLost(503, str(death)) from None
                if time.monotonic() > deadline:
                    raise GroupLost(503, str(death)) from None
                await asyncio.sleep(AGAIN)
            except PenstockError as error:
                status = 504 if time.monotonic() >= until else 503
                raise EngineError(status, f"group {place.group} does not receive requests: {error}") from None

    def abort(self, place: Placement) -> None:
        """Has a core abort a request. Does not wait until the message is sent."""
        task = asyncio.ensure_future(self._abort(place))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def _abort(self, place: Placement) -> None:
        try:
            await self.send(place, Abort(self._server, np.array([place.request], np.int32)))
        except EngineError as error:  # a group that is gone needs no message
            event("abort not sent", logging.WARNING, request=place.request, error=error)

    async def close(self) -> None:
        """Closes the senders, when the last aborts have been sent."""
        if self._aborting:
            await asyncio.wait(self._aborting, timeout=SEND_TIMEOUT)
        for sender in self._senders:
            sender.close()


class GroupReturn:
    """New requests wait here while no group serves and a lost group is started again.

    One task reads the boards for all requests that wait.
    """

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
