"""The ends of the processes of a group: they pass over deaths of the group's former incarnations.

    steps = GroupReceiver(group.steps.open_receiver(0, name=str(me)), me, patience=30.0)

A restarted group attaches again to the channels of its former incarnation. Ends of the new processes may still report
the deaths of that incarnation. `Outbox` has the ends for servers, which live on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

from penstock import ChannelError, PeerDied, Receiver, Sender, WouldBlock
from penstock.engine.cluster.topology import AGAIN, Cluster, ProcessId
from penstock.engine.protocol.messages import AdapterState, Delta, Failed

T = TypeVar("T")
NAMELESS = "?"  # name in a PeerDied when the place of the dead peer has been taken since
ATTEMPTS = 2  # the first may only raise PeerDied of the server's former process
MAX_KEPT = 1 << 14  # messages for one server: more than a minute of steps of 5 ms

TOO_SLOW = 503, "the server read the chunks of this request too slowly"  # status and reason

Answer: TypeAlias = Delta | Failed | AdapterState


def is_stale_death(me: ProcessId, death: PeerDied) -> bool:
    """Returns whether a process of a former incarnation of this group died.

    A nameless death is stale, too: another process has the dead one's place by now, and all processes of a group have
    ended before their successors start.
    """
    dead = ProcessId.of(death.name)
    return death.name == NAMELESS or (dead is not None and dead.group == me.group and dead.incarnation < me.incarnation)


class GroupSender:
    """A sender of a process of a group. While its peer's death is stale, the peer's successor has not come yet."""

    def __init__(self, sender: Sender[Any], me: ProcessId, patience: float) -> None:
        """`patience`: seconds to wait for a successor where a call has no timeout."""
        self._sender = sender
        self._me = me
        self._patience = patience

    def send(self, message: Any, timeout: float | None = None) -> None:
        """Sends within `timeout`. Raises PeerDied for a death that is not stale, or when no successor comes in time."""
        _retry(partial(self._sender.send, message, timeout), self._me, self._patience if timeout is None else timeout)

    def send_nowait(self, message: Any) -> None:
        _retry(partial(self._sender.send_nowait, message), self._me, self._patience)

    def close(self) -> None:
        self._sender.close()


class GroupReceiver:
    """A receiver of a process of a group."""

    def __init__(self, receiver: Receiver[Any], me: ProcessId, patience: float) -> None:
        """`patience`: seconds to wait for successors of the dead."""
        self._receiver = receiver
        self._me = me
        self._patience = patience

    def receive(self, timeout: float | None = None) -> Any:
        """Returns the next message. Raises PeerDied for a death that is not stale."""
        return _retry(partial(self._receiver.receive, timeout), self._me, self._patience)

    def close(self) -> None:
        self._receiver.close()


def _retry(call: Callable[[], T], me: ProcessId, patience: float) -> T:
    deadline = time.monotonic() + patience
    while True:
        try:
            return call()
        except PeerDied as death:
            if not is_stale_death(me, death) or time.monotonic() >= deadline:
                raise
            time.sleep(AGAIN)


class Outbox:
    """The messages of a core or an output processor to all servers: sent at once if there is room, else kept in order.

    No send blocks: a server that reads nothing delays only its own answers. Beyond MAX_KEPT messages for one server,
    `send` returns False and keeps only its `Failed` messages. The launcher kills a server process that is stopped for
    long.
    """

    def __init__(self, cluster: Cluster, me: ProcessId) -> None:
        lane = cluster.delta_lane(me.group, me.index if me.kind == "output" else None)
        self._senders: list[Sender] = [
            channel.open_sender(lane, name=str(me)) for channel in cluster.servers_of(me.group)
        ]
        self._backlogs: list[deque[Answer]] = [deque() for _ in self._senders]

    @property
    def has_backlog(self) -> bool:
        """Returns whether messages are kept for a slow server: call `flush` now and then."""
        return any(self._backlogs)

    def send(self, server: int, answer: Answer) -> bool:
        """Sends or keeps a message. Returns False if more than MAX_KEPT are kept: all but `Failed` ones are dropped."""
        backlog = self._backlogs[server]
        if backlog or not self._try_send(server, answer):
            backlog.append(answer)
        if len(backlog) <= MAX_KEPT:
            return True
        self._backlogs[server] = deque(message for message in backlog if isinstance(message, Failed))
        return False

    def flush(self) -> None:
        for server, backlog in enumerate(self._backlogs):
            while backlog and self._try_send(server, backlog[0]):
                backlog.popleft()

    def forget(self, server: int) -> None:
        """Drops what is kept for a server that has died."""
        self._backlogs[server].clear()

    def _try_send(self, server: int, answer: Answer) -> bool:
        """Sends a message unless there is no room now: then returns False."""
        for _ in range(ATTEMPTS):
            try:
                self._senders[server].send_nowait(answer)
            except WouldBlock:
                return False
            except PeerDied:  # raised once, if a successor has come since
                continue
            except ChannelError:
                break
            return True
        return True  # the server is dead and the message is dropped: the core learns of the death from its inbox

    def close(self) -> None:
        for sender in self._senders:
            sender.close()
