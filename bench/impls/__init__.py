"""The implementations that are measured, behind one tiny interface.

Each module of this folder is one way to carry frames between processes. It has `check()`, which raises `Unavailable`
where it cannot run; `lay()`, run once in the parent, which makes what the processes inherit; and `Sender` and
`Receiver`, made inside the process that owns the end. `send` goes to every receiver; `reply` goes back to the sender,
which `gather`s one reply of each.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

REPLY_NBYTES = 100


class Unavailable(Exception):
    """This implementation cannot run here; the message says what is missing."""


Received: TypeAlias = bytes | bytearray | memoryview


class Sender:
    """Base of the ends that send. A subclass is made of its wire, its seat and a `Meet`, and has methods, or attributes
    that are functions:

    send     sends a frame to every receiver; blocks while a receiver is too far behind
    gather   returns after one reply of every receiver
    """

    send: Callable[[Any], object]
    gather: Callable[[], object]

    def expect(self, nbytes: int) -> None:
        """Called before a phase with frames of one size; ends may pick the best way for the size."""

    def reserved_nbytes(self) -> int:
        """Returns the bytes set aside for the channel and the way back."""
        return 0

    def close(self) -> None: ...


class Receiver:
    """Base of the ends that receive: `receive` awaits the next frame, `reply` sends a small frame to the sender."""

    receive: Callable[[], Any]
    reply: Callable[[bytes], object]

    def expect(self, nbytes: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Seat:
    """Which end a process owns: rank 0 is the sender, ranks 1 to N are the receivers."""

    rank: int
    receivers: int


Meet = Callable[[object], list[object]]
"""Offers something to all processes of a session and returns what each offered, by rank. Also a barrier."""


@dataclass(frozen=True)
class Wires:
    """What the parent made, one piece for each rank; travels while the processes are being spawned."""

    by_rank: list[object]


@dataclass(frozen=True)
class Implementation:
    name: str
    module_name: str
    options: dict[str, str] = field(default_factory=dict)
    kinds: frozenset[str] = frozenset()  # of phases it takes part in; empty: all
    smallest_nbytes: int = 0
    is_default: bool = True

    def module(self) -> ModuleType:
        return importlib.import_module(f"bench.impls.{self.module_name}")

    def takes(self, kind: str, nbytes: int) -> bool:
        return (not self.kinds or kind in self.kinds) and nbytes >= self.smallest_nbytes

    def check(self) -> None:
        """Raises Unavailable if it cannot run here."""
        self.module().check()

    def python(self) -> str | None:
        """The interpreter its processes need, or None for the one that runs."""
        find = getattr(self.module(), "python", None)
        return str(find()) if find else None

    def lay(self, receivers: int, scratch: Path) -> Wires:
        wires = self.module().lay(receivers, scratch, **self.options)
        assert isinstance(wires, Wires), f"{self.module_name}.lay() returned no wires"
        return wires


TENSORS = frozenset({"carry", "warm", "hold", "weigh", "let_go"})  # phases of the ways to give a tensor
SERVING = frozenset({"fill", "serve"})
REMOTE = frozenset({"paced"})  # of ways between nodes


def way(name: str, module_name: str, kinds: frozenset[str] = TENSORS, **options: str) -> Implementation:
    """One that takes part in the benchmark of tensors alone. `tensors.Sender` says what its ends are."""
    return Implementation(name, module_name, options, kinds, is_default=False)


PENSTOCK = "penstock"
IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        Implementation(PENSTOCK, "penstock_channel", {"latency": "auto", "receive": "copy"}),
        Implementation(
            "penstock-view",
            "penstock_channel",
            {"latency": "auto", "receive": "view"},
            kinds=frozenset({"lock_step"}),
            smallest_nbytes=65536,
        ),
        Implementation("penstock-eco", "penstock_channel", {"latency": "eco", "receive": "copy"}, is_default=False),
        Implementation("penstock-spin", "penstock_channel", {"latency": "spin", "receive": "copy"}, is_default=False),
        Implementation("seqpacket", "seqpacket"),
        Implementation("mp.Pipe", "mp_pipe"),
        Implementation("mp.Queue", "mp_queue"),
        Implementation("zeromq", "zeromq"),
        Implementation("iceoryx2", "iceoryx"),
        Implementation("gloo", "gloo"),
        Implementation("vllm", "vllm_queue"),
        way("penstock-store", "tensors_penstock"),
        way("penstock-store-torch", "tensors_penstock", as_="torch"),
        way("penstock-produce", "tensors_penstock", how="produce"),
        way("vllm-cache", "tensors_vllm", how="cache"),
        way("vllm-queue", "tensors_vllm", how="queue"),
        way("vllm-arena", "tensors_vllm", how="arena"),
        way("torch-queue", "tensors_torch"),
        way("zeromq-parts", "tensors_zeromq"),
        way("pickle-5", "tensors_pickle"),
        way("penstock-serving", "serving_penstock", SERVING),
        way("penstock-bridge", "penstock_bridge", REMOTE),
        way("vllm-remote", "vllm_queue_remote", REMOTE),
        way("zeromq-tcp", "zeromq_tcp", REMOTE),
        way("classic-serving", "serving_classic", SERVING),
    )
}
