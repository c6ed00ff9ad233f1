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
        self._meet = meet
        super().__init__((f"{HERE}:*", f"{HERE}:*"), seat, meet)
        self.send = self._frames.send

    def _when_bound(self, addresses: list[str]) -> None:
        self._meet(addresses)

    def expect(self, nbytes: int) -> None: ...


class Receiver(zeromq.Receiver):
    def __init__(self, wire: None, seat: Seat, meet: Meet) -> None:
        addresses: Any = meet("")[0]
        super().__init__(addresses, seat, meet)
        self.receive = self._frames.recv

    def expect(self, nbytes: int) -> None: ...
