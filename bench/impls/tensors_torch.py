"""`torch.multiprocessing.Queue`, one for each receiver: a fresh tensor goes to a shared file, its name to the others.

One and the same tensor is put into all queues, so it is copied once; it is fresh each time, because torch keeps one
that it has moved to shared memory there.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from bench.impls import Meet, Seat, Unavailable, Wires, tensors


def check() -> None:
    if importlib.util.find_spec("torch") is None:
        raise Unavailable("torch is not installed")


def lay(receivers: int, scratch: Path, largest: str) -> Wires:
    from torch import multiprocessing

    spawn = multiprocessing.get_context("spawn")
    queues = [spawn.SimpleQueue() for _ in range(receivers)]
    replies = spawn.SimpleQueue()
    return Wires([(queues, replies), *((queue, replies) for queue in queues)])


class Sender(tensors.Sender):
    def __init__(self, wire: tuple[list[Any], Any], seat: Seat, meet: Meet) -> None:
        self._queues, self._replies = wire
        self._tensor: Any = None

    def expect(self, nbytes: int) -> None:
        import torch

        self._source = torch.from_numpy(tensors.pattern(nbytes))

    def prepare(self) -> None:
        self._tensor = self._source.clone()

    def put(self) -> Any:
        return self._tensor

    def send(self, tensor: Any) -> None:
        for queue in self._queues:
            queue.put(tensor)

    def gather(self) -> None:
        for _ in self._queues:
            self._replies.get()

    def close(self) -> None:
        self._tensor = None


class Receiver(tensors.Receiver):
    def __init__(self, wire: tuple[Any, Any], seat: Seat, meet: Meet) -> None:
        import torch  # noqa: F401  before anything is timed

        queue, self._replies = wire
        self.receive = queue.get
        self.reply = self._replies.put
