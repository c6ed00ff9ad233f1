"""A reference: plain data that names bytes in a pool. A reference owns nothing; `Pool.open` checks the reference."""

from __future__ import annotations

import msgspec


class Ref(msgspec.Struct, frozen=True, array_like=True):
    """Where some bytes lie. Travels in any message; `Pool.open` checks bounds and generation on every use.

    Examples:
        >>> pool = Pool.create(1 << 20)
        >>> lease = pool.take(100)
        >>> pool.share(lease).slice(10, 20).nbytes
        20
    """

    segment: int
    block: int
    generation: int
    offset: int
    nbytes: int

    def slice(self, offset: int, nbytes: int) -> Ref:
        """Returns a reference to a part of the bytes. Raises ValueError for a part outside."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"expected a part of {self.nbytes} bytes, got bytes {offset} to {offset + nbytes}")
        return Ref(self.segment, self.block, self.generation, self.offset + offset, nbytes)
