"""`multiprocessing.Queue`: one for each receiver, and one that all receivers put their replies into."""

from __future__ import annotations

import fcntl
import multiprocessing
from multiprocessing.queues import Queue
from pathlib import Path

from bench import impls
from bench.impls import Meet, Seat, Wires

F_GETPIPE_SZ = 1032


def check() -> None:
    """Part of the standard library."""


def lay(receivers: int, scratch: Path) -> Wires:
    context = multiprocessing.get_context("spawn")
    queues: list[Queue[bytes]] = [context.Queue() for _ in range(receivers)]
    replies: Queue[bytes] = context.Queue()
    return Wires([(queues, replies), *((each, replies) for each in queues)])


class Sender(impls.Sender):
    def __init__(self, wire: tuple[list[Queue[bytes]], Queue[bytes]], seat: Seat, meet: Meet) -> None:
        self._queues, self._replies = wire
        self.send = self._queues[0].put if len(self._queues) == 1 else self._send

    def _send(self, frame: bytes) -> None:
        for each in self._queues:
            each.put(frame)

    def gather(self) -> None:
        for _ in self._queues:
            self._replies.get()

    def reserved_nbytes(self) -> int:
        """Each queue has a pipe, as large as any other."""
        reader, writer = multiprocessing.Pipe(duplex=False)
        with reader, writer:
            return (len(self._queues) + 1) * fcntl.fcntl(reader.fileno(), F_GETPIPE_SZ)

    def close(self) -> None:
        for each in self._queues:
            each.close()


class Receiver(impls.Receiver):
    def __init__(self, wire: tuple[Queue[bytes], Queue[bytes]], seat: Seat, meet: Meet) -> None:
        queue, self._replies = wire
        self.receive = queue.get
        self.reply = self._replies.put

    def close(self) -> None:
        self._replies.close()
