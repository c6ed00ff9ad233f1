"""Unix sequenced-packet sockets, one pair for each receiver: the honest simple rival of the standard library.

A record has to fit the send buffer, so large frames go in several records, each to all receivers before the next; the
receiver fills one buffer of its own and allocates nothing.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

from bench import impls
from bench.impls import REPLY_NBYTES, Meet, Seat, Wires

SEND_BUFFER_NBYTES = 4 << 20
RECORD_NBYTES = 512 << 10  # best of 64 KiB to 1 MiB at 1 and 32 MiB, four receivers
SO_SNDBUFFORCE = 32


def check() -> None:
    socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)[0].close()


def lay(receivers: int, scratch: Path) -> Wires:
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(receivers)]
    for each in (end for pair in pairs for end in pair):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_NBYTES)
        with contextlib.suppress(OSError):  # beyond the system's limit only for the superuser
            each.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, SEND_BUFFER_NBYTES)
    return Wires([[near for near, _ in pairs], *(far for _, far in pairs)])


class Sender(impls.Sender):
    def __init__(self, sockets: list[socket.socket], seat: Seat, meet: Meet) -> None:
        self._sockets = sockets
        self._replies = bytearray(REPLY_NBYTES)
        room = min(each.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for each in sockets)
        self._record_nbytes = min(RECORD_NBYTES, room // 2)

    def expect(self, nbytes: int) -> None:
        self.send: Callable[[bytes], int] = self._send_to_all
        if nbytes > self._record_nbytes:
            self.send = self._send_in_records
        elif len(self._sockets) == 1:
            self.send = self._sockets[0].send

    def _send_to_all(self, frame: bytes) -> int:
        for each in self._sockets:
            each.send(frame)
        return len(frame)

    def _send_in_records(self, frame: bytes) -> int:
        view, step = memoryview(frame), self._record_nbytes
        for offset in range(0, len(view), step):
            record = view[offset : offset + step]
            for each in self._sockets:
                each.send(record)
        return len(frame)

    def gather(self) -> None:
        for each in self._sockets:
            each.recv_into(self._replies)

    def reserved_nbytes(self) -> int:
        return sum(2 * each.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for each in self._sockets)

    def close(self) -> None:
        for each in self._sockets:
            each.close()


class Receiver(impls.Receiver):
    def __init__(self, wire: socket.socket, seat: Seat, meet: Meet) -> None:
        self._socket = wire
        self.reply = wire.send
        self._frame = memoryview(bytearray())

    def expect(self, nbytes: int) -> None:
        self._frame = memoryview(bytearray(nbytes))

    def receive(self) -> memoryview:
        frame = self._frame
        filled = self._socket.recv_into(frame)
        while filled < len(frame):
            received = self._socket.recv_into(frame[filled:])
            if not received:
                raise EOFError("the sender closed its socket")
            filled += received
        return frame

    def close(self) -> None:
        self._socket.close()
