"""Both sides of a link in one process: over a socket pair, each in a thread of its own."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

from penstock.bridge import Link, LinkDied, LinkSpec
from penstock.bridge.handshake import ConnectorHandshake, ListenerHandshake
from penstock.bridge.handshake_connection import HandshakeConnection
from penstock.bridge.packets import packet_head
from penstock.bridge.wire import PlainWire

SECRET = bytes(range(32))
WITHIN = 10.0  # seconds; a watchdog


def joined(
    home: LinkSpec, away: LinkSpec, make_wire: Callable[[socket.socket], PlainWire] = PlainWire
) -> tuple[Link, Link]:
    """Returns both sides of a link over a socket pair, after the handshake."""
    first, second = socket.socketpair()
    listening = HandshakeConnection(make_wire(first), ListenerHandshake([home], SECRET), None)
    connecting = HandshakeConnection(make_wire(second), ConnectorHandshake(away, SECRET), None)
    while not (connecting.advance() and listening.advance()):
        listening.advance()
    return listening.link(), connecting.link()


def packet(kind: int, lane: int, source: int, payload: bytes = b"") -> bytes:
    return packet_head(kind, lane, source, payload, len(payload)) + payload


class RunningLink:
    """A link that a thread runs."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._end: str | BaseException = "it still runs"
        self._thread = threading.Thread(target=self._run, name=link.spec.name)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._end = self.link.run()
        except BaseException as error:
            self._end = error

    def outcome(self, within: float = WITHIN) -> str:
        """What `run` has returned. Raises what it has raised, or fails when it does not end."""
        self._thread.join(within)
        assert not self._thread.is_alive(), f"'{self.link.spec.name}' still runs after {within:g} s"
        if isinstance(self._end, BaseException):
            raise self._end
        return self._end

    def death(self, within: float = WITHIN) -> LinkDied:
        try:
            text = self.outcome(within)
        except LinkDied as death:
            return death
        raise AssertionError(f"'{self.link.spec.name}' has ended in peace: {text}")

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        self.link.stop("the test is over")
        self._thread.join(WITHIN)
        assert not self._thread.is_alive(), f"'{self.link.spec.name}' cannot be stopped"
        self.link.close()


@contextlib.contextmanager
def running(home: LinkSpec, away: LinkSpec) -> Iterator[tuple[RunningLink, RunningLink]]:
    """Both sides of a link run until the block ends."""
    links = [RunningLink(link) for link in joined(named(home, "home"), named(away, "away"))]
    try:
        yield links[0], links[1]
    finally:
        for side in links:
            side.link.stop("the test is over")
        for side in links:
            side.end()


def named(spec: LinkSpec, name: str) -> LinkSpec:
    return spec if spec.name else replace(spec, name=name)
