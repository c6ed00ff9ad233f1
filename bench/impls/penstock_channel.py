"""Ours: a broadcast there and an inbox back, at their defaults."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from bench import impls
from bench.impls import Meet, Seat, Unavailable, Wires

TIMEOUT = 60.0


def check() -> None:
    try:
        import penstock
    except ImportError as error:
        raise Unavailable(f"penstock cannot be imported: {error}") from None
    for name in ("Broadcast", "Inbox"):
        if not hasattr(penstock, name):
            raise Unavailable(f"penstock has no {name}()")


def lay(receivers: int, scratch: Path, latency: str, receive: str) -> Wires:
    import penstock

    frames = penstock.Broadcast(receivers=receivers, latency=latency)
    replies = penstock.Inbox(senders=receivers, latency=latency)
    return Wires([(frames, replies, receive)] * (receivers + 1))


class Sender(impls.Sender):
    def __init__(self, wire: tuple[Any, Any, str], seat: Seat, meet: Meet) -> None:
        self._frames, self._replies, _ = wire
        self._sender = self._frames.open_sender()
        self._inbox = self._replies.open_receiver()
        self._receivers = range(seat.receivers)
        self.send = partial(self._sender.send, timeout=TIMEOUT)

    def gather(self) -> None:
        receive = self._inbox.receive
        for _ in self._receivers:
            receive(timeout=TIMEOUT)

    def reserved_nbytes(self) -> int:
        return int(self._frames.segment_nbytes + self._replies.segment_nbytes)

    def close(self) -> None:
        self._sender.close()
        self._inbox.close()


class Receiver(impls.Receiver):
    def __init__(self, wire: tuple[Any, Any, str], seat: Seat, meet: Meet) -> None:
        frames, replies, receive = wire
        self._receiver = frames.open_receiver(seat.rank - 1)
        self._sender = replies.open_sender(seat.rank - 1)
        self.reply = partial(self._sender.send, timeout=TIMEOUT)
        if receive == "view":
            self.receive = self._receive_view
        else:
            self.receive = partial(self._receiver.receive, timeout=TIMEOUT)

    def _receive_view(self) -> memoryview:
        return memoryview(self._receiver.receive_view(timeout=TIMEOUT))  # the lease lives as long as the view

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()
