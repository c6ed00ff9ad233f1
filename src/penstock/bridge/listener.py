"""How a link begins: one side listens on an address, and the other side connects.

The connecting side tries until the link has begun. From then on, a thread of the listener accepts the connections over
which the link goes on. Leaves the messages to the handshake, and the number of concurrent connections to the pool.
"""

from __future__ import annotations

import math
import select
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from penstock.bridge.handshake import WRONG_SECRET, ConnectorHandshake, KnockLog, ListenerHandshake, require_secret
from penstock.bridge.handshake_connection import LENGTH, HandshakeConnection
from penstock.bridge.handshake_pool import GONE, HANDSHAKE_S, HEAD_NBYTES, Arrival, HandshakePool
from penstock.bridge.link import Link
from penstock.bridge.link_errors import BridgeRefused, RefusalKind
from penstock.bridge.link_spec import LinkSpec, Tls
from penstock.bridge.resumption import (
    RETRY_S,
    AcceptingThread,
    ConnectorResumer,
    ListenerResumer,
    NewConnection,
    ResumeOffer,
)
from penstock.bridge.wire import PlainWire, TlsWire, record_nbytes, require_knocks
from penstock.errors import Timeout

if TYPE_CHECKING:
    from typing_extensions import Self

UNRECOGNIZED = "TLSV1_UNRECOGNIZED_NAME"  # of an ssl.SSLError: the listener has refused the knock
REASON_LENGTH = 4096  # characters that are kept of a refusal


class Listener:
    """Listens for the other sides of links.

    Args:
        address: of the local node, as the remote node reaches it, and a port; 0: a free port (`listener.address`).
        secret: 32 bytes, equal at both sides.
        tls: the local side's certificates; None: packets are neither encrypted nor signed.

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
        self._links: dict[bytes, ListenerResumer] = {}  # that have begun, by session
        self._thread = AcceptingThread(lambda interrupt: self._accept((), math.inf, interrupt))

    def accept(self, *awaited: LinkSpec, timeout: float | None = None) -> Link:
        """Waits for the remote side of one of `specs`, and returns the link. Refuses and counts all other connections.

        Raises:
            Timeout: none came in time; the text has the last refusal.
        """
        if not awaited:
            raise ValueError("say which links are awaited")
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with self._thread.paused():  # it would not know what is awaited
            link = self._accept(awaited, deadline)
        self._thread.start()
        if link is None:
            names = ", ".join(f"'{spec.link}'" for spec in awaited)
            refusal = f"; the last connection was refused: {self.last_refusal}" if self.last_refusal else ""
            raise Timeout(f"no other side of {names} came to {self.address} in time{refusal}")
        return link

    def _accept(self, awaited: tuple[LinkSpec, ...], deadline: float, interrupt: int | None = None) -> Link | None:
        """Gives connections of links that go on to those links. Returns an awaited link; None: none came before the
        deadline, or `interrupt` became readable."""

        def begin(arrival: Arrival) -> HandshakeConnection:
            wire = _wire(arrival.connection, self._context)
            handshake = ListenerHandshake(awaited, self._secret, knocks=self._knocks, links=self._links)
            connection = HandshakeConnection(wire, handshake, arrival.address)
            connection.deadline = arrival.deadline
            return connection

        connection: HandshakeConnection | None = None
        with HandshakePool(self._socket, self._measure, begin, self._count_refusal, interrupt) as pool:
            while connection is None and (arrival := pool.wait(deadline)) is not None:
                assert isinstance(arrival.handshake, HandshakeConnection), "the pool has begun it"
                if not _resume(arrival.handshake):
                    connection = arrival.handshake
        return None if connection is None else self._begin_link(connection)  # the pool has left descriptors

    def _begin_link(self, connection: HandshakeConnection) -> Link:
        handshake = connection.handshake
        assert handshake.spec is not None, "the handshake is done"
        resumer = ListenerResumer(handshake.spec.link, partial(self._links.pop, handshake.session, None))
        self._links[handshake.session] = resumer
        return connection.link(resumer)

    def _measure(self, head: bytes) -> int:
        if self._context is not None:
            return record_nbytes(head)
        return LENGTH.size + int(LENGTH.unpack_from(head)[0])

    def _count_refusal(self, kind: RefusalKind, reason: str, address: tuple[str, int]) -> None:
        self.refusals[kind] += 1
        self.last_refusal = f"{reason[:REASON_LENGTH]} ({address[0]}:{address[1]})"

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


def _resume(connection: HandshakeConnection) -> bool:
    """Gives the connection of a link that goes on to the thread of the link. Returns False for that of a new link."""
    handshake = connection.handshake
    if not isinstance(handshake, ListenerHandshake) or handshake.resume_offer is None:
        return False
    assert handshake.resumer is not None and handshake.suspension is not None, "the handshake is done"
    new = NewConnection(connection.wire, handshake.resume_offer.received)
    if not handshake.resumer.resume(handshake.suspension, new):
        connection.wire.close(is_aborted=True)  # a connection that is closed looks like the end of this process
    return True


def connect(
    address: tuple[str, int], spec: LinkSpec, *, secret: bytes, tls: Tls | None = None, timeout: float = 30.0
) -> Link:
    """Connects to a listener, and returns the local side of a link. Tries again while no process listens.

    Args:
        address: of the `Listener`.
        spec: the local side.
        secret: 32 bytes that the remote side has, too.
        tls: the local side's certificates, if the listener has some.
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
    handshake = ConnectorHandshake(spec, secret, resume_offer=offer)
    wire = _wire(connection, context, knock=handshake.knock)
    return _shake(HandshakeConnection(wire, handshake, address), deadline)


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
        poll = select.poll()  # needs no descriptor: the process may have no other one left
        while not connection.advance():
            left = deadline - time.monotonic()
            if left <= 0:
                connection.wire.close()
                return TimeoutError("the listener said nothing in time")
            poll.register(connection.wire.fileno(), connection.events)
            poll.poll(left * 1e3)
        return connection
    except ssl.SSLEOFError:
        connection.wire.close()
        return EOFError(GONE)
    except ssl.SSLError as error:  # it would be the same the next time
        connection.wire.close()
        if error.reason == UNRECOGNIZED:
            raise BridgeRefused.of("secret", f"the listener refuses: {WRONG_SECRET}") from None
        reason = getattr(error, "verify_message", "") or error.reason or error
        raise BridgeRefused.of("tls", f"TLS: {reason}") from None
    except (EOFError, OSError) as error:
        connection.wire.close()
        return error
    except BridgeRefused:
        connection.wire.close()
        raise


def _wire(connection: socket.socket, context: ssl.SSLContext | None, knock: bytes | None = None) -> PlainWire | TlsWire:
    """`knock`: of the connector; None: this is the listener's side."""
    return PlainWire(connection) if context is None else TlsWire(connection, context, knock=knock)
