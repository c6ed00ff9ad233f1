"""The bytes of a value in its block, also while the value is being made: the layout, then the tensors.

The tree defines layouts, and the store finds the block of a key.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.errors import ClosedError, DecodeError
from penstock.memory.pool import BLOCK_ALIGN, Pool
from penstock.memory.ref import Ref
from penstock.tensor.tree import Plan, read, read_to_fill
from penstock.tensor.views import As

if TYPE_CHECKING:
    from typing_extensions import Self

HEAD = struct.Struct("<II")  # nbytes of the layout, 0


def tensors_at(layout_nbytes: int) -> int:
    """Where in its block the tensors of a value begin."""
    return -(-(HEAD.size + layout_nbytes) // BLOCK_ALIGN) * BLOCK_ALIGN


def block_nbytes(planned: Plan) -> int:
    """Of the block that a value of this plan lies in."""
    return tensors_at(len(planned.layout)) + planned.nbytes


def write_value(block: _native.BlockLease, planned: Plan) -> None:
    """Into a block of so many bytes: the layout, and what is there of the tensors."""
    layout = planned.layout
    with memoryview(block) as room:
        HEAD.pack_into(room, 0, len(layout), 0)
        room[HEAD.size : HEAD.size + len(layout)] = layout
        planned.write(room, tensors_at(len(layout)))


def read_block(block: _native.BlockLease, as_: As, writable: bool) -> Any:
    """Reads what `Lease.value` does not by itself: empty tensors, long layouts, copies, what is none."""
    content = memoryview(block)
    if len(content) < HEAD.size:
        raise DecodeError(f"expected a value, got a block of {len(content)} bytes")
    layout_nbytes, zero = HEAD.unpack_from(content)
    at = tensors_at(layout_nbytes)
    if zero or at > len(content):
        raise DecodeError(f"expected a value, got a layout of {layout_nbytes} bytes in a block of {len(content)}")
    return read(content[HEAD.size : HEAD.size + layout_nbytes], block, at, as_=as_, writable=writable)


class Loan:
    """Memory of a store, lent to this process to make a value where it will lie: `Store.loan`.

    Other processes that `put` or `loan` the key wait for commit(), or make the value when this process dies or leaves
    the `with` block without it. `Store.get` does not wait: it raises Missing.

    Examples:
        >>> store = Store(1 << 20)
        >>> key = content_key(b"image")
        >>> with store.loan(key, {"pixels": Empty((2, 2), "float32")}) as loan:
        ...     loan.value()["pixels"][:] = 1
        ...     lease = loan.commit()
        >>> float(lease.value()["pixels"].sum())
        4.0
    """

    __slots__ = ("_block", "_keeper", "_layout", "_pool")

    def __init__(self, pool: Pool, keeper: _native.Store | None, block: _native.BlockLease, planned: Plan) -> None:
        """keeper: what keeps the value under its key; None: the value has no key."""
        self._pool = pool
        self._keeper = keeper
        self._layout = planned.layout
        self._block: _native.BlockLease | None = block
        try:
            write_value(block, planned)
        except BaseException:
            self.abandon()
            raise

    def value(self, as_: As = "numpy") -> Any:
        """Returns the value, to be filled: its tensors are the memory of the store. What was given as an array is in
        them; those given as `Empty` show what lay there before, perhaps of another value.

        Args:
            as_: "numpy", "torch" or "bits", as for `Lease.value`.

        Raises:
            ClosedError: the value has been committed or abandoned.

        Examples:
            >>> loan = Store(1 << 20).loan(None, Empty(3, "int64"))
            >>> loan.value()[:] = [1, 2, 3]
            >>> loan.commit().value()
            array([1, 2, 3])
        """
        return read_to_fill(self._layout, self._lent(), tensors_at(len(self._layout)), as_=as_)

    def commit(self) -> _native.Lease:
        """Returns a lease of the value. From now on other processes can get it, and none can write it.

        Raises:
            BufferError: an array of value() lives, which could still write: drop all (`del`) and commit again.
            ClosedError: the value has been committed or abandoned.

        Examples:
            >>> lease = Store(1 << 20).loan(None, {"size": 3}).commit()
            >>> lease.value()
            {'size': 3}
        """
        block = self._lent()
        if self._keeper is not None:
            self._keeper.commit(block)
        else:
            opened = self._pool.open(Ref(*block.ref_numbers()))  # for reading: no holder may change what others read
            block.release()
            block = opened
        self._block = None
        return _native.Lease(block)

    def abandon(self) -> None:
        """Gives the key up for another process to make the value. May be called again.

        Examples:
            >>> loan = Store(1 << 20).loan(content_key(b"image"), Empty(3, "int64"))
            >>> loan.abandon()
        """
        block, self._block = self._block, None
        if block is not None and self._keeper is not None:
            self._keeper.abandon(block)

    def _lent(self) -> _native.BlockLease:
        if self._block is None:
            raise ClosedError("the value has been committed or abandoned")
        return self._block

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def __repr__(self) -> str:
        return "Loan(committed or abandoned)" if self._block is None else f"Loan({self._block.nbytes} bytes)"
