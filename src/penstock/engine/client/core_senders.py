"""Sends the messages of one client to the cores, and knows which of them have died.

A core that is started again receives from the same channel: the death of the one before it is raised once, late.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time

import numpy as np

from penstock import PeerDied, PenstockError
from penstock.engine.client.stream import EngineError, Placement
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.topology import AGAIN, Cluster, ProcessId
from penstock.engine.protocol.messages import Abort, Submit

SEND_TIMEOUT = 5.0  # seconds; for a core that takes no requests


class GroupLost(EngineError):
    """The group of a request has died."""


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

    async def send(self, place: Placement, message: Submit | Abort, until: float = math.inf) -> None:
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
