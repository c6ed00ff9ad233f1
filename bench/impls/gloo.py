"""torch.distributed with gloo: `broadcast_object_list` there, one `send` of a small tensor back."""

from __future__ import annotations

import importlib.util
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from bench import impls
from bench.impls import REPLY_NBYTES, Meet, Seat, Wires
from bench.impls.peer import python_with


def check() -> None:
    python()


def python() -> str:
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    return python_with("torch")


def lay(receivers: int, scratch: Path) -> Wires:
    return Wires([f"file://{scratch}/gloo"] * (receivers + 1))


def _join(address: str, seat: Seat) -> Any:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=address,
        rank=seat.rank,
        world_size=seat.receivers + 1,
        timeout=timedelta(minutes=5),
    )
    return torch


class Sender(impls.Sender):
    def __init__(self, address: str, seat: Seat, meet: Meet) -> None:
        torch = _join(address, seat)
        self._distributed = torch.distributed
        self._reply = torch.zeros(REPLY_NBYTES, dtype=torch.uint8)
        self._receivers = range(1, seat.receivers + 1)

    def send(self, frame: bytes) -> None:
        self._distributed.broadcast_object_list([frame], src=0)

    def gather(self) -> None:
        for rank in self._receivers:
            self._distributed.recv(self._reply, src=rank)

    def close(self) -> None:
        self._distributed.destroy_process_group()


class Receiver(impls.Receiver):
    def __init__(self, address: str, seat: Seat, meet: Meet) -> None:
        torch = _join(address, seat)
        self._distributed = torch.distributed
        self._reply = torch.zeros(REPLY_NBYTES, dtype=torch.uint8)

    def receive(self) -> bytes:
        frames: list[Any] = [None]
        self._distributed.broadcast_object_list(frames, src=0)
        received: bytes = frames[0]
        return received

    def reply(self, frame: bytes) -> None:
        self._distributed.send(self._reply, dst=0)

    def close(self) -> None:
        self._distributed.destroy_process_group()
