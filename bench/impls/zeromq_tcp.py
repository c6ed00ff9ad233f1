"""Plain ZeroMQ over TCP: from the sender to each receiver, a copy on the wire for each. As `zeromq` otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.impls import Meet, Seat, Wires, zeromq

HERE = "tcp://127.0.0.1"


def check() -> None:
    zeromq.check()


def lay(receivers: int, scratch: Path) -> Wires:
    return Wires([None] * (receivers + 1))


class Sender(zeromq.Sender):
    def __init__(self, wire: None, seat: Seat, meet: Meet) -> None:
        import zmq

        self._context = zmq.Context()
        self._frames = self._context.socket(zmq.XPUB)
        self._frames.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._frames.setsockopt(zmq.XPUB_NODROP, 1)
        self._frames.bind(f"{HERE}:*")
        self._replies = self._context.socket(zmq.PULL)
        self._replies.bind(f"{HERE}:*")
        self._receivers = seat.receivers
        meet([end.getsockopt_string(zmq.LAST_ENDPOINT) for end in (self._frames, self._replies)])
        for _ in range(seat.receivers):
            self._frames.recv()  # one subscription of each receiver
        self.send = self._frames.send

    def expect(self, nbytes: int) -> None:
        pass


class Receiver(zeromq.Receiver):
    def __init__(self, wire: None, seat: Seat, meet: Meet) -> None:
        addresses: Any = meet("")[0]
        super().__init__(addresses, seat, meet)
        self.receive = self._frames.recv

    def expect(self, nbytes: int) -> None:
        pass
