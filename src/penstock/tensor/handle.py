"""A handle: plain data with the place of a value, a field of any message.

A handle owns nothing. The fields are checked at construction and at receipt; the store checks the reference when the
handle is opened. A handle is no proof of a right: a process that can attach to the store can read the whole store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from penstock import _native
from penstock.codec.buffer import Buffer
from penstock.errors import DecodeError, Missing, StaleRef
from penstock.memory import Ref
from penstock.memory.pool import BLOCK_ALIGN
from penstock.tensor.lease import HEAD, read_block
from penstock.tensor.tree import read
from penstock.tensor.views import As

if TYPE_CHECKING:
    from penstock.tensor.store import Store


class Handle(msgspec.Struct, frozen=True, array_like=True):
    """Where one value lies: in a store, or in the handle itself. A field of any message; `Scope.put` makes it.

    In a message it takes at most 41 bytes where the value lies in a store without a key, and 72 with one.

    Examples:
        >>> store = Store(1 << 20)
        >>> with Scope(store) as scope:
        ...     handle = scope.put(np.arange(100_000))
        ...     with handle.open(store) as lease:
        ...         int(lease.value().sum())
        4999950000
    """

    key: bytes | None
    where: Ref | bytes  # a block of the store; or, inline, the layout of `tensors`: tree.py
    tensors: Buffer | None = None

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
        if where.offset % BLOCK_ALIGN or not HEAD.size <= where.nbytes <= _native.MAX_NBYTES:
            raise ValueError(f"expected a reference to the block of a value, got {where}")
        limits = (1 << 64, _native.MAX_BLOCKS, 1 << 32, _native.MAX_NBYTES)
        numbers = (where.segment, where.block, where.generation, where.offset)
        if not all(0 <= number < limit for number, limit in zip(numbers, limits, strict=True)):
            raise ValueError(f"expected a reference to a block, got {where}")

    def open(self, store: Store | None = None) -> _native.Lease:
        """Returns a lease of the value.

        Args:
            store: the store that the value may lie in; None is enough for a value that travels inline.

        Raises:
            Missing: the value is gone (without a key when it is released, else when it is evicted), or never was in
                this store. Its request fails, and may be sent again; others are not concerned.
            ValueError: the value lies in a store, and none was given.

        Examples:
            >>> handle = Scope().put({"size": 3})
            >>> handle.open().value()
            {'size': 3}
        """
        where = self.where
        if isinstance(where, bytes):
            return _native.Lease.of_message(self, self.nbytes)
        if store is None:
            raise ValueError("expected a store, as the value of this handle lies in one: Handle.open(store)")
        try:
            return _native.Lease(store.pool.open(where))
        except StaleRef as stale:
            # Nothing keeps the error by name: its traceback leads to the frames above, which hold their leases.
            if self.key is not None:
                try:
                    return store.get(self.key)  # a process has put the value again
                except Missing:
                    pass
            what = "without a key" if self.key is None else f"under {self.key.hex()[:16]}…"
            raise Missing(
                f"'{store.name}' no longer has the value {what}: the process that sent the handle released the value "
                "or died. Send the request again"
            ) from stale

    def __bytes__(self) -> bytes:
        """Returns the handle as bytes, for messages of another library: `Handle.from_bytes` makes it again.

        Examples:
            >>> handle = Scope().put({"size": 3})
            >>> Handle.from_bytes(bytes(handle)).open().value()
            {'size': 3}
        """
        tensors = None if self.tensors is None else self.tensors.view
        return msgspec.msgpack.encode((self.key, self.where, tensors))

    @classmethod
    def from_bytes(cls, encoded: bytes) -> Handle:
        """Returns the handle that `bytes(handle)` was made of.

        Args:
            encoded: the bytes.

        Raises:
            DecodeError: the bytes are no handle.

        Examples:
            >>> Handle.from_bytes(b"")
            Traceback (most recent call last):
                ...
            penstock.errors.DecodeError: expected the bytes of a Handle: Input data was truncated
        """
        try:
            key, where, tensors = _fields.decode(encoded)
            return cls(key, where, None if tensors is None else Buffer(tensors))
        except (ValueError, RecursionError) as error:  # of msgspec, or of the handle's own checks
            raise DecodeError(f"expected the bytes of a Handle: {error}") from None

    @property
    def is_inline(self) -> bool:
        return isinstance(self.where, bytes)

    @property
    def nbytes(self) -> int:
        """The size of the value, its layout included."""
        where = self.where
        if isinstance(where, Ref):
            return where.nbytes
        return len(where) + (0 if self.tensors is None else self.tensors.nbytes)


_fields = msgspec.msgpack.Decoder(tuple[bytes | None, Ref | bytes, bytes | None])


def _read(holder: Any, as_: As, writable: bool) -> Any:
    if type(holder) is not Handle:
        return read_block(holder, as_, writable)
    layout, tensors = holder.where, holder.tensors
    assert isinstance(layout, bytes) and tensors is not None, "Handle looks at that"
    return read(layout, tensors.view, as_=as_, writable=writable)


_native.use_values(Ref, _read)
