"""Connections of strangers to a listener: as many as a test says, opened again as soon as they are closed."""

import contextlib
import resource
import selectors
import socket
import struct
import time
from collections.abc import Iterator

import msgspec

from penstock.bridge.handshake import MAGIC, Hello
from tests.conftest import spawn

PER_PROCESS = 5_000  # connections
DRIP_S = 0.1  # between two bytes of a connection of 1,000 or fewer: of more, each drips as much more slowly
SELECT_S = 0.02
FLOOD_S = 240.0  # the watchdog of a process


def first_hello(proof: bytes = b"") -> bytes:
    """The first bytes of a connector without TLS. `proof`: its knock."""
    hello = msgspec.msgpack.encode(Hello(MAGIC, bytes(32), proof=proof))
    return struct.pack("<I", len(hello)) + hello


class Flood:
    """Keeps `count` connections open. Each sends `data`: all of it, or a byte each DRIP_S."""

    def __init__(self, address: tuple[str, int], count: int, data: bytes, is_dripping: bool) -> None:
        self._address, self._count, self._data, self._is_dripping = address, count, data, is_dripping
        self._selector = selectors.DefaultSelector()
        self._sent: dict[socket.socket, int] = {}
        self._drip_s = DRIP_S * max(1.0, count / 1_000)
        self._drip_at = 0.0

    def run(self) -> None:
        while True:
            while len(self._sent) < self._count and self._open():
                pass
            for key, mask in self._selector.select(SELECT_S):
                assert isinstance(key.fileobj, socket.socket)
                self._advance(key.fileobj, mask)
            if self._is_dripping and time.monotonic() >= self._drip_at:
                self._drip_at = time.monotonic() + self._drip_s
                for connection in self._sent:
                    self._send(connection, 1)

    def _open(self) -> bool:
        connection = socket.socket()
        connection.setblocking(False)
        try:
            connection.connect(self._address)
        except BlockingIOError:
            pass
        except OSError:  # no port is free at the moment
            connection.close()
            return False
        speaks = bool(self._data) and not self._is_dripping
        self._selector.register(connection, selectors.EVENT_READ | (selectors.EVENT_WRITE if speaks else 0))
        self._sent[connection] = 0
        return True

    def _send(self, connection: socket.socket, nbytes: int) -> None:
        sent = self._sent[connection]
        with contextlib.suppress(OSError):
            self._sent[connection] += connection.send(self._data[sent : sent + nbytes])

    def _advance(self, connection: socket.socket, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._send(connection, len(self._data))
            self._selector.modify(connection, selectors.EVENT_READ)
        if mask & selectors.EVENT_READ:
            with contextlib.suppress(OSError):
                if connection.recv(4096):
                    return
            self._selector.unregister(connection)
            del self._sent[connection]
            connection.close()


def run_flood(address: tuple[str, int], count: int, data: bytes, is_dripping: bool) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    Flood(address, count, data, is_dripping).run()


@contextlib.contextmanager
def flood(address: tuple[str, int], count: int, data: bytes = b"", *, is_dripping: bool = False) -> Iterator[None]:
    """Strangers connect until the block ends, from processes of their own."""
    with contextlib.ExitStack() as processes:
        for first in range(0, count, PER_PROCESS):
            part = min(PER_PROCESS, count - first)
            processes.enter_context(spawn(run_flood, address, part, data, is_dripping, within=FLOOD_S))
        yield
