"""Values for tests of the store: keys, images that show their number, messages with handles, and what is held."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from penstock import Handle, Scope, Store
from penstock.codec import Catalogue, FrameDecoder, FrameEncoder

MB = 1 << 20


class Request(msgspec.Struct, array_like=True, frozen=True):
    number: int
    handles: tuple[Handle, ...] = ()


CATALOGUE = Catalogue.of(Request)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def image(number: int, nbytes: int = 100_000) -> dict[str, Any]:
    return {"pixels": np.full(nbytes // 4, number, np.int32), "grid": [1, 2, number]}


def shows(value: Any, number: int) -> bool:
    return bool((value["pixels"] == number).all() and value["grid"] == [1, 2, number])


def blocks(store: Store) -> int:
    """That are held or kept."""
    return store.stats().pool.blocks


def is_not_held(store: Store) -> bool:
    """No process holds a value: there is nothing but what is kept under keys."""
    stats = store.stats()
    return not any(item.holders for item in stats.items) and stats.pool.blocks == len(stats.items)


def through(store: Store | None, value: Any, as_: Any = "numpy", *, writable: bool = False) -> Any:
    """The value as a receiver sees it: by way of the store, or, without one, inline."""
    if store is not None:
        return store.put(value).value(as_, writable=writable)
    return Scope().put(value).open().value(as_, writable=writable)


def frame_of(*handles: Handle) -> bytes:
    frame = FrameEncoder(CATALOGUE).encode(Request(7, handles))
    return b"".join(memoryview(piece).cast("B") for piece in frame) if isinstance(frame, list) else bytes(frame)


def travelled(handle: Handle) -> Handle:
    """What arrives."""
    (arrived,) = FrameDecoder(CATALOGUE).decode(frame_of(handle)).handles
    assert isinstance(arrived, Handle) and arrived == handle
    return arrived
