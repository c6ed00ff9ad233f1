"""An item: plain data that says where one value lies, an ordinary field of any message.

It owns nothing. Its fields are checked where it is made and where it is received; the store checks its reference when
the item is opened. It is no proof of a right: a process that can attach to the store can read all of it. transport.py
turns values into items and back.
"""

from __future__ import annotations

import msgspec

from penstock import _native
from penstock.codec.part import Part
from penstock.memory import Ref
from penstock.memory.pool import BLOCK_ALIGN
from penstock.memory.segment import MAX_NBYTES
from penstock.tensor.stored import HEAD


class Item(msgspec.Struct, frozen=True, array_like=True):
    """One value: its key, if it has one, and where it lies. Of at most 200 bytes where it refers to a store.

    Raises ValueError (in a message: DecodeError) where it contradicts itself.
    """

    key: bytes | None
    where: Ref | bytes  # a block of the store; or, inline, the layout of `tensors`: tree.py
    tensors: Part | None = None

    def __post_init__(self) -> None:
        if self.key is not None and (type(self.key) is not bytes or len(self.key) != _native.KEY_NBYTES):
            raise ValueError(f"expected a key of {_native.KEY_NBYTES} bytes, got {self.key!r:.80}")
        where = self.where
        if isinstance(where, bytes):
            if self.tensors is None:
                raise ValueError("expected the tensors of a value that travels inline, got none")
            return
        if self.tensors is not None:
            raise ValueError(f"expected tensors in the store or inline, got {self.tensors} besides {where}")
        if where.offset % BLOCK_ALIGN or not HEAD.size <= where.nbytes <= MAX_NBYTES:
            raise ValueError(f"expected a reference to the block of a value, got {where}")
        limits = (1 << 64, _native.MAX_BLOCKS, 1 << 32, MAX_NBYTES)
        numbers = (where.segment, where.block, where.generation, where.offset)
        if not all(0 <= number < limit for number, limit in zip(numbers, limits, strict=True)):
            raise ValueError(f"expected a reference to a block, got {where}")

    @property
    def is_inline(self) -> bool:
        return isinstance(self.where, bytes)

    @property
    def nbytes(self) -> int:
        """Of the value, its layout included."""
        where = self.where
        if isinstance(where, Ref):
            return where.nbytes
        return len(where) + (0 if self.tensors is None else self.tensors.nbytes)
