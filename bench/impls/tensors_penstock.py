"""Ours: put into a store and got by key, or made in a loan of it; keys and handles go by a broadcast.

how: "store" or "produce". as_: what the receiver asks for, "numpy" or "torch".
"""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from bench.impls import Meet, Seat, Unavailable, Wires, tensors

TIMEOUT = 60.0
PLACES = 3  # of the largest tensor


def check() -> None:
    if importlib.util.find_spec("penstock") is None:
        raise Unavailable("penstock cannot be imported")


def check_torch() -> None:
    check()
    if importlib.util.find_spec("torch") is None:
        raise Unavailable("torch is not installed")


def lay(receivers: int, scratch: Path, largest: str, how: str = "store", as_: str = "numpy") -> Wires:
    if as_ == "torch":
        check_torch()
    import penstock

    store = penstock.Store(PLACES * (int(largest) + (1 << 20)), name="images")
    tokens = penstock.Broadcast(receivers=receivers, name="keys")
    replies = penstock.Inbox(senders=receivers, name="replies")
    return Wires([(store, tokens, replies, how, as_)] * (receivers + 1))


class Sender(tensors.Sender):
    def __init__(self, wire: tuple[Any, ...], seat: Seat, meet: Meet) -> None:
        from penstock import Empty

        self._store, tokens, replies, how, _ = wire
        self._sender = tokens.open_sender()
        self._inbox = replies.open_receiver()
        self._receivers = range(seat.receivers)
        meet(self._store.pool.join().index)
        self._empty = Empty
        self._numbers = itertools.count()
        self._held: Any = None
        self.is_compared_with_memcpy = how == "store"
        self.put = self._put if how == "store" else self._produce

    def expect(self, nbytes: int) -> None:
        self._array = tensors.pattern(nbytes)
        if self.is_compared_with_memcpy and not hasattr(self, "_room"):
            self._room = np.zeros(self._store.nbytes // PLACES * PLACES, np.uint8)  # as much as puts go through
            self._room_at = 0

    def prepare(self) -> None:
        self._held = None
        if not self.is_compared_with_memcpy:  # fills the very block that is made next: filling is not measured
            loan = self._store.loan(None, self._empty(self._array.shape, self._array.dtype))
            np.copyto(loan.value(), self._array)

    def _put(self) -> bytes:
        key = next(self._numbers).to_bytes(32, "little")
        self._held = self._store.put({"pixels": self._array, "grid": [1, 16, 16]}, key=key)
        return key

    def _produce(self) -> bytes:
        from penstock import Handle

        loan = self._store.loan(None, self._empty(self._array.shape, self._array.dtype))
        loan.value()
        self._held = loan.commit()
        return bytes(Handle(None, self._held.ref))

    def copy(self) -> None:
        nbytes = self._array.nbytes
        if self._room_at + nbytes > len(self._room):
            self._room_at = 0
        np.copyto(self._room[self._room_at : self._room_at + nbytes], tensors.bytes_of(self._array))
        self._room_at += -(-nbytes // 4096) * 4096

    def warm(self) -> None:
        self._held = None
        self._store.clear()
        with self._store.pool.take(self._store.stats().pool.largest_free_nbytes) as lease:
            np.frombuffer(memoryview(lease), np.uint8)[:] = 0
        if self.is_compared_with_memcpy:
            self._room[:] = 1

    def send(self, token: bytes) -> None:
        self._sender.send(token, timeout=TIMEOUT)

    def gather(self) -> None:
        for _ in self._receivers:
            self._inbox.receive(timeout=TIMEOUT)

    def shared_nbytes(self) -> int:
        """Returns the bytes lent by the store: every process maps all of it from the start."""
        return int(self._store.stats().pool.taken_nbytes)

    def reserved_nbytes(self) -> int:
        return int(self._store.segment_nbytes)

    def close(self) -> None:
        self._held = None
        self._sender.close()
        self._inbox.close()


class Receiver(tensors.Receiver):
    def __init__(self, wire: tuple[Any, ...], seat: Seat, meet: Meet) -> None:
        from penstock import Handle

        self._store, tokens, replies, how, self._as = wire
        self._receiver = tokens.open_receiver(seat.rank - 1)
        self._sender = replies.open_sender(seat.rank - 1)
        meet(self._store.pool.join().index)
        self._handle_of = Handle.from_bytes
        self.get = self._get if how == "store" else self._view

    def receive(self) -> bytes:
        return bytes(self._receiver.receive(timeout=TIMEOUT))

    def _get(self, key: bytes) -> Any:
        return self._store.get(key).value(self._as)["pixels"]

    def _view(self, token: bytes) -> Any:
        return self._handle_of(token).open(self._store).value(self._as)

    def shared_nbytes(self) -> int:
        return 0  # the sender tells

    def reply(self, frame: bytes) -> None:
        self._sender.send(frame, timeout=TIMEOUT)

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()
