"""One value of a store: held, or still being made in place. It lies in one block: its layout, then its tensors.

Leaves to the tree what a layout says, and to the store under which key the block is found.
"""

from __future__ import annotations

import struct
from typing import Any

from penstock import _native
from penstock._native import Stored as Stored
from penstock.errors import ClosedError, DecodeError
from penstock.memory import Ref
from penstock.memory.pool import BLOCK_ALIGN
from penstock.tensor.tree import Plan, read, read_to_fill
from penstock.tensor.views import As

HEAD = struct.Struct("<II")  # nbytes of the layout, 0


def tensors_at(layout_nbytes: int) -> int:
    """Where in its block the tensors of a value begin."""
    return -(-(HEAD.size + layout_nbytes) // BLOCK_ALIGN) * BLOCK_ALIGN


def block_nbytes(planned: Plan) -> int:
    """Of the block that a value of this plan lies in."""
    return tensors_at(len(planned.layout)) + planned.nbytes


def write_value(lease: _native.Lease, planned: Plan) -> None:
    """Into a block of so many bytes: the layout, and what is there of the tensors."""
    layout = planned.layout
    with memoryview(lease) as room:
        HEAD.pack_into(room, 0, len(layout), 0)
        room[HEAD.size : HEAD.size + len(layout)] = layout
        planned.write(room, tensors_at(len(layout)))


def read_value(lease: _native.Lease, as_: As, writable: bool) -> Any:
    """What `Stored.value` gives where the value is not plain: empty tensors, long layouts, copies, what is none."""
    seen = memoryview(lease)
    if len(seen) < HEAD.size:
        raise DecodeError(f"expected a value, got a block of {len(seen)} bytes")
    layout_nbytes, zero = HEAD.unpack_from(seen)
    at = tensors_at(layout_nbytes)
    if zero or at > len(seen):
        raise DecodeError(f"expected a value, got a layout of {layout_nbytes} bytes in a block of {len(seen)}")
    return read(seen[HEAD.size : HEAD.size + layout_nbytes], lease, at, as_=as_, writable=writable)


_native.use_values(Ref, read_value)


class Making:
    """A value that this process makes under a key, or, unless `is_new`, one that is there already.

        with store.make(key, {"pixels": Empty((3, 448, 448), "bfloat16"), "grid": [1, 32, 32]}) as making:
            if making.is_new:
                making.value("torch")["pixels"].copy_(…)  # or let the processor write there
            stored = making.commit()

    Another writer of the same key waits for commit(), or makes the value when this one ends without commit().
    """

    __slots__ = ("_layout", "_lease", "_store", "is_new")

    def __init__(self, store: _native.Store, lease: _native.Lease, planned: Plan, is_new: bool) -> None:
        self.is_new = is_new
        self._store = store
        self._layout = planned.layout
        self._lease: _native.Lease | None = lease
        if not is_new:
            return
        try:
            write_value(lease, planned)
        except BaseException:
            self.abandon()
            raise

    def value(self, as_: As = "numpy") -> Any:
        """Returns the tree, to be filled: its tensors are the memory of the store. Tensors given as arrays are in it;
        an unwritten part of an `Empty` tensor shows what lay there before, perhaps of another value."""
        return read_to_fill(self._layout, self._being_made(), tensors_at(len(self._layout)), as_=as_)

    def commit(self) -> Stored:
        """Returns the value, held. From now on all peers can get it, and no process can write it.

        Raises BufferError while an array of value() lives, which could still write: drop all (del) and commit again.
        """
        if self.is_new:
            self._store.commit(self._being_made())
        lease, self._lease = self._held(), None
        return Stored(lease)

    def abandon(self) -> None:
        """Gives the key up for another writer. Arrays of value() may still be written, and no other process sees it."""
        if self.is_new and self._lease is not None:
            self._store.abandon(self._lease)
        self._lease = None

    def _held(self) -> _native.Lease:
        if self._lease is None:
            raise ClosedError("the value has been committed or abandoned")
        return self._lease

    def _being_made(self) -> _native.Lease:
        if not self.is_new:
            raise ValueError("the value is there already, made by somebody else: ask is_new first; commit() gives it")
        return self._held()

    def __enter__(self) -> Making:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()
