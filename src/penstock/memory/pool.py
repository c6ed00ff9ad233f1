"""A pool: blocks of variable size, taken by any peer, opened by any peer that was given a reference.

The native core tracks the holders of each block, and releases what a dead holder held.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from penstock import _native
from penstock.errors import ClosedError, LayoutMismatch, MemoryExhausted, PeerDied, StaleRef
from penstock.memory.peers import Peer
from penstock.memory.ref import Ref
from penstock.memory.segment import (
    MemoryOptions,
    Shareable,
    Ticket,
    attached_segment,
    create_segment,
    fitting,
    short,
    within,
)

_T = TypeVar("_T")
BLOCK_ALIGN = 64  # of blocks; native/layout.h
_attaching = threading.RLock()  # of this process: threads that use a pool first at the same time become one peer


def _renew_lock() -> None:
    """In a child of fork(): the thread that held the lock is not there."""
    global _attaching
    _attaching = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class Holder(msgspec.Struct, frozen=True):
    """The leases and unused grants of a peer."""

    peer: int
    name: str
    blocks: int
    nbytes: int
    granted: int


class PoolStats(msgspec.Struct, frozen=True):
    nbytes: int
    taken_nbytes: int
    free_nbytes: int
    largest_free_nbytes: int
    claimed_nbytes: int
    blocks: int
    takes: int
    taken_nbytes_total: int
    exhaustions: int
    recoveries: int
    stale_refs: int
    holders: tuple[Holder, ...]


class Pool(Shareable):
    """Shared memory that is lent out in blocks. A process that uses a pool is a peer of it from the first use on.

    Examples:
        >>> pool = Pool.create(1 << 20)
        >>> lease = pool.take(5)
        >>> memoryview(lease)[:] = b"hello"
        >>> ref = pool.share(lease, to=[pool.peer])  # plain data; each named peer may open it once
        >>> bytes(pool.open(ref))
        b'hello'
    """

    def __init__(self, segment: _native.Segment, peer_name: str = "") -> None:
        super().__init__(segment)
        self._peer_name = peer_name
        self._attached: _native.Attachment | None = None

    @classmethod
    def create(
        cls,
        nbytes: int,
        *,
        name: str = "",
        peer_name: str = "",
        max_blocks: int = 1024,
        max_peers: int = 32,
        memory: MemoryOptions = MemoryOptions(),
    ) -> Pool:
        """Claims all pages now. Raises MemoryExhausted, with both numbers, if memory is short."""
        shape = {
            "kind": _native.POOL,
            "max_peers": within("max_peers", max_peers, 1, _native.MAX_PEERS),
            "max_blocks": within("max_blocks", max_blocks, 1, _native.MAX_BLOCKS),
            "has_grants": 1,
            "pool_nbytes": -(-fitting(nbytes, "a pool") // BLOCK_ALIGN) * BLOCK_ALIGN,
        }
        return cls(create_segment(name, shape, memory), peer_name)

    @classmethod
    def attach(cls, where: Ticket | str | int, *, peer_name: str = "") -> Pool:
        with attached_segment(where) as segment:
            if segment.kind != _native.POOL:
                raise LayoutMismatch(f"expected a pool, got segment '{segment.name}', which is none")
            if segment.is_elsewhere:
                raise LayoutMismatch(
                    f"expected a pool of host memory, got '{segment.name}', which is of a device: use CudaPool.attach"
                )
            return cls(segment, peer_name)

    @property
    def place(self) -> _native.Attachment:
        """Returns this process's attachment to the pool, for direct calls of the native core."""
        attached = self._attached
        if attached is not None and attached.is_ours:
            return attached
        with _attaching:
            attached = self._attached
            if attached is not None and attached.is_ours:  # another thread was faster
                return attached
            if self._is_closed:
                raise ClosedError(f"pool '{self.name}' is closed")
            # A child of fork() inherits the object and not the place among the peers: the child takes another place.
            self._attached = attached = _native.Attachment(self._segment, short(self._peer_name))
            return attached

    def join(self, name: str = "") -> Peer:
        """Takes a place among the peers now, under this name, instead of at the first use."""
        if name and self._attached is None:
            self._peer_name = name
        return self.peer

    @property
    def peer(self) -> Peer:
        """This process, as a peer of this pool."""
        index = self.place.slot
        return next(peer for peer in self.peers() if peer.index == index)

    def peers(self) -> list[Peer]:
        return [Peer.of(native) for native in self.place.peers()]

    def take(self, nbytes: int, timeout: float | None = 0) -> _native.BlockLease:
        """A writable lease of `nbytes`. Waits up to `timeout` seconds (None: for ever) for others to give some back.

        Raises MemoryExhausted, which names the holders.
        """
        if nbytes < 0:
            raise ValueError(f"expected nbytes of a block to be 0 or more, got {nbytes}")
        try:
            return self.place.take(min(nbytes, _native.MAX_NBYTES), timeout)
        except MemoryExhausted as error:
            error.requested = nbytes
            raise

    def share(self, lease: _native.BlockLease, to: Iterable[Peer | int] = ()) -> Ref:
        """Returns a reference to the leased bytes. Each peer in `to` is granted one open(): the block stays held even
        if the lease ends before the peer opens the block. A grant ends with its use, or with either side. A peer
        that joined the pool but never receives the reference holds the block by its grant until the peer leaves."""
        ref = Ref(*lease.ref_numbers())
        if ref.segment != self._segment.nonce:
            raise ValueError(f"expected a lease of pool '{self.name}', got one of another pool")
        self.grant_all(ref, to)
        return ref

    def grant_all(self, ref: Ref, to: Iterable[Peer | int] | None = None) -> int:
        """Grants each peer in `to` one `open()`; if a peer cannot have a grant, no peer gets one. None: all other
        processes that are attached now. Returns the number of grants."""
        return self._checked(self.place.grant_all, ref, None if to is None else [self._index_of(peer) for peer in to])

    def grant(self, ref: Ref, to: Peer | int) -> None:
        """Grants `to` one `open()` of the block. The caller must hold a lease of the block, or an unused grant."""
        self._checked(self.place.grant, ref, self._index_of(to))

    def revoke(self, ref: Ref, to: Peer | int) -> bool:
        """Takes an unused grant of this process back. Returns False if none was left."""
        try:
            index = self._index_of(to)
        except PeerDied:
            return False
        return self._checked(self.place.revoke, ref, index)

    def unused_grants(self, ref: Ref, to: Peer | int) -> int:
        """Returns how many grants of this process the peer has not used. 0 for a dead peer. Raises StaleRef if the
        bytes are gone."""
        try:
            index = self._index_of(to)
        except PeerDied:
            return 0
        return self._checked(self.place.unused_grants, ref, index)

    def open(self, ref: Ref) -> _native.BlockLease:
        """Returns a read-only lease of the bytes of `ref`. Raises StaleRef if the bytes are gone or never existed."""
        try:
            return self.place.open(ref.segment, ref.block, ref.generation, ref.offset, ref.nbytes)
        except (TypeError, AttributeError):
            raise self._no_reference(ref) from None

    def _checked(self, call: Callable[..., _T], ref: Ref, *more: Any) -> _T:
        try:
            return call(ref.segment, ref.block, ref.generation, ref.offset, ref.nbytes, *more)
        except (TypeError, AttributeError):
            raise self._no_reference(ref) from None

    def _no_reference(self, ref: Ref) -> StaleRef:  # or a reference with an impossible number
        return StaleRef(f"expected a reference to a block of '{self.name}', got {ref!r}")

    def _index_of(self, peer: Peer | int) -> int:
        index = peer.index if isinstance(peer, Peer) else peer
        if not 0 <= index < _native.MAX_PEERS:
            raise PeerDied(f"expected a peer of '{self.name}' from 0 to {_native.MAX_PEERS - 1}, got {index!r}")
        return index

    def stats(self) -> PoolStats:
        native: dict[str, Any] = self.place.stats()
        holders = tuple(Holder(*holder) for holder in native.pop("holders"))
        return PoolStats(**native, holders=holders)

    def close(self) -> None:
        """Gives up the place of this process when the last lease is gone."""
        self._is_closed = True
        self._attached = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
