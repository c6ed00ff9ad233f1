"""The core's ends to the output processors. An output processor may die, and be started again.

The undelivered messages of a dead output processor are lost: with all open samples, and the ends of requests that the
core has closed already. Each output processor counts delivered messages on the status board, and the core keeps the
numbers of closed requests until the message with their end has been delivered.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from penstock import ChannelError, PeerDied, Timeout, WouldBlock
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.process_end import KILLS
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.engine.protocol.messages import OutputReady, Stop, Tokens

T = TypeVar("T")
LOG_AGAIN = 10.0  # seconds between two log lines about slow output processors
STOP_TIMEOUT = 3.0  # seconds; for a `Stop` to a receiver that may be stuck


class OutputSenders:
    """Sends `Tokens` to output processors, and knows which of them receive."""

    def __init__(self, cluster: Cluster, me: ProcessId, waiting: Callable[[Callable[[], None]], None]) -> None:
        """`waiting` calls its argument, and does not count the time as the core's."""
        self._me = me
        self._channels = cluster.groups[me.group].tokens
        self._senders = [channel.open_sender(name=str(me)) for channel in self._channels]
        self._first_lane = cluster.output_lane(0)
        self._timeout = cluster.config.step_timeout
        self._waiting = waiting
        board = StatusBoard(cluster.board, writable=True)
        self._row = board.row(me.group)
        self._delivered = [board.output_row(cluster.output_place(me.group, output)) for output in self._indices]
        self._lives = [0 for _ in self._indices]
        self.absent: set[int] = set()  # dead output processors, until the next life receives
        # The sender to these may have to report the death of a former process. The name of a dead peer may be gone.
        self._may_be_stale = set(self._indices)
        self._queue: list[tuple[int, Tokens]] = []
        self._queued = [0 for _ in self._indices]  # messages to the present life
        self._closed: list[deque[tuple[int, int, int]]] = [deque() for _ in self._indices]  # message, server, request
        self._logged_slow = -math.inf  # when it was last logged that an output processor is slow

    @property
    def _indices(self) -> range:
        return range(len(self._senders))

    # ── messages ──
    def queue(self, messages: Iterable[tuple[int, Tokens]], closed: list[tuple[int, int]]) -> None:
        """Adds messages with their output processors. `closed`: requests (server, number) that have closed up to these
        messages; the list is cleared."""
        for output, tokens in messages:
            if output not in self.absent:
                if self._senders:
                    self._queued[output] += 1
                self._queue.append((output, tokens))
        if self._senders:
            for server, request in closed:
                output = request % len(self._senders)
                if output not in self.absent:
                    self._closed[output].append((self._queued[output], server, request))
        closed.clear()

    def send_queued(self) -> list[int]:
        """Sends what is queued. Returns the output processors that were found dead: call `lose` of each."""
        queue, self._queue = self._queue, []
        dead: list[int] = []
        for output, tokens in queue:
            if output not in dead and not self._send(output, tokens):
                dead.append(output)
        return dead

    @property
    def has_delivered(self) -> bool:
        """Returns whether the output processors that receive have delivered all messages."""
        present = (output for output in self._indices if output not in self.absent)
        return all(self._delivered[output][0] >= self._queued[output] for output in present)

    def undelivered(self) -> list[tuple[int, int]]:
        """Returns the closed requests (server, number) with ends that are not delivered yet."""
        for output, closed in enumerate(self._closed):
            while closed and closed[0][0] <= self._delivered[output][0]:
                closed.popleft()
        return [(server, request) for closed in self._closed for _, server, request in closed]

    def take_queue(self) -> list[Tokens]:
        """Returns and clears the queue, for a core that processes messages itself."""
        queue, self._queue = self._queue, []
        return [tokens for _, tokens in queue]

    def _send(self, output: int, tokens: Tokens) -> bool:
        """Waits while there is no room. Returns False if the output processor is dead. One that makes no room within
        `step_timeout` is killed."""
        sender = self._senders[output]
        try:
            return self._unless_dead(output, partial(sender.send_nowait, tokens))
        except WouldBlock as full:
            now = time.monotonic()
            if now - self._logged_slow >= LOG_AGAIN:
                self._logged_slow = now
                event("output processor too slow", logging.WARNING, output=output, reason=str(full))
        is_alive = True

        def wait() -> None:
            nonlocal is_alive
            is_alive = self._unless_dead(output, partial(sender.send, tokens, self._timeout))

        try:
            self._waiting(wait)
        except Timeout as error:
            event("output processor is killed", logging.ERROR, output=output, reason=str(error))
            self._kill(output)
            return False
        return is_alive

    def _unless_dead(self, output: int, send: Callable[[], object]) -> bool:
        """Returns False where `send` raises the death of the present life. Re-raises a failed processor's death."""
        while True:
            try:
                send()
                return True
            except PeerDied as death:
                if not self._is_stale(output, death):
                    _require_killed(death)
                    return False

    def _is_stale(self, output: int, death: PeerDied) -> bool:
        dead = ProcessId.of(death.name)
        if dead is not None:
            return self._is_former(output, dead)
        is_stale = output in self._may_be_stale
        self._may_be_stale.discard(output)
        return is_stale

    def _is_former(self, output: int, dead: ProcessId) -> bool:
        return (dead.incarnation, dead.life) < (self._me.incarnation, self._lives[output])

    # ── deaths and lives ──
    def find_death(self, death: PeerDied) -> int | None:
        """Returns the output processor that has died, as the core's inbox reports; None: no new death. The name of a
        dead peer may be gone: then the sender or the next life reports the death. Re-raises the death of a failed
        output processor."""
        output, dead = death.index - self._first_lane, ProcessId.of(death.name)
        if output not in self._indices or dead is None or output in self.absent or self._is_former(output, dead):
            return None
        _require_killed(death)
        return output

    def is_output(self, death: PeerDied) -> bool:
        return death.index - self._first_lane in self._indices

    def lose(self, output: int) -> list[tuple[int, int]]:
        """Records that an output processor has died. Returns the closed requests (server, number) of which it may not
        have delivered the end."""
        self.absent.add(output)
        self._publish()
        self._queue = [entry for entry in self._queue if entry[0] != output]
        delivered = self._delivered[output][0]
        lost = [(server, request) for message, server, request in self._closed[output] if message > delivered]
        self._closed[output].clear()
        return lost

    def is_new(self, ready: OutputReady) -> bool:
        """Returns whether this is a life that the core does not know."""
        return ready.incarnation == self._me.incarnation and ready.life > self._lives[ready.index]

    def attach(self, ready: OutputReady) -> None:
        """Records that the next life of an absent output processor receives."""
        output = ready.index
        self._lives[output] = ready.life
        self._queued[output] = 0
        self._may_be_stale.add(output)
        self.absent.discard(output)
        self._publish()

    def _publish(self) -> None:
        self._row[StatusBoard.ABSENT_OUTPUTS] = sum(1 << output for output in self.absent)

    def _kill(self, output: int) -> None:
        """Kills a process that makes no room. The launcher sees its end, and starts the next life."""
        name = str(ProcessId("output", self._me.group, output, self._me.incarnation, self._lives[output]))
        channel = self._channels[output]
        for peer in channel.snapshot()["peers"]:
            if peer["name"] == name and peer["state"] == "live":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(peer["pid"], signal.SIGKILL)

    # ── the end ──
    def stop(self) -> None:
        """Sends the last message. An output processor that is dead needs none."""
        for output in self._indices:
            if output not in self.absent:
                with contextlib.suppress(Timeout, ChannelError):
                    self._unless_dead(output, partial(self._senders[output].send, Stop(), STOP_TIMEOUT))

    def close(self) -> None:
        for sender in self._senders:
            sender.close()


def _require_killed(death: PeerDied) -> None:
    """Re-raises the death of an output processor that has failed by itself: the group is lost with it, as one of the
    requests in the steps in flight may be the reason. Where it is not known how a process has ended, the launcher
    knows, and ends the group if it has to."""
    cause = death.cause
    is_known = cause.exception is not None or cause.status is not None or cause.signal is not None
    if is_known and cause.signal not in KILLS:
        raise death
