"""How a link begins: one side listens, on the address that it is told, and the other one connects.

The connecting side tries again until it has a link. Leaves to the handshake what is said, and to the pool how many
connections a listener speaks with at a time.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import ssl
import struct
import time
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from penstock.bridge.handshake import (
    ONE_SIDED_TLS,
    WRONG_SECRET,
    ConnectorHandshake,
    Handshake,
    KnockLog,
    ListenerHandshake,
    require_secret,
)
from penstock.bridge.handshake_pool import GONE, HANDSHAKE_S, HEAD_NBYTES, READABLE, Arrival, HandshakePool
from penstock.bridge.link import Link
from penstock.bridge.link_errors import BridgeRefused, RefusalKind
from penstock.bridge.link_spec import LinkSpec, Tls
from penstock.bridge.wire import (
    RECORD_TYPES,
    RECORD_VERSION,
    OneSidedTls,
    PlainWire,
    TlsWire,
    record_nbytes,
    require_knocks,
)
from penstock.errors import Timeout

if TYPE_CHECKING:
    from typing_extensions import Self

CONNECT_AGAIN_S = 0.05
STRANGER, UNRECOGNIZED = "CALLBACK_FAILED", "TLSV1_UNRECOGNIZED_NAME"  # of an ssl.SSLError: ClientHello has no knock
REASON_LENGTH = 4096  # characters that are kept of a refusal
LENGTH = struct.Struct("<I")  # of a message of the handshake, before it


class HandshakeConnection:
    """A connection in its handshake: messages to bytes and back."""

    def __init__(self, wire: PlainWire | TlsWire, handshake: Handshake, address: tuple[str, int] | None) -> None:
        self.wire = wire
        self.handshake = handshake
        self.address = address
        self.deadline = time.monotonic() + HANDSHAKE_S  # of the whole handshake
        self._unsent = memoryview(b"")
        self._read = bytearray()
        self._wanted = LENGTH.size
        self._has_length = False

    def advance(self) -> bool:
        """Goes on without waiting. Returns whether the handshake is done, and all of it sent.

        Raises BridgeRefused, EOFError where the other side has gone, and OSError where the connection is lost.
        """
        try:
            while self._flush() and self.handshake.remote is None:
                message = self._receive()
                if message is None:
                    return False
                self.handshake.receive(message)
        except BridgeRefused:
            self._send_refusal()
            raise
        except ssl.SSLError as error:
            if error.reason == STRANGER:
                raise BridgeRefused.of("secret", WRONG_SECRET) from None
            raise
        except OneSidedTls:
            if isinstance(self.wire, TlsWire):
                self.wire = self.wire.plain  # the other side reads no records
            refusal = self.handshake.refused("tls", ONE_SIDED_TLS)
            self._send_refusal()
            raise refusal from None
        return self.handshake.remote is not None and self._flush()

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
                raise BridgeRefused.of(
                    "foreign",
                    f"a message of {self._wanted} bytes, where one of up to {self.handshake.max_nbytes} is expected",
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
    def has_knocked(self) -> bool:
        """Whether the first bytes of a connector came from a process that has the secret."""
        return self.wire.has_knocked or self.handshake.has_knocked

    @property
    def events(self) -> int:
        """For epoll."""
        is_writing = bool(self._unsent) or self.wire.wants_write
        return READABLE | (select.EPOLLOUT if is_writing else 0)

    def close(self) -> None:
        """The other side may read first what it was told."""
        self.wire.shut_down_writing()
        self.wire.close()

    def link(self) -> Link:
        handshake = self.handshake
        assert handshake.spec is not None and handshake.offer is not None and handshake.remote is not None
        remote = msgspec.structs.replace(handshake.remote, address=self.address)
        return Link(handshake.spec, remote, handshake.offer, self.wire)


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
        self._knocks = KnockLog(secret)
        self._context = None if tls is None else tls.context(is_server=True)
        if self._context is not None:
            require_knocks(self._context, self._knocks.is_new)
        host, port = address
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, LENGTH.size if tls is None else HEAD_NBYTES)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self.refusals: Counter[RefusalKind] = Counter()  # of connections
        self.last_refusal = ""

    def accept(self, *awaited: LinkSpec, timeout: float | None = None) -> Link:
        """Waits for the other side of one of these links, and returns the link. Others are refused, in words, counted,
        and waited past.

        Raises:
            Timeout: none came in time; the text has the last refusal.
        """
        if not awaited:
            raise ValueError("say which links are awaited")

        def begin(arrival: Arrival) -> HandshakeConnection:
            wire = _wire(arrival.connection, self._context)
            handshake = ListenerHandshake(awaited, self._secret, knocks=self._knocks)
            connection = HandshakeConnection(wire, handshake, arrival.address)
            connection.deadline = arrival.deadline
            return connection

        with HandshakePool(self._socket, self._measure, begin, self._count_refusal) as pool:
            arrival = pool.wait(math.inf if timeout is None else time.monotonic() + timeout)
        if arrival is None:
            names = ", ".join(f"'{spec.link}'" for spec in awaited)
            refusal = f"; the last connection was refused: {self.last_refusal}" if self.last_refusal else ""
            raise Timeout(f"no other side of {names} came to {self.address} in time{refusal}")
        assert isinstance(arrival.handshake, HandshakeConnection), "the pool has begun it"
        return arrival.handshake.link()  # after the pool is closed: a link needs descriptors

    def _measure(self, head: bytes) -> int:
        if self._context is not None:
            return record_nbytes(head)
        return LENGTH.size + int(LENGTH.unpack_from(head)[0])

    def _count_refusal(self, kind: RefusalKind, reason: str, address: tuple[str, int]) -> None:
        self.refusals[kind] += 1
        self.last_refusal = f"{reason[:REASON_LENGTH]} ({address[0]}:{address[1]})"

    def close(self) -> None:
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
    context = None if tls is None else tls.context(is_server=False)
    deadline = time.monotonic() + timeout
    reason = "no time was given"
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection = socket.create_connection(address, min(left, HANDSHAKE_S))
        except OSError as error:
            reason = str(error)
        else:
            handshake = ConnectorHandshake(spec, secret)
            wire = _wire(connection, context, knock=handshake.knock)
            link = _shake(HandshakeConnection(wire, handshake, address), deadline)
            if isinstance(link, Link):
                return link
            reason = link
        time.sleep(max(0.0, min(CONNECT_AGAIN_S, deadline - time.monotonic())))
    raise Timeout(f"no link '{spec.link}' with {address[0]}:{address[1]} within {timeout:g} s: {reason}")


def _shake(connection: HandshakeConnection, deadline: float) -> Link | str:
    """Returns the link, or why there is none yet. Raises BridgeRefused."""
    deadline = min(deadline, connection.deadline)
    try:
        with select.epoll() as poll:
            poll.register(connection.wire.fileno(), connection.events)
            while not connection.advance():
                left = deadline - time.monotonic()
                if left <= 0:
                    connection.wire.close()
                    return "the listener said nothing in time"
                poll.modify(connection.wire.fileno(), connection.events)
                poll.poll(left)
        return connection.link()
    except ssl.SSLEOFError:
        connection.wire.close()
        return GONE
    except ssl.SSLError as error:  # it would be the same the next time
        connection.wire.close()
        if error.reason == UNRECOGNIZED:
            raise BridgeRefused.of("secret", f"the listener refuses: {WRONG_SECRET}") from None
        reason = getattr(error, "verify_message", "") or error.reason or error
        raise BridgeRefused.of("tls", f"TLS: {reason}") from None
    except (EOFError, OSError) as error:
        connection.wire.close()
        return str(error)
    except BridgeRefused:
        connection.wire.close()
        raise


def _wire(connection: socket.socket, context: ssl.SSLContext | None, knock: bytes | None = None) -> PlainWire | TlsWire:
    """`knock`: of the connector; None: this is the listener's side."""
    return PlainWire(connection) if context is None else TlsWire(connection, context, knock=knock)
