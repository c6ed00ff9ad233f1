"""The connections of a listener that are in their handshake. Strangers do not delay a node, whatever their number.

A connection is a stranger until it knocks: until its first bytes show that they come from a process with the secret.
There are at most MAX_HANDSHAKES strangers, and as many connections that have knocked. Beyond that a random connection
of the kind is dropped; the sides that connect try again. So strangers compete with strangers. Each knock counts once: a
process that has recorded knocks on the network, and sends them before their nodes do, competes with nodes as often.

A crowded pool does not take connections as fast as it can: at a long round trip, the connection of a node would be
dropped before its first bytes come. The pool takes them as fast as keeps the wait in the kernel at QUEUE_S.

The handshake of a connection begins when its first message is there as a whole: the kernel wakes the pool for no less.
So silent and dripping strangers cost a descriptor each, and no TLS.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import resource
import secrets
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

from penstock.bridge.link_errors import BridgeRefused, RefusalKind
from penstock.bridge.wire import ABORTING

if TYPE_CHECKING:
    from typing_extensions import Self

HANDSHAKE_S = 2.0  # for the whole handshake, from when the connection is accepted
MAX_HANDSHAKES = 256  # of strangers, and of connections that have knocked …
DESCRIPTOR_SHARE = 4  # … or a quarter of the descriptors that the process has left each, where that is fewer
ACCEPTED_AT_ONCE = 32  # before the pool looks at what the connections say
QUEUE_S = 0.25  # in the kernel, before a crowded pool takes a connection
CROWDED_POLL_S = 0.01  # between two times that a crowded pool takes connections …
MIN_CROWDED = 8  # … and the least number at a time
HEAD_NBYTES = 5  # of TLS: type, version and length of a record
MAX_FIRST_NBYTES = 4096  # of a first message that is waited for as a whole
PEEK = socket.MSG_PEEK | socket.MSG_DONTWAIT
TCP_INFO_QUEUED = struct.Struct("24xI")  # linux/tcp.h; tcpi_unacked of a listening socket: connections in its queue
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
NO_ROOM_POLL_S = 0.05  # while other parts of the process, or of the machine, hold all descriptors
READABLE = select.EPOLLIN | select.EPOLLRDHUP
SILENT = "it said too little in time"
GONE = "it closed the connection"

Address: TypeAlias = tuple[str, int]


class PendingHandshake(Protocol):
    """A handshake that has begun."""

    @property
    def has_knocked(self) -> bool:
        """Whether the remote side has shown that it has the secret, or a recorded knock."""

    @property
    def events(self) -> int:
        """For epoll."""

    def advance(self) -> bool:
        """Goes on without waiting. Returns whether the handshake is done."""

    def close(self) -> None:
        """Closes the connection, after what it has said."""


class Arrival:
    """A connection that has been accepted."""

    def __init__(self, connection: socket.socket, address: Address) -> None:
        self.connection = connection
        self.address = address
        self.deadline = time.monotonic() + HANDSHAKE_S
        self.handshake: PendingHandshake | None = None
        self._is_measured = False

    def has_first_message(self, measure: Callable[[bytes], int]) -> bool:
        """Returns whether the first message is there as a whole, or the end is. `measure` finds the length of a message
        by its first bytes."""
        if self._is_measured:
            return True  # the kernel has no other reason to wake the pool
        self._is_measured = True
        head = self.connection.recv(HEAD_NBYTES, PEEK)
        nbytes = measure(head) if len(head) == HEAD_NBYTES else 0
        if not HEAD_NBYTES < nbytes <= MAX_FIRST_NBYTES or len(self.connection.recv(nbytes, PEEK)) == nbytes:
            return True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
        return False

    def close(self) -> None:
        """The remote side may read first what it was told."""
        if self.handshake is not None:
            self.handshake.close()
        self.connection.close()

    def abort(self) -> None:
        """Resets the connection: the kernel keeps nothing of it, at any rate of connections."""
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORTING)
        self.connection.close()


def _find_limit() -> int:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors < 0:  # there is no limit
        return MAX_HANDSHAKES
    try:
        left = descriptors - len(os.listdir("/proc/self/fd"))
    except OSError:  # listing them takes one more
        left = 0
    return min(MAX_HANDSHAKES, max(MIN_CROWDED, left // DESCRIPTOR_SHARE))


class HandshakePool:
    """Takes connections from a listening socket, and leads their handshakes until one of them is done.

    Args:
        listening: a socket that does not block.
        measure: finds the length of a connection's first message by its first HEAD_NBYTES; 0: no message begins so.
        begin: begins the handshake of a connection.
        refuse: is told of each connection that is given up.
        interrupt: a descriptor that ends `wait` while it is readable.
    """

    def __init__(
        self,
        listening: socket.socket,
        measure: Callable[[bytes], int],
        begin: Callable[[Arrival], PendingHandshake],
        refuse: Callable[[RefusalKind, str, Address], None],
        interrupt: int | None = None,
    ) -> None:
        self._listening = listening
        self._measure = measure
        self._begin = begin
        self._refuse = refuse
        self._strangers: dict[int, Arrival] = {}  # by descriptor, the oldest first
        self._knocked: dict[int, Arrival] = {}  # in the order of their knocks
        self._poll = select.epoll()
        self._poll.register(listening, select.EPOLLIN)
        self._interrupt = interrupt
        if interrupt is not None:
            self._poll.register(interrupt, select.EPOLLIN)
        self._limit = _find_limit()  # of strangers, and of connections that have knocked
        self._accept_at = 0.0  # while the pool is crowded; 0: when a connection comes
        self._due = 0  # connections that a crowded pool takes now, at most `_limit` between two looks at what they say

    def wait(self, deadline: float) -> Arrival | None:
        """Returns the next connection with a handshake that is done; None: none before the deadline or interrupt."""
        listening = self._listening.fileno()
        while (now := time.monotonic()) < deadline:
            self._drop_late(now)
            events = self._poll.poll(self._timeout(deadline, now))
            if any(descriptor == self._interrupt for descriptor, _ in events):
                return None
            events.sort(key=lambda event: event[0] in self._strangers)
            for descriptor, _ in events:
                if descriptor != listening and (arrival := self._advance(descriptor)) is not None:
                    return arrival
            self._drop_surplus(self._strangers)
            self._drop_surplus(self._knocked)
            if self._accept_at and (late := time.monotonic() - self._accept_at) >= 0:
                share = min(1.0, (CROWDED_POLL_S + late) / QUEUE_S)
                self._due = max(MIN_CROWDED, int(self._queued() * share))
            if self._due:
                count = min(self._limit, self._due)
                self._due -= count
                self._accept(count)
            elif any(descriptor == listening for descriptor, _ in events):
                self._accept(min(self._limit, ACCEPTED_AT_ONCE))
            self._pace()
        return None

    def _pace(self) -> None:
        is_crowded = max(len(self._strangers), len(self._knocked)) >= self._limit
        if is_crowded != bool(self._accept_at):
            self._poll.modify(self._listening, 0 if is_crowded else select.EPOLLIN)
            self._accept_at = 0.0
        if is_crowded and time.monotonic() >= self._accept_at:
            self._accept_at = time.monotonic() + CROWDED_POLL_S

    def _queued(self) -> int:
        """Returns how many connections wait in the kernel."""
        info = self._listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_QUEUED.size)
        (queued,) = TCP_INFO_QUEUED.unpack(info)
        return int(queued)

    def _timeout(self, deadline: float, now: float) -> float | None:
        """Returns how long the pool may sleep; None: until something comes."""
        if self._due:
            return 0.0
        oldest = itertools.islice(self._strangers.values(), 1)
        first = min((arrival.deadline for arrival in (*oldest, *self._knocked.values())), default=math.inf)
        first = min(first, deadline, self._accept_at or math.inf)
        return None if first == math.inf else max(0.0, first - now)

    # ── arrivals ──
    def _accept(self, limit: int) -> None:
        """Takes connections that wait in the kernel. Where the first bytes of a node came with its connection, the pool
        reads them before it drops a connection."""
        for _ in range(limit):
            try:
                connection, address = self._listening.accept()
            except BlockingIOError:
                self._due = 0
                return
            except ConnectionError:
                continue
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                return self._make_room()
            arrival = Arrival(connection, address[:2])
            self._strangers[connection.fileno()] = arrival
            self._poll.register(connection, READABLE)

    def _make_room(self) -> None:
        """The process, or the machine, has no more descriptors. A part of the process may need some while the pool is
        open, so the pool holds fewer from now on. With fewer than MIN_CROWDED it would take connections so slowly that
        nodes give up in the queue of the kernel."""
        crowd = self._strangers or self._knocked
        if crowd:
            self._limit = max(MIN_CROWDED, min(self._limit, len(crowd) // 2))
            self._drop_random(crowd)
        else:
            time.sleep(NO_ROOM_POLL_S)

    def _advance(self, descriptor: int) -> Arrival | None:
        arrival = self._knocked.get(descriptor) or self._strangers[descriptor]
        try:
            if arrival.handshake is None:
                if not arrival.has_first_message(self._measure):
                    return None
                arrival.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
                arrival.handshake = self._begin(arrival)
            is_done = arrival.handshake.advance()
        except BridgeRefused as refusal:
            self._drop(descriptor, refusal.kind, str(refusal))
        except EOFError:
            self._drop(descriptor, "closed", GONE)
        except OSError as error:  # also a certificate that is none of the authority's
            kind: RefusalKind = "tls" if isinstance(error, ssl.SSLError) else "lost"
            self._drop(descriptor, kind, f"{error.strerror or error}")
        else:
            if is_done:
                self._poll.unregister(descriptor)
                return self._pop(descriptor)
            self._poll.modify(descriptor, arrival.handshake.events)
            if descriptor in self._strangers and arrival.handshake.has_knocked:
                self._knocked[descriptor] = self._strangers.pop(descriptor)
        return None

    # ── departures ──
    def _drop_late(self, now: float) -> None:
        late = [descriptor for descriptor, arrival in self._knocked.items() if now >= arrival.deadline]
        for descriptor, arrival in self._strangers.items():
            if now < arrival.deadline:
                break
            late.append(descriptor)
        for descriptor in late:
            self._drop(descriptor, "silent", SILENT)

    def _drop_surplus(self, crowd: dict[int, Arrival]) -> None:
        while len(crowd) > self._limit:
            self._drop_random(crowd)

    def _drop_random(self, crowd: dict[int, Arrival]) -> None:
        self._drop(secrets.choice(list(crowd)), "dropped", f"{len(crowd)} connections were in their handshake")

    def _drop(self, descriptor: int, kind: RefusalKind, reason: str) -> None:
        arrival = self._pop(descriptor)
        self._refuse(kind, reason, arrival.address)
        self._poll.unregister(descriptor)
        if kind == "dropped":
            arrival.abort()
        else:
            arrival.close()

    def _pop(self, descriptor: int) -> Arrival:
        return (self._knocked if descriptor in self._knocked else self._strangers).pop(descriptor)

    def close(self) -> None:
        """Closes all connections that are still in their handshake."""
        for arrival in (*self._strangers.values(), *self._knocked.values()):
            with contextlib.suppress(OSError):
                arrival.close()
        self._strangers.clear()
        self._knocked.clear()
        self._poll.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
