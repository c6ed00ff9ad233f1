"""A reference to a tensor: plain data, an ordinary field of any message.

It owns nothing. What it says of itself is checked where it is made and where it is received; what it says of memory, by
the pool when it is opened. Leaves to the bridge how a tensor becomes one, and to the views what it becomes again.
"""

from __future__ import annotations

from math import prod
from typing import Any

import msgspec

from penstock import _native
from penstock.memory import Ref
from penstock.memory.segment import MAX_NBYTES
from penstock.tensor.kinds import KIND_OF_CODE, Kind, kind_of

MAX_DIMENSIONS = 32  # of NumPy before 2.0, and of codec/frame.py


def nbytes_of(kind: Kind, shape: tuple[int, ...]) -> int:
    """Returns the size of a C-contiguous tensor. Raises ValueError if no tensor has the shape: it may be untrusted."""
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"expected at most {MAX_DIMENSIONS} dimensions, got {len(shape)}")
    for size in shape:
        if type(size) is not int or not 0 <= size <= MAX_NBYTES:
            raise ValueError(f"expected sizes from 0 to {MAX_NBYTES}, got {shape!r:.80}")
    nbytes = prod(shape) * kind.itemsize
    # A size of 0 makes all other sizes harmless here, but not to code that multiplies only the other sizes.
    if nbytes > MAX_NBYTES or (nbytes == 0 and prod(filter(None, shape)) * kind.itemsize > MAX_NBYTES):
        raise ValueError(f"expected a tensor of at most {MAX_NBYTES} bytes, got {kind.name} {shape!r:.80}")
    return nbytes


class TensorRef(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that lies in a pool, or, if it is small, in this very reference. C-contiguous, little endian.

    Raises ValueError (in a message: DecodeError) where it contradicts itself.
    """

    code: int  # of the kind of its numbers: kinds.py
    shape: tuple[int, ...]
    where: Ref | bytes

    def __post_init__(self) -> None:
        kind = KIND_OF_CODE.get(self.code)
        if kind is None:
            raise ValueError(f"expected the number of a dtype, 1 to {len(KIND_OF_CODE)}, got {self.code!r:.40}")
        where = self.where
        if type(where) is Ref and where.nbytes == (_native.nbytes_of(self.code, self.shape) or None):
            return  # plain: most are
        expected = nbytes_of(kind, self.shape)
        found = len(where) if type(where) is bytes else where.nbytes  # type: ignore[union-attr]
        if found != expected:
            raise ValueError(f"expected {expected} bytes for {kind.name} {self.shape}, got {found}")
        if kind.name == "bool" and type(where) is bytes and where.strip(b"\0\1"):
            raise ValueError("expected 0 and 1, got other bytes as bool")

    @classmethod
    def of(cls, dtype: Any, shape: tuple[int, ...], where: Ref | bytes) -> TensorRef:
        """For bytes that already lie there; dtype: of torch, of NumPy, or its name."""
        return cls(kind_of(dtype).code, tuple(shape), where)

    @property
    def kind(self) -> Kind:
        return KIND_OF_CODE[self.code]

    @property
    def dtype(self) -> str:
        """Its name: "float32", "bfloat16"."""
        return KIND_OF_CODE[self.code].name

    @property
    def nbytes(self) -> int:
        return len(self.where) if isinstance(self.where, bytes) else self.where.nbytes

    @property
    def is_inline(self) -> bool:
        return isinstance(self.where, bytes)
