"""Pickle protocol 5 over a pipe for each receiver: the array's bytes out of band, as a message of their own."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from bench.impls import Meet, Seat, Wires, mp_pipe, tensors

check = mp_pipe.check


def lay(receivers: int, scratch: Path, largest: str) -> Wires:
    return mp_pipe.lay(receivers, scratch)


class Sender(mp_pipe.Sender, tensors.Sender):
    def __init__(self, pipes: list[Any], seat: Seat, meet: Meet) -> None:
        super().__init__(pipes, seat, meet)
        self.send = self._send_pickled

    def expect(self, nbytes: int) -> None:
        self._array = tensors.pattern(nbytes)

    def put(self) -> Any:
        return self._array

    def _send_pickled(self, array: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(array, 5, buffer_callback=buffers.append)
        for pipe in self._pipes:
            pipe.send_bytes(head)
            pipe.send_bytes(buffers[0].raw())


class Receiver(mp_pipe.Receiver, tensors.Receiver):
    def __init__(self, pipe: Any, seat: Seat, meet: Meet) -> None:
        super().__init__(pipe, seat, meet)
        self.receive = self._receive_pickled

    def _receive_pickled(self) -> Any:
        head = self._pipe.recv_bytes()
        return pickle.loads(head, buffers=[self._pipe.recv_bytes()])
