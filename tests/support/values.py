"""Values for tests of the store: keys, images that show their number, and what is held."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock import Scope, Store

MB = 1 << 20


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
    return not any(one.holders for one in stats.items) and stats.pool.blocks == len(stats.items)


def through(store: Store | None, given: Any, as_: Any = "numpy", *, writable: bool = False) -> Any:
    """The value as a receiver sees it: by way of the store, or, without one, inline."""
    if store is not None:
        return store.put(given).value(as_, writable=writable)
    return Scope().put(given).open().value(as_, writable=writable)
