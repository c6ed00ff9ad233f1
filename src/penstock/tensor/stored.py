"""One value of a store, held. It lies in one block: its layout, then its tensors.

Leaves to the tree what a layout says, and to the store under which key the block is found.
"""

from __future__ import annotations

import struct
from typing import Any

from penstock import _native
from penstock.errors import ClosedError, DecodeError
from penstock.memory import Ref
from penstock.memory.pool import BLOCK_ALIGN
from penstock.tensor.tree import read
from penstock.tensor.views import As

HEAD = struct.Struct("<II")  # nbytes of the layout, 0


def tensors_at(layout_nbytes: int) -> int:
    """Where in its block the tensors of a value begin."""
    return -(-(HEAD.size + layout_nbytes) // BLOCK_ALIGN) * BLOCK_ALIGN


class Stored:
    """A value of the store, held: it is not evicted while this, or an array of it, lives."""

    __slots__ = ("_lease", "ref")

    def __init__(self, lease: _native.Lease) -> None:
        self._lease: _native.Lease | None = lease
        self.ref = Ref(*lease.ref_numbers())  # plain data, for any message: `Store.open_stored` over there

    @property
    def nbytes(self) -> int:
        """Of the block, its layout included."""
        return self.ref.nbytes

    def value(self, as_: As = "numpy", *, writable: bool = False) -> Any:
        """The tree, its tensors read-only views of shared memory, which hold it; copies if `writable`."""
        if self._lease is None:
            raise ClosedError("the value has been released")
        seen = memoryview(self._lease)
        if len(seen) < HEAD.size:
            raise DecodeError(f"expected a value, got a block of {len(seen)} bytes")
        layout_nbytes, zero = HEAD.unpack_from(seen)
        at = tensors_at(layout_nbytes)
        if zero or at > len(seen):
            raise DecodeError(f"expected a value, got a layout of {layout_nbytes} bytes in a block of {len(seen)}")
        return read(seen[HEAD.size : HEAD.size + layout_nbytes], self._lease, at, as_=as_, writable=writable)

    def release(self) -> None:
        """Holds it no longer; arrays that were taken from it still do, each until it is gone."""
        self._lease = None

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
