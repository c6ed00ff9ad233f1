"""ZeroMQ over `ipc://`: a multipart message of what the array is and its bytes, neither copied by pyzmq."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from bench.impls import Meet, Seat, Wires, tensors, zeromq

check = zeromq.check


def lay(receivers: int, scratch: Path, largest: str) -> Wires:
    return zeromq.lay(receivers, scratch)


class Sender(zeromq.Sender, tensors.Sender):
    def __init__(self, addresses: tuple[str, str], seat: Seat, meet: Meet) -> None:
        super().__init__(addresses, seat, meet)

    def expect(self, nbytes: int) -> None:
        self._array = tensors.pattern(nbytes)

    def put(self) -> Any:
        return self._array

    def send(self, array: Any) -> None:
        what = json.dumps([array.dtype.str, array.shape]).encode()
        self._frames.send_multipart([what, array], copy=False)


class Receiver(zeromq.Receiver, tensors.Receiver):
    def expect(self, nbytes: int) -> None: ...

    def receive(self) -> Any:
        what, numbers = self._frames.recv_multipart(copy=False)
        dtype, shape = json.loads(what.bytes)
        return np.frombuffer(numbers.buffer, dtype).reshape(shape)
