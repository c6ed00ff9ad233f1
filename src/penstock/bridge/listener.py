"""How a link begins: one side listens, on the address that it is told, and the other one connects.

A listener speaks with several connections at a time, each of which has HANDSHAKE_S: one that says nothing, or is
refused, holds no other one up. When a link has begun, a thread accepts the connections over which it goes on. Leaves to
the handshake what is said.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from penstock.bridge.handshake import ConnectorHandshake, Handshake, ListenerHandshake, require_secret
from penstock.bridge.link import Link
from penstock.bridge.link_errors import BridgeRefused
from penstock.bridge.link_spec import LinkSpec, Tls
from penstock.bridge.resumption import (
    RETRY_S,
    AcceptingThread,
    ConnectorResumer,
    ListenerResumer,
    NewConnection,
    ResumeOffer,
    Resumer,
)
from penstock.bridge.wire import RECORD_TYPES, RECORD_VERSION, OneSidedTls, PlainWire, TlsWire
from penstock.errors import Timeout

if TYPE_CHECKING:
    from typing_extensions import Self

HANDSHAKE_S = 2.0  # for all of its messages
MAX_HANDSHAKES = 16  # at a time; further connections wait in the kernel
LENGTH = struct.Struct("<I")  # of a message of the handshake, before it
ONE_SIDED_TLS = "one side speaks TLS and the other one does not: give certificates to both, or to neither"
SILENT = "it said too little in time"
GONE = "it closed the connection"


class HandshakeConnection:
    """A connection in its handshake: messages to bytes and back."""

    def __init__(self, wire: PlainWire | TlsWire, handshake: Handshake, address: tuple[str, int] | None) -> None:
        self.wire = wire
        self.handshake = handshake
        self.address = address
        self.deadline = time.monotonic() + HANDSHAKE_S
        self._unsent = memoryview(b"")
        self._read = bytearray()
        self._wanted = LENGTH.size
        self._has_length = False

    def advance(self) -> bool:
        """Goes on without waiting. Returns whether the handshake is done, and all of it sent.

        Raises BridgeRefused, EOFError where the other side has gone, and OSError where the connection is lost.
        """
        try:
            while self._flush() and not self.handshake.is_done:
                message = self._receive()
                if message is None:
                    return False
                self.handshake.receive(message)
        except BridgeRefused:
            self._send_refusal()
            raise
        except OneSidedTls:
            if isinstance(self.wire, TlsWire):
                self.wire = self.wire.plain  # the other side reads no records
            refusal = self.handshake.refused(ONE_SIDED_TLS)
            self._send_refusal()
            raise refusal from None
        return self.handshake.is_done and self._flush()

    def _send_refusal(self) -> None:
        with contextlib.suppress(OSError):  # the other side has refused, and gone
            self._flush()

    def _receive(self) -> bytes | None:
        """Returns the next message; None: it is not there yet. Reads no byte beyond it: packets may follow."""
        while True:
            while len(self._read) < self._wanted:
                part = bytearray(self._wanted - len(self._read))
                count = self.wire.recv_into(memoryview(part))
                if count is None:
                    return None
                if count == 0:
                    raise EOFError(GONE)
                self._read += part[:count]
            taken, self._read = bytes(self._read), bytearray()
            self._has_length = not self._has_length
            if not self._has_length:
                self._wanted = LENGTH.size
                return taken
            (self._wanted,) = LENGTH.unpack(taken)
            if taken[0] in RECORD_TYPES and taken[1] == RECORD_VERSION:
                raise OneSidedTls
            if not 1 <= self._wanted <= self.handshake.max_nbytes:
                raise BridgeRefused(
                    f"a message of {self._wanted} bytes, where one of up to {self.handshake.max_nbytes} is expected"
                )

    def _flush(self) -> bool:
        """Returns whether all messages have been sent."""
        outbox = self.handshake.outbox
        if outbox:
            framed = b"".join(LENGTH.pack(len(message)) + message for message in outbox)
            outbox.clear()
            self._unsent = memoryview(bytes(self._unsent) + framed)
        while self._unsent:
            count = self.wire.send([self._unsent])
            if not count:
                break
            self._unsent = self._unsent[count:]
        self.wire.flush()
        return not self._unsent and not self.wire.wants_write

    @property
    def events(self) -> int:
        """For epoll."""
        is_writing = bool(self._unsent) or self.wire.wants_write
        return select.EPOLLIN | select.EPOLLRDHUP | (select.EPOLLOUT if is_writing else 0)

    def link(self, resumer: Resumer | None = None) -> Link:
        handshake = self.handshake
        assert handshake.spec is not None and handshake.offer is not None and handshake.remote is not None
        remote = msgspec.structs.replace(handshake.remote, address=self.address)
        return Link(handshake.spec, remote, handshake.offer, self.wire, resumer)


class Listener:
    """Listens for the other sides of links.

    Args:
        address: of this node, as the other one reaches it, and a port; 0: any that is free (`listener.address`).
        secret: 32 bytes that the other side has, too.
        tls: this side's certificates; None: what crosses is neither hidden nor signed.

    Raises:
        ValueError: the secret has another length.
        OSError: the address is not of this machine, or the port is taken.

    Examples:
        >>> with Listener(("127.0.0.1", 0), secret=bytes(32)) as listener, ThreadPoolExecutor() as threads:
        ...     spec = LinkSpec("group 2", epoch=3, name="node 1")
        ...     away = threads.submit(connect, listener.address, spec, secret=bytes(32))
        ...     with listener.accept(LinkSpec("group 2", epoch=3, name="node 0"), timeout=30) as home:
        ...         home.remote.name, away.result().remote.name
        ...     away.result().close()
        ('node 1', 'node 0')
    """

    def __init__(self, address: tuple[str, int], *, secret: bytes, tls: Tls | None = None) -> None:
        require_secret(secret)
        self._secret = secret
        self._context = None if tls is None else tls.context(is_server=True)
        host, port = address
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server((host, port), family=family, backlog=MAX_HANDSHAKES)
        self._socket.setblocking(False)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self.refusals: Counter[str] = Counter()  # of connections, by their reasons: see `last_refusal` for a whole one
        self.last_refusal = ""
        self._links: dict[bytes, ListenerResumer] = {}  # that have begun, by session
        self._thread = AcceptingThread(lambda: self._accept((), None))

    def accept(self, *awaited: LinkSpec, timeout: float | None = None) -> Link:
        """Waits for the other side of one of these links, and returns the link. Others are refused, in words, counted,
        and waited past.

        Raises:
            Timeout: none came in time; the text has the last refusal.
        """
        if not awaited:
            raise ValueError("say which links are awaited")
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._thread.paused():  # it would not know what is awaited
            link = self._accept(awaited, deadline)
        assert link is not None, "only the thread is interrupted"
        self._thread.start()
        return link

    def _accept(self, awaited: tuple[LinkSpec, ...], deadline: float | None) -> Link | None:
        waiting: dict[int, HandshakeConnection] = {}
        with select.epoll() as poll:
            try:
                return self._accept_next(awaited, deadline, poll, waiting)
            finally:
                for connection in waiting.values():
                    connection.wire.close()

    def _accept_next(
        self,
        awaited: tuple[LinkSpec, ...],
        deadline: float | None,
        poll: select.epoll,
        waiting: dict[int, HandshakeConnection],
    ) -> Link | None:
        """Returns None if it is interrupted, as it awaits no new link."""
        listening = self._socket.fileno()
        poll.register(listening, select.EPOLLIN)
        if not awaited:
            poll.register(self._thread.interrupt, select.EPOLLIN)
        while True:
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                names = ", ".join(f"'{spec.link}'" for spec in awaited)
                refusal = f"; the last connection was refused: {self.last_refusal}" if self.last_refusal else ""
                raise Timeout(f"no other side of {names} came to {self.address} in time{refusal}")
            for descriptor, connection in list(waiting.items()):
                if now >= connection.deadline:
                    self._drop(poll, waiting, descriptor, SILENT)
            poll.modify(listening, select.EPOLLIN if len(waiting) < MAX_HANDSHAKES else 0)
            ends = [connection.deadline for connection in waiting.values()]
            if deadline is not None:
                ends.append(deadline)
            for descriptor, _ in poll.poll(max(0.0, min(ends) - now) if ends else None):
                if descriptor == self._thread.interrupt:
                    return None
                if descriptor == listening:
                    self._begin(awaited, poll, waiting)
                elif (link := self._advance(poll, waiting, descriptor)) is not None:
                    return link

    def _begin(
        self, awaited: tuple[LinkSpec, ...], poll: select.epoll, waiting: dict[int, HandshakeConnection]
    ) -> None:
        try:
            connection, address = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return
        wire = _wire(connection, self._context, is_server=True)
        handshake = ListenerHandshake(awaited, self._secret, links=self._links)
        handshaking = HandshakeConnection(wire, handshake, address[:2])
        waiting[wire.fileno()] = handshaking
        poll.register(wire.fileno(), handshaking.events)

    def _advance(self, poll: select.epoll, waiting: dict[int, HandshakeConnection], descriptor: int) -> Link | None:
        connection = waiting[descriptor]
        try:
            if connection.advance():
                del waiting[descriptor]
                poll.unregister(descriptor)
                return self._begin_link(connection)
            poll.modify(descriptor, connection.events)
        except BridgeRefused as refusal:
            self._drop(poll, waiting, descriptor, str(refusal))
        except EOFError:
            self._drop(poll, waiting, descriptor, GONE)
        except OSError as error:  # also a certificate that is none of the authority's
            self._drop(poll, waiting, descriptor, f"{error.strerror or error}")
        return None

    def _begin_link(self, connection: HandshakeConnection) -> Link | None:
        """Returns a link that begins. A connection of a link that goes on is given to the thread of that link."""
        handshake = connection.handshake
        if isinstance(handshake, ListenerHandshake) and handshake.resume_offer is not None:
            assert handshake.resumer is not None and handshake.suspension is not None
            new = NewConnection(connection.wire, handshake.resume_offer.received)
            if not handshake.resumer.resume(handshake.suspension, new):
                connection.wire.close()
            return None
        assert handshake.spec is not None, "the handshake is done"
        resumer = ListenerResumer(handshake.spec.link, partial(self._links.pop, handshake.session, None))
        self._links[handshake.session] = resumer
        return connection.link(resumer)

    def _drop(self, poll: select.epoll, waiting: dict[int, HandshakeConnection], descriptor: int, reason: str) -> None:
        connection = waiting.pop(descriptor)
        host, port = connection.address or ("", 0)
        self.refusals[reason.partition(":")[0][:80]] += 1
        self.last_refusal = f"{reason} ({host}:{port})"
        poll.unregister(descriptor)
        connection.wire.shut_down_writing()
        connection.wire.close()

    def close(self) -> None:
        """Links that have begun stay, and end with their connections."""
        self._thread.close()
        for link in list(self._links.values()):
            link.end("its listener is closed")
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(
    address: tuple[str, int], spec: LinkSpec, *, secret: bytes, tls: Tls | None = None, timeout: float = 30.0
) -> Link:
    """Returns this side of a link; the other side listens there. Tries again while no process listens, or one goes.

    Args:
        address: of the `Listener`.
        spec: this side.
        secret: 32 bytes that the other side has, too.
        tls: this side's certificates, if the listener has some.
        timeout: seconds for all of it.

    Raises:
        BridgeRefused: the two sides do not fit; the text has every difference.
        Timeout: no link in time; the text says why not.

    Examples:
        >>> with Listener(("127.0.0.1", 0), secret=bytes(32)) as listener, ThreadPoolExecutor() as threads:
        ...     spec = LinkSpec("group 2", epoch=3, name="node 1")
        ...     away = threads.submit(connect, listener.address, spec, secret=bytes(32))
        ...     with listener.accept(LinkSpec("group 2", epoch=3, name="node 0"), timeout=30) as home:
        ...         home.remote.name, away.result().remote.name
        ...     away.result().close()
        ('node 1', 'node 0')
    """
    require_secret(secret)
    dial = partial(_dial, address, spec, secret, None if tls is None else tls.context(is_server=False))
    deadline = time.monotonic() + timeout
    reason: object = "no time was given"
    while time.monotonic() < deadline:
        connection = dial(None, deadline)
        if isinstance(connection, HandshakeConnection):
            return connection.link(ConnectorResumer(connection.handshake.session, partial(_dial_again, dial)))
        reason = connection
        time.sleep(max(0.0, min(RETRY_S, deadline - time.monotonic())))
    raise Timeout(f"no link '{spec.link}' with {address[0]}:{address[1]} within {timeout:g} s: {reason}")


def _dial(
    address: tuple[str, int],
    spec: LinkSpec,
    secret: bytes,
    context: ssl.SSLContext | None,
    offer: ResumeOffer | None,
    deadline: float,
) -> HandshakeConnection | Exception:
    """Returns a connection after its handshake, or why there is none yet. Raises BridgeRefused."""
    try:
        connection = socket.create_connection(address, min(deadline - time.monotonic(), HANDSHAKE_S))
    except (OSError, ValueError) as error:  # ValueError: the deadline has passed just now
        return error
    wire = _wire(connection, context, is_server=False)
    return _shake(HandshakeConnection(wire, ConnectorHandshake(spec, secret, resume_offer=offer), address), deadline)


def _dial_again(
    dial: Callable[[ResumeOffer, float], HandshakeConnection | Exception], offer: ResumeOffer, deadline: float
) -> NewConnection | Exception:
    """Of a link that goes on."""
    connection = dial(offer, deadline)
    if isinstance(connection, Exception):
        return connection
    assert connection.handshake.resume_offer is not None, "the handshake is done"
    return NewConnection(connection.wire, connection.handshake.resume_offer.received)


def _shake(connection: HandshakeConnection, deadline: float) -> HandshakeConnection | Exception:
    """Returns the connection, or why there is none yet. Raises BridgeRefused."""
    deadline = min(deadline, connection.deadline)
    try:
        with select.epoll() as poll:
            poll.register(connection.wire.fileno(), connection.events)
            while not connection.advance():
                left = deadline - time.monotonic()
                if left <= 0:
                    connection.wire.close()
                    return TimeoutError("the listener said nothing in time")
                poll.modify(connection.wire.fileno(), connection.events)
                poll.poll(left)
        return connection
    except ssl.SSLEOFError:
        connection.wire.close()
        return EOFError(GONE)
    except ssl.SSLError as error:  # it would be the same the next time
        connection.wire.close()
        reason = getattr(error, "verify_message", "") or error.reason or error
        raise BridgeRefused(f"TLS: {reason}") from None
    except (EOFError, OSError) as error:
        connection.wire.close()
        return error
    except BridgeRefused:
        connection.wire.close()
        raise


def _wire(connection: socket.socket, context: ssl.SSLContext | None, *, is_server: bool) -> PlainWire | TlsWire:
    return PlainWire(connection) if context is None else TlsWire(connection, context, is_server=is_server)
