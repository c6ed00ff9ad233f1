"""The peer interpreter: another Python, named by PENSTOCK_PEER_PYTHON, that has what this one lacks."""

from __future__ import annotations

from functools import cache

from bench.impls import Unavailable


@cache
def python_with(module: str) -> str:
    """The peer interpreter's path. Raises Unavailable if none is named, or if it does not have `module`."""
    from penstock.measure import peers, rounds  # here: the peer interpreter, which imports this too, has no penstock

    try:
        return peers.python_with(module)
    except rounds.Unavailable as missing:
        raise Unavailable(str(missing)) from None
