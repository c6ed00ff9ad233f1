"""ZeroMQ over `ipc://`: publish/subscribe there, push/pull back.

The publisher is told to wait at its high-water mark instead of dropping (XPUB_NODROP), and has seen every subscription
before the first frame. Frames of 64 KB and more are sent and received without a copy of ZeroMQ's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import impls
from bench.impls import Meet, Seat, Unavailable, Wires

COPY_BELOW_NBYTES = 65536  # pyzmq's own threshold


def check() -> None:
    try:
        import zmq  # noqa: F401
    except ImportError:
        raise Unavailable("pyzmq is not installed") from None


def lay(receivers: int, scratch: Path) -> Wires:
    addresses = (f"ipc://{scratch}/frames", f"ipc://{scratch}/replies")
    return Wires([addresses] * (receivers + 1))


class Sender(impls.Sender):
    def __init__(self, addresses: tuple[str, str], seat: Seat, meet: Meet) -> None:
        import zmq

        self._context = zmq.Context()
        self._frames = self._context.socket(zmq.XPUB)
        self._frames.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._frames.setsockopt(zmq.XPUB_NODROP, 1)
        self._frames.bind(addresses[0])
        self._replies = self._context.socket(zmq.PULL)
        self._replies.bind(addresses[1])
        self._receivers = seat.receivers
        self._when_bound([end.getsockopt_string(zmq.LAST_ENDPOINT) for end in (self._frames, self._replies)])
        for _ in range(seat.receivers):
            self._frames.recv()  # one subscription of each receiver

    def _when_bound(self, addresses: list[str]) -> None:
        """Receivers know the addresses."""

    def expect(self, nbytes: int) -> None:
        self.send = self._frames.send if nbytes < COPY_BELOW_NBYTES else self._send_uncopied

    def _send_uncopied(self, frame: bytes) -> None:
        self._frames.send(frame, copy=False)

    def gather(self) -> None:
        for _ in range(self._receivers):
            self._replies.recv()

    def close(self) -> None:
        self._context.destroy(linger=0)


class Receiver(impls.Receiver):
    def __init__(self, addresses: tuple[str, str], seat: Seat, meet: Meet) -> None:
        import zmq

        self._context = zmq.Context()
        self._replies = self._context.socket(zmq.PUSH)
        self._replies.connect(addresses[1])
        self._frames = self._context.socket(zmq.SUB)
        self._frames.setsockopt(zmq.SUBSCRIBE, b"")
        self._frames.connect(addresses[0])
        self.reply = self._replies.send

    def expect(self, nbytes: int) -> None:
        self.receive = self._frames.recv if nbytes < COPY_BELOW_NBYTES else self._receive_uncopied

    def _receive_uncopied(self) -> Any:
        return self._frames.recv(copy=False).buffer

    def close(self) -> None:
        self._context.destroy(linger=0)
