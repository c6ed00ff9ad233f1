"""A store that many processes share: trees of tensors under a key of the content, put once and read by all peers.

The native core decides which peer writes a key, which peers wait, what is evicted, and what a death gives back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, overload

import msgspec

from penstock import _native
from penstock.errors import LayoutMismatch, Missing
from penstock.memory import MemoryOptions, Peer, Pool, PoolStats, Ref, Ticket
from penstock.memory.pool import BLOCK_ALIGN
from penstock.memory.segment import (
    Shareable,
    attached_segment,
    create_segment,
    fitting,
    granule_nbytes,
    require_class,
    within,
)
from penstock.tensor.lease import Loan, block_nbytes
from penstock.tensor.tree import Plan, plan

if TYPE_CHECKING:
    from typing_extensions import Self

PUT_TIMEOUT = 5.0  # seconds: for another process to write the same key, or for room that is held


class Kept(msgspec.Struct, frozen=True):
    """What the store keeps under one key."""

    key: bytes
    nbytes: int
    hits: int
    holders: int  # processes that hold it now
    age: float  # seconds since it was put
    idle: float  # seconds since it was last requested
    is_being_written: bool


class StoreStats(msgspec.Struct, frozen=True):
    """Each value that was looked up counts once: n new values and m repeats are n misses and m hits."""

    hits: int  # values that `get`, `put` or `loan` has found
    misses: int  # values that a process had to make: it put them, or had no room to (see `count`)
    puts: int
    evictions: int
    evicted_nbytes: int
    fills_awaited: int
    abandoned: int
    items: tuple[Kept, ...]
    pool: PoolStats  # of the memory in which the values lie


class Store(Shareable):
    """Shared memory that keeps values by key until their room is wanted. Any number of processes put and get.

    What a process holds is never evicted. Of the others, those neighbours go that make enough room and are worth least:
    worth grows with size, and falls with the time since the last use.

    A value is a tree of dicts, lists and tuples with tensors (of NumPy, torch or DLPack) and small plain values.

    Args:
        nbytes: room for all values. Its pages are claimed as values fill it, and stay claimed.
        name: of the store, in errors and in `penstock inspect`.
        max_items: values that may lie in the store at a time.
        max_peers: processes that may be attached at a time.
        peer_name: of this process, in errors and in `penstock inspect`.
        memory: where the memory lies, and when its pages are claimed. Huge pages are all claimed now.

    Raises:
        MemoryExhausted: the machine has not so much memory left; the text has both numbers. Without `prefault`, that
            concerns `put` and `loan`: where values that no process holds cannot make room either.

    Examples:
        >>> store = Store(1 << 20)
        >>> key = content_key(b"image")
        >>> store.put({"pixels": np.zeros((2, 2))}, key=key).release()
        >>> store.get(key).value()["pixels"].shape
        (2, 2)
    """

    def __init__(
        self,
        nbytes: int,
        *,
        name: str = "store",
        max_items: int = 4096,
        max_peers: int = 32,
        peer_name: str = "",
        memory: MemoryOptions = MemoryOptions(),
    ) -> None:
        require_class("memory", memory, MemoryOptions)
        within("max_items", max_items, 1, _native.MAX_BLOCKS)
        pool_nbytes = -(-fitting(nbytes, "a store") // BLOCK_ALIGN) * BLOCK_ALIGN
        granule = granule_nbytes(pool_nbytes)  # huge pages are claimed whole, and what is no larger than a granule
        shape = {
            "kind": _native.POOL,
            "max_peers": within("max_peers", max_peers, 1, _native.MAX_PEERS),
            "max_blocks": max_items,
            "has_grants": 1,
            "pool_nbytes": pool_nbytes,
            "granule_nbytes": 0 if memory.prefault or memory.huge_pages or pool_nbytes <= granule else granule,
            "buckets": 1 << max_items.bit_length(),
        }
        self._use(create_segment(name, shape, memory), peer_name)

    def _use(self, segment: _native.Segment, peer_name: str) -> None:
        super().__init__(segment)
        self.pool = Pool(segment, peer_name)  # the memory: blocks without a key, and the processes that hold them
        self._pool_nbytes = segment.pool_nbytes
        self._native_store: _native.Store | None = None

    @classmethod
    def _of(cls, segment: _native.Segment, peer_name: str = "") -> Self:
        store = cls.__new__(cls)
        store._use(segment, peer_name)
        return store

    @classmethod
    def attach(cls, where: Ticket | str | int, *, peer_name: str = "") -> Self:
        """Attaches to the store of a ticket, or of an inherited descriptor.

        Args:
            where: `str(store.ticket)`, the ticket itself, or a descriptor.
            peer_name: of this process, in errors and in `penstock inspect`.

        Raises:
            LayoutMismatch: it is no store, or of another build, or gone.

        Examples:
            >>> store = Store(1 << 20)
            >>> Store.attach(str(store.ticket)).name
            'store'
        """
        with attached_segment(where) as segment:
            if segment.kind != 2 or not segment.keeps:
                raise LayoutMismatch(f"expected a store, got segment '{segment.name}', which is none")
            return cls._of(segment, peer_name)

    @property
    def nbytes(self) -> int:
        """Room for all values."""
        return self._pool_nbytes

    @property
    def _keeper(self) -> _native.Store:
        store = self._native_store
        if store is None or not store.is_ours:  # of the process before a fork()
            self._native_store = store = _native.Store(self.pool.place)
        return store

    # ── values ──
    def put(self, value: Any, *, key: bytes | None = None, timeout: float | None = PUT_TIMEOUT) -> _native.Lease:
        """Copies a value into the store, once, and returns a lease of it.

        Args:
            value: a tree of tensors and small values.
            key: 32 bytes, as of `content_key`. A value that the store has under it already is not copied again. None:
                the value has no key, and is gone with its last lease.
            timeout: seconds to wait for room, or for another process that writes the same key; None for as long as it
                takes. If that process dies, this one writes the value.

        Raises:
            MemoryExhausted: all that could make room is held; the text names the holders.
            Timeout: another process is still writing the value.
            UnsupportedTensor: of what cannot be kept, with its path in the value.

        Examples:
            >>> store = Store(1 << 20)
            >>> lease = store.put(np.arange(3), key=content_key(b"three"))
            >>> lease.value()
            array([0, 1, 2])
        """
        planned = value if isinstance(value, Plan) else plan(value)
        loan = self._loan(key, planned, timeout)
        if not isinstance(loan, Loan):
            return loan
        with loan:
            return loan.commit()

    def get(self, key: bytes) -> _native.Lease:
        """Returns a lease of the value kept under the key.

        Args:
            key: 32 bytes, as of `content_key`.

        Raises:
            Missing: there is none, or it is still being written: `get` never waits. `put` and `loan` do. It is no miss
                (`stats`) yet: a process that makes the value calls `put` or `loan`, which counts one.

        Examples:
            >>> Store(1 << 20).get(bytes(32))
            Traceback (most recent call last):
                ...
            penstock.errors.Missing: 'store' keeps nothing under 0000000000000000…
        """
        store = self._native_store
        return self._present((store if store is not None and store.is_ours else self._keeper).get_value(key), key)

    def _present(self, lease: _native.Lease | None, key: bytes) -> _native.Lease:
        if lease is None:
            raise Missing(f"'{self.name}' keeps nothing under {key.hex()[:16]}…")
        return lease

    def open(self, key: bytes) -> _native.Lease:
        """Returns a lease of the value under the key, and uses up a grant of the value to this process, if any. `get`
        uses no grant, and is for looking. `open` is for an announced value, and counts no hit.

        Args:
            key: 32 bytes, as of `content_key`.

        Raises:
            Missing: no value has the key. A value with a grant to this process exists, unless removed.

        Examples:
            >>> store = Store(1 << 20)
            >>> store.put(b"text", key=bytes(32)).release()
            >>> store.open(bytes(32)).value()
            b'text'
        """
        return self._present(self._keeper.get_value(key, True), key)

    def grant_all(self, lease: _native.Lease, to: Iterable[Peer | int] | None = None) -> int:
        """Lets other processes open the value once more each, also when this process holds it no longer: by its key
        (`open`) or its handle. It is not evicted before. A grant ends with its use, or with either process.
        Returns the number of grants.

        Args:
            lease: of a value in this store.
            to: peers, or their indices; None: all that are attached now, but this process.

        Raises:
            PeerDied: one of `to` is not attached any more; then none is granted.
            ClosedError: the lease has been released.

        Examples:
            >>> store = Store(1 << 20)
            >>> worker = Store.attach(str(store.ticket))
            >>> index = worker.pool.join("worker").index
            >>> with store.put(b"text", key=bytes(32)) as lease:
            ...     store.grant_all(lease)
            1
            >>> store.evict(bytes(32))
            False
            >>> worker.open(bytes(32)).release()
            >>> store.evict(bytes(32))
            True
        """
        lease.hold().release()  # raises if it has been released
        ref = lease.ref
        if not isinstance(ref, Ref):
            raise ValueError(
                "expected the handle of a value in the store, got one of an inline value, which needs no grant"
            )
        return self.pool.grant_all(ref, to)

    @overload
    def loan(self, key: None, layout: Any, *, timeout: float | None = PUT_TIMEOUT) -> Loan: ...
    @overload
    def loan(self, key: bytes, layout: Any, *, timeout: float | None = PUT_TIMEOUT) -> Loan | _native.Lease: ...
    def loan(self, key: bytes | None, layout: Any, *, timeout: float | None = PUT_TIMEOUT) -> Loan | _native.Lease:
        """Lends memory for a value to be made where it will lie; or returns a lease, if the store has the value.

        One process makes the value of a key. Others that `put` or `loan` the key wait meanwhile, so slow work should be
        done before.

        Args:
            key: as for `put`. Without one the answer is always a Loan.
            layout: the value, with `penstock.Empty(shape, dtype)` for tensors to be filled.
            timeout: as for `put`.

        Raises:
            MemoryExhausted, Timeout, UnsupportedTensor: as `put`.

        Examples:
            >>> store = Store(1 << 20)
            >>> loan = store.loan(content_key(b"image"), {"pixels": Empty(2, "int64")})
            >>> loan.value()["pixels"][:] = 7
            >>> loan.commit().value()
            {'pixels': array([7, 7])}
        """
        planned = layout if isinstance(layout, Plan) else plan(layout, is_filled_later=True)
        return self._loan(key, planned, timeout)

    def _loan(self, key: bytes | None, planned: Plan, timeout: float | None) -> Loan | _native.Lease:
        keeper = self._keeper  # read once: the value is committed where it was begun
        is_new, block = keeper.begin(key, block_nbytes(planned), timeout)
        return Loan(self.pool, None if key is None else keeper, block, planned) if is_new else _native.Lease(block)

    # ── what goes ──
    def evict(self, key: bytes) -> bool:
        """Keeps the key no longer if no process holds the value, nor has a grant of it. Returns whether it was given
        up: False if it is held, granted, still being written, or not there.

        Args:
            key: 32 bytes, as of `content_key`.

        Examples:
            >>> Store(1 << 20).evict(bytes(32))
            False
        """
        return self._keeper.evict(key)

    def remove(self, key: bytes) -> bool:
        """Keeps the key no longer; holders of the value keep theirs. Returns whether the key was there.

        Args:
            key: 32 bytes, as of `content_key`.

        Examples:
            >>> Store(1 << 20).remove(bytes(32))
            False
        """
        return self._keeper.remove(key)

    def clear(self) -> int:
        """Keeps no key any longer. Returns the number of keys given up.

        Examples:
            >>> Store(1 << 20).clear()
            0
        """
        return self._keeper.clear()

    def count(self, *, hits: int = 0, misses: int = 0) -> None:
        """Counts values that this process needed without a call of `get`, `put` or `loan` that counted them.

        Args:
            hits: values that the process holds already, as an earlier request has looked them up.
            misses: values that the process makes without the store, after MemoryExhausted or Timeout of `put` or `loan`
                without a retry.

        Examples:
            >>> store = Store(1 << 20)
            >>> store.count(misses=1)
            >>> store.stats().misses
            1
        """
        self._keeper.count(hits, misses)

    def stats(self) -> StoreStats:
        """Returns counts of all processes, what is kept under each key, and the state of the memory.

        Examples:
            >>> store = Store(1 << 20)
            >>> lease = store.put(b"text", key=bytes(32))
            >>> [(item.hits, item.holders) for item in store.stats().items]
            [(0, 1)]
        """
        native: dict[str, Any] = self._keeper.stats()
        items = tuple(Kept(*item) for item in native.pop("items"))
        return StoreStats(**native, items=items, pool=self.pool.stats())

    def peers(self) -> list[Peer]:
        """Returns the processes that are attached."""
        return self.pool.peers()

    def close(self) -> None:
        """Gives this process's place among the peers up, as soon as its last lease is gone."""
        self._is_closed = True
        self._native_store = None
        self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
