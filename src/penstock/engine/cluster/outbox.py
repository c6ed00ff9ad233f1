"""What a core or an output has to tell the servers: sent at once where there is room, kept in order for who is slow.

Nobody waits here: a server that takes nothing holds up its own answers only. Leaves to the launcher what becomes of a
server that takes nothing for long.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

from penstock import ChannelError, PeerDied, WouldBlock
from penstock.codec import MessageSender
from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.engine.protocol.messages import Delta, Failed

ATTEMPTS = 2  # the first may only tell that the server before this one has died
MAX_KEPT = 1 << 14  # messages for one server: more than a minute of steps of 5 ms

TOO_SLOW = 503, "too much of what the engine told was not read"  # status and reason

Answer: TypeAlias = Delta | Failed


class Outbox:
    def __init__(self, tree: Cluster, me: ProcessId) -> None:
        lane = tree.delta_lane(me.group, me.index if me.kind == "output" else None)
        self._senders: list[MessageSender] = [one.sender(lane, name=str(me)) for one in tree.servers]
        self._kept: list[deque[Answer]] = [deque() for _ in tree.servers]

    @property
    def has_backlog(self) -> bool:
        """Somebody is slow: call `flush` now and then."""
        return any(self._kept)

    def send(self, server: int, answer: Answer) -> bool:
        """False: the server has not taken so many that this one is lost, and all that were kept, but for failures."""
        kept = self._kept[server]
        if kept or not self._try_send(server, answer):
            kept.append(answer)
        if len(kept) <= MAX_KEPT:
            return True
        self._kept[server] = deque(one for one in kept if isinstance(one, Failed))
        return False

    def flush(self) -> None:
        for server, kept in enumerate(self._kept):
            while kept and self._try_send(server, kept[0]):
                kept.popleft()

    def forget(self, server: int) -> None:
        """It has died."""
        self._kept[server].clear()

    def _try_send(self, server: int, answer: Answer) -> bool:
        """False: there is no room now."""
        for _ in range(ATTEMPTS):
            try:
                self._senders[server].send_nowait(answer)
            except WouldBlock:
                return False
            except PeerDied:  # told once, if another has come since
                continue
            except ChannelError:
                break
            return True
        return True  # it is gone, and nobody wants it. The core hears of that from its inbox

    def close(self) -> None:
        for sender in self._senders:
            sender.close()
