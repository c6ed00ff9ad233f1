"""Values that travel with a request: messages carry handles, and the process that needs a value opens its handle.

    server                                   core                       worker
    scope = Scope(store)
    handle = scope.put(value, key=key)  ──►  forwards the handle  ──►   with handle.open(store) as lease:
    …                                        (needs no store)               lease.value()
    scope.release()

Only leases keep a value alive. A scope holds the server's leases for as long as the request lives. No lease is granted
to a second process, nothing is acknowledged, and no process mirrors a remote table. Therefore the stage at which a
request ends does not matter, nor the order of messages, nor duplicates. The scope is released when the request is
aborted, times out or is done; the reaper gives back the leases of a dead process. A worker that opened a handle in time
holds a lease as long as any array of the value lives. A worker that opens a handle too late, or opens a handle without
a value in the store, gets `Missing`: only the request is concerned, and may be sent again. A value with a key stays in
the store for the next request until the store needs room. A value without a key is freed with the last lease.

A value travels inline if it is small, or without a store, or without room: beside the struct of the message, through
every process that forwards the message. The store decides where values lie and which process waits for room; the codec
decides how messages travel.
"""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any

import msgspec

from penstock import _native
from penstock.codec.buffer import Buffer
from penstock.errors import ClosedError, MemoryExhausted, Missing, Timeout
from penstock.tensor.handle import Handle
from penstock.tensor.lease import Loan, block_nbytes
from penstock.tensor.store import Store
from penstock.tensor.tree import Plan, plan

if TYPE_CHECKING:
    from typing_extensions import Self

INLINE_NBYTES = 16 << 10  # a value in a store costs as much as a copy at about 32 KiB, with 1, 2 or 4 receivers
NOT_STORED = ("inline_full", "inline_too_large")  # where the store was to have the value
ROOM_TIMEOUT = 0.1  # seconds to wait for room, or for another writer of the key; short, as a value can travel inline


class ScopeStats(msgspec.Struct):
    """Counts of one `Scope`. Each handle is either a hit, or put, or inline."""

    handles: int = 0
    nbytes: int = 0  # of all values
    hits: int = 0  # found in the store or in the same scope, or given to add(): the value was not inspected
    puts: int = 0  # copied into the store, by this process or concurrently by a second process
    inline_small: int = 0
    inline_without_store: int = 0
    inline_full: int = 0  # no room within the timeout, or another writer of the key did not finish within it
    inline_too_large: int = 0  # larger than the whole store
    inline_nbytes: int = 0  # of those four

    @property
    def inline(self) -> int:
        return self.inline_small + self.inline_without_store + self.inline_full + self.inline_too_large


class Scope:
    """Holds the values of a request, until release(), or until the last reference to the scope is gone.

    While the scope is open, every process with a handle can open the handle, any number of times: several workers, for
    several samples, a retry. Threads may share a scope.

    Args:
        store: where values lie; None: all values travel inline, in the messages.
        inline_nbytes: up to this size a value travels inline, and is not kept under its key; 0 for all to lie in the
            store. Default: 16 KiB.
        timeout: seconds that `put` may block for room, or for a process that writes the same key, before a value
            travels inline. Default: 0.1.

    Raises:
        ValueError: inline_nbytes is below 0.

    Examples:
        >>> store = Store(1 << 20)
        >>> with Scope(store) as scope:
        ...     handle = scope.put({"pixels": np.zeros(10_000)}, key=content_key(b"image"))
        ...     handle.open(store).value()["pixels"].size
        10000
    """

    def __init__(
        self,
        store: Store | None = None,
        *,
        inline_nbytes: int = INLINE_NBYTES,
        timeout: float | None = ROOM_TIMEOUT,
    ) -> None:
        if inline_nbytes < 0:
            raise ValueError(f"expected inline_nbytes to be 0 or more, got {inline_nbytes}")
        self._store = store
        self._inline_nbytes = inline_nbytes
        self._timeout = timeout
        self._stats = ScopeStats()
        self._held: list[_native.Lease] = []
        self._by_key: dict[bytes, Handle] = {}
        self._changing = threading.Lock()
        self._is_released = False

    @property
    def is_released(self) -> bool:
        return self._is_released

    def put(self, value: Any, *, key: bytes | None = None) -> Handle:
        """Returns a handle of a value. Copies the value once, unless the store has it under this key already.

        Args:
            value: a tree of tensors and small values. Not looked at where the store has the key.
            key: 32 bytes, as of `content_key`; None: the value is gone when the scope and its readers are done.

        Raises:
            UnsupportedTensor: of what cannot be sent, with its path in the value.
            ClosedError: the scope has been released, perhaps meanwhile; then nothing is held.

        Examples:
            >>> scope = Scope()
            >>> scope.put(np.arange(3)).open().value()
            array([0, 1, 2])
        """
        lease = None if key is None else self._find(key)  # also of a value that the scope has: it is a hit of the store
        how = "hits"
        if lease is None:
            if key is not None and (known := self._known(key)) is not None:  # inline, or the store has lost it
                return self._keep(known, None, "hits")
            self._require_open()
            planned = plan(value)
            lease, how = self._stored(planned, key)
            if lease is None:
                if how in NOT_STORED and key is not None and self._store is not None:
                    self._store.count(misses=1)
                numbers = bytearray(planned.nbytes)
                planned.write(numbers)
                return self._keep(Handle(key, planned.layout, Buffer(numbers)), None, how)
        return self._keep(Handle(key, lease.ref), lease, how)

    def add(self, lease: _native.Lease, *, key: bytes | None = None) -> Handle:
        """Returns a handle of a value that this process holds. The scope takes a second lease.

        Args:
            lease: of the value.
            key: the key of the value, if any.

        Raises:
            ClosedError: the scope, or the lease, has been released.

        Examples:
            >>> store = Store(1 << 20)
            >>> lease = store.put(np.arange(3))
            >>> Scope(store).add(lease).open(store).value()
            array([0, 1, 2])
        """
        where = lease.ref
        handle = where if isinstance(where, Handle) else Handle(key, where)
        return self._keep(handle, lease.hold(), "hits")

    def stats(self) -> ScopeStats:
        """Returns what became of the values so far.

        Examples:
            >>> scope = Scope()
            >>> handle = scope.put(b"text")
            >>> scope.stats().inline_small
            1
        """
        with self._changing:
            return msgspec.structs.replace(self._stats)

    def release(self) -> None:
        """Releases all leases of the scope. A process that has opened a handle keeps its own. May be called again.

        Examples:
            >>> scope = Scope()
            >>> scope.release()
            >>> scope.is_released
            True
        """
        with self._changing:
            self._is_released = True
            held, self._held, self._by_key = self._held, [], {}
        held.clear()

    def _known(self, key: bytes) -> Handle | None:
        with self._changing:
            return self._by_key.get(key)

    def _find(self, key: bytes) -> _native.Lease | None:
        if self._store is None:
            return None
        try:
            return self._store.get(key)
        except Missing:
            return None

    def _stored(self, planned: Plan, key: bytes | None) -> tuple[_native.Lease | None, str]:
        """Returns a lease of the value, or None if it must travel inline; and the count for either outcome."""
        store = self._store
        nbytes = block_nbytes(planned)
        if planned.nbytes + len(planned.layout) <= self._inline_nbytes:
            return None, "inline_small"
        if store is None:
            return None, "inline_without_store"
        if nbytes > store.nbytes:
            _warn_once(store, nbytes)
            return None, "inline_too_large"
        try:
            loan = store.loan(key, planned, timeout=self._timeout)
            if not isinstance(loan, Loan):  # another process or thread has put the value meanwhile
                return loan, "hits"
            with loan:
                return loan.commit(), "puts"
        except (MemoryExhausted, Timeout):
            return None, "inline_full"

    def _require_open(self) -> None:
        if self._is_released:
            raise ClosedError("the scope has been released: its request has ended")

    def _keep(self, handle: Handle, lease: _native.Lease | None, how: str) -> Handle:
        with self._changing:
            if self._is_released and lease is not None:
                lease.release()  # now, and not when the traceback of the error is dropped
            self._require_open()
            if handle.key is not None:
                handle = self._by_key.setdefault(handle.key, handle)  # another thread may have put it meanwhile
            if lease is not None:
                self._held.append(lease)
            stats = self._stats
            stats.handles += 1
            stats.nbytes += handle.nbytes
            setattr(stats, how, getattr(stats, how) + 1)
            if handle.is_inline and how != "hits":
                stats.inline_nbytes += handle.nbytes
        return handle

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return "Scope(released)" if self._is_released else f"Scope({len(self._held)} leases)"


_warned: set[int] = set()  # nonces of the stores that this process has warned of


def _warn_once(store: Store, nbytes: int) -> None:
    nonce = store.ticket.nonce
    if nonce in _warned:
        return
    _warned.add(nonce)
    warnings.warn(
        f"a value of {nbytes} bytes does not fit the store '{store.name}' ({store.nbytes} bytes), and travels inline, "
        "as others like it will: raise the store's nbytes",
        RuntimeWarning,
        stacklevel=4,
    )
