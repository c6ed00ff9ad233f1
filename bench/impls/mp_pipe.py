"""`multiprocessing.Pipe`, one for each receiver, with `send_bytes`: no pickle.

The default duplex pipe (a Unix stream socket) was faster at 64 KB and more than two simplex pipes, also than those
with an enlarged buffer, and equal below.
"""

from __future__ import annotations

import multiprocessing
import socket
from multiprocessing.connection import Connection
from pathlib import Path

from bench import impls
from bench.impls import Meet, Seat, Wires


def check() -> None:
    """Part of the standard library."""


def lay(receivers: int, scratch: Path) -> Wires:
    pairs = [multiprocessing.Pipe() for _ in range(receivers)]
    return Wires([[near for near, _ in pairs], *(far for _, far in pairs)])


class Sender(impls.Sender):
    def __init__(self, pipes: list[Connection], seat: Seat, meet: Meet) -> None:
        self._pipes = pipes
        self.send = pipes[0].send_bytes if len(pipes) == 1 else self._send

    def _send(self, frame: bytes) -> None:
        for each in self._pipes:
            each.send_bytes(frame)

    def gather(self) -> None:
        for each in self._pipes:
            each.recv_bytes()

    def reserved_nbytes(self) -> int:
        total = 0
        for each in self._pipes:
            with socket.socket(fileno=each.fileno()) as borrowed:
                total += 2 * borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
                borrowed.detach()
        return total

    def close(self) -> None:
        for each in self._pipes:
            each.close()


class Receiver(impls.Receiver):
    def __init__(self, pipe: Connection, seat: Seat, meet: Meet) -> None:
        self._pipe = pipe
        self.receive = pipe.recv_bytes
        self.reply = pipe.send_bytes

    def close(self) -> None:
        self._pipe.close()
