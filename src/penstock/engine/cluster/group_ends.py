"""Messages of a core or an output processor to the servers: sent at once if there is room, else kept in order.

No send blocks: a server that reads nothing delays only its own answers. Beyond MAX_KEPT messages for one server, `send`
returns False and keeps only its `Failed` messages. A server process that is stopped for long is killed by the launcher.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

from penstock import ChannelError, PeerDied, Sender, WouldBlock
from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.engine.protocol.messages import Delta, Failed

ATTEMPTS = 2  # the first may only raise PeerDied of the server's former process
MAX_KEPT = 1 << 14  # messages for one server: more than a minute of steps of 5 ms

TOO_SLOW = 503, "the server read the chunks of this request too slowly"  # status and reason

Answer: TypeAlias = Delta | Failed


class Outbox:
    """The messages of one process to all servers."""

    def __init__(self, cluster: Cluster, me: ProcessId) -> None:
        lane = cluster.delta_lane(me.group, me.index if me.kind == "output" else None)
        self._senders: list[Sender] = [
            channel.open_sender(lane, name=str(me)) for channel in cluster.servers_of(me.group)
        ]
        self._kept: list[deque[Answer]] = [deque() for _ in self._senders]

    @property
    def has_backlog(self) -> bool:
        """Returns whether messages are kept for a slow server: call `flush` now and then."""
        return any(self._kept)

    def send(self, server: int, answer: Answer) -> bool:
        """Sends or keeps a message. Returns False if more than MAX_KEPT are kept: all but `Failed` ones are dropped."""
        kept = self._kept[server]
        if kept or not self._try_send(server, answer):
            kept.append(answer)
        if len(kept) <= MAX_KEPT:
            return True
        self._kept[server] = deque(message for message in kept if isinstance(message, Failed))
        return False

    def flush(self) -> None:
        for server, kept in enumerate(self._kept):
            while kept and self._try_send(server, kept[0]):
                kept.popleft()

    def forget(self, server: int) -> None:
        """Drops what is kept for a server that has died."""
        self._kept[server].clear()

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
