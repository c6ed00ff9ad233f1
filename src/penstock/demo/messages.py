"""What the processes of the demonstration say to each other, in the order in which it is met."""

from __future__ import annotations

import msgspec

import penstock
from penstock import EndOfChannel, PeerDied, Ref


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A worker has attached everywhere: from now on it is asked."""

    worker: int
    pid: int


class Image(msgspec.Struct, frozen=True, array_like=True):
    """From the server to the core, and on to the workers: where the bytes lie, never the bytes."""

    ref: Ref
    checksum: int


class Step(msgspec.Struct, frozen=True, array_like=True):
    number: int
    images: list[Image]


class Done(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """What a worker found: images whose bytes are what the server said, that are not, and that were gone."""

    worker: int
    step: int
    right: int
    wrong: int
    gone: int
    nbytes: int


class Noticed(msgspec.Struct, frozen=True, array_like=True):
    """The core was told of a death."""

    pid: int
    how: str
    at_ns: int


# ── sending and receiving them ───────────────────────────────────────────────────────────────────────────────────────
encode = msgspec.msgpack.Encoder().encode


def received(end: penstock.Receiver) -> bytes | None:
    """The next record, if there is one now."""
    record = end.try_receive()
    return record if isinstance(record, bytes) else None


def is_over(control: penstock.Receiver) -> bool:
    try:
        control.try_receive()
    except (EndOfChannel, PeerDied):
        return True
    return False
