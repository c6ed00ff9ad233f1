"""Values that travel with a request: messages carry items, and the process that needs a value opens its item.

    server                              core                        worker
    scope = outgoing.scope()
    item = scope.put(value, key)  ──►   forwards the item    ──►    with incoming.open(item) as held:
    …                                   (needs no store)                held.value()
    scope.release()

Only leases keep a value alive. A scope holds the server's leases for as long as its request lives. No lease is granted
to another process, nothing is acknowledged, and no process mirrors a table of another. So it does not matter at what
stage a request ends, nor in what order messages arrive, or how often. The scope is released when its request is
aborted, times out or is done; the reaper gives back the leases of a dead process. A worker that opened an item in time
holds a lease of its own, as long as any array of the value lives. A worker that opens it too late, or opens an item
that names no value of the store, gets `Missing`: this concerns that request alone, which may be sent again. A value
with a key stays in the store for the next request until its room is wanted. A value without a key is freed with its
last lease.

A value that is small, or for which there is no store or no room, travels inline: beside the struct of the message that
carries it, through every process that forwards that message. The store decides where values lie and which process waits
for room; the codec decides how messages travel.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import Any, TypeAlias

import msgspec

from penstock.codec.part import Part
from penstock.errors import ClosedError, MemoryExhausted, Missing, StaleRef, Timeout
from penstock.tensor.bridge import INLINE_NBYTES
from penstock.tensor.item import Item
from penstock.tensor.store import Store
from penstock.tensor.stored import Stored, block_nbytes
from penstock.tensor.tree import Plan, plan, read
from penstock.tensor.views import As

ROOM_TIMEOUT = 0.1  # seconds to wait for room, or for another writer of the key; short, as a value can travel inline


# ── senders ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class OutgoingStats(msgspec.Struct):
    """Counts of one `Outgoing`, in this process. Each item is either a hit, or put, or inline."""

    items: int = 0
    nbytes: int = 0  # of all items
    hits: int = 0  # found in the store, or in the same scope: the value was not inspected
    puts: int = 0  # copied into the store, by this process or, at the same time, by another
    inline_small: int = 0
    inline_without_store: int = 0
    inline_full: int = 0  # no room within the timeout, or another writer of the key did not finish within it
    inline_too_large: int = 0  # larger than the whole store
    inline_nbytes: int = 0  # of those four
    open_scopes: int = 0  # now

    @property
    def inline(self) -> int:
        return self.inline_small + self.inline_without_store + self.inline_full + self.inline_too_large


class Outgoing:
    """Makes items of values. `store`: None for none, then all of them travel inline. Threads may share it."""

    def __init__(
        self,
        store: Store | None,
        *,
        inline_nbytes: int = INLINE_NBYTES,
        timeout: float | None = ROOM_TIMEOUT,
    ) -> None:
        """inline_nbytes: up to here a value travels inline; timeout: seconds to wait for room before it does."""
        if inline_nbytes < 0:
            raise ValueError(f"inline_nbytes is 0 or more, not {inline_nbytes}")
        self.store = store
        self.inline_nbytes = inline_nbytes
        self.timeout = timeout
        self._counts = OutgoingStats()
        self._counting = threading.Lock()
        self._scopes: weakref.WeakSet[Scope] = weakref.WeakSet()

    def scope(self) -> Scope:
        """Returns a scope for one request, to be released when the request ends."""
        made = Scope(self)
        self._scopes.add(made)
        return made

    def stats(self) -> OutgoingStats:
        with self._counting:
            return msgspec.structs.replace(self._counts, open_scopes=len(self._scopes))

    # ── for scopes ──
    def _find(self, key: bytes) -> Stored | None:
        if self.store is None:
            return None
        try:
            return self.store.get(key)
        except Missing:
            return None

    def _store(self, planned: Plan, key: bytes | None) -> tuple[Stored | None, str]:
        """Returns the stored value, or None if it must travel inline; and the name of the count for either outcome."""
        store = self.store
        nbytes = block_nbytes(planned)
        if planned.nbytes + len(planned.layout) <= self.inline_nbytes:
            return None, "inline_small"
        if store is None:
            return None, "inline_without_store"
        if nbytes > store.nbytes:
            _warn_once(store, nbytes)
            return None, "inline_too_large"
        try:
            if key is None:
                return store.lend(planned, timeout=self.timeout), "puts"
            return store.put(key, planned, timeout=self.timeout), "puts"
        except (MemoryExhausted, Timeout):
            return None, "inline_full"

    def _count(self, item: Item, how: str) -> None:
        with self._counting:
            counts = self._counts
            counts.items += 1
            counts.nbytes += item.nbytes
            setattr(counts, how, getattr(counts, how) + 1)
            if item.is_inline and how != "hits":
                counts.inline_nbytes += item.nbytes

    def _forget(self, scope: Scope) -> None:
        self._scopes.discard(scope)


class Scope:
    """The leases of one request in the store, until release(), or until the last reference to the scope is gone.

    While the scope is open, every process that received one of its items can open it, any number of times: several
    workers, for several samples, a retry. Threads may share it.
    """

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing
        self._held: list[Stored] = []
        self._by_key: dict[bytes, Item] = {}
        self._changing = threading.Lock()
        self._is_released = False

    @property
    def is_released(self) -> bool:
        return self._is_released

    def put(self, value: Any, key: bytes | None = None, *, detach: bool = False) -> Item:
        """Returns an item of a tree of tensors. If the store has the key already, holds its value and ignores `value`.

        Copies the value once, unless the store has it. Raises UnsupportedTensor for what cannot be sent, ClosedError
        if the scope has been released, also if that happens meanwhile: then nothing is held.
        """
        if key is not None and (known := self._known(key)) is not None:
            self._outgoing._count(known, "hits")
            return known
        stored = None if key is None else self._outgoing._find(key)
        how = "hits"
        if stored is None:
            self._require_open()
            planned = plan(value, detach=detach)
            stored, how = self._outgoing._store(planned, key)
            if stored is None:
                numbers = bytearray(planned.nbytes)
                planned.write(numbers)
                return self._keep(Item(key, planned.layout, Part(numbers)), None, how)
        return self._keep(Item(key, stored.ref), stored, how)

    def add(self, stored: Stored, key: bytes | None = None) -> Item:
        """Returns an item of a stored value, under this key if it has one. The scope takes a hold of its own on it."""
        return self._keep(Item(key, stored.ref), stored.hold(), "hits")

    def release(self) -> None:
        """Gives back all leases of the scope. A process that has opened an item keeps its own. May be called again."""
        with self._changing:
            self._is_released = True
            held, self._held, self._by_key = self._held, [], {}
        held.clear()
        self._outgoing._forget(self)

    def _known(self, key: bytes) -> Item | None:
        with self._changing:
            return self._by_key.get(key)

    def _require_open(self) -> None:
        if self._is_released:
            raise ClosedError("the scope has been released: its request has ended")

    def _keep(self, item: Item, stored: Stored | None, how: str) -> Item:
        with self._changing:
            if self._is_released and stored is not None:
                stored.release()  # now, and not when the traceback of the error is dropped
            self._require_open()
            if item.key is not None:
                item = self._by_key.setdefault(item.key, item)  # another thread may have put it meanwhile
            if stored is not None:
                self._held.append(stored)
        self._outgoing._count(item, how)
        return item

    def __enter__(self) -> Scope:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


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


# ── receivers ────────────────────────────────────────────────────────────────────────────────────────────────────────
class Carried:
    """A value that travelled inline, with the interface of `Stored`. It holds the memory of its message."""

    __slots__ = ("_item",)

    def __init__(self, item: Item) -> None:
        self._item: Item | None = item

    @property
    def nbytes(self) -> int:
        item = self._item
        return 0 if item is None else item.nbytes

    def value(self, as_: As = "numpy", *, writable: bool = False) -> Any:
        """Returns the tree, its tensors read-only views of the message; copies if `writable`. Raises DecodeError if the
        bytes are no value."""
        item = self._item
        if item is None:
            raise ClosedError("the value has been released")
        layout, tensors = item.where, item.tensors
        assert isinstance(layout, bytes) and tensors is not None, "Item looks at that"
        return read(layout, tensors.view, as_=as_, writable=writable)

    def release(self) -> None:
        self._item = None

    def __enter__(self) -> Carried:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


Held: TypeAlias = Stored | Carried


class IncomingStats(msgspec.Struct):
    """Counts of one `Incoming`, in this process."""

    opened: int = 0
    inline: int = 0  # of those
    found_by_key: int = 0  # of those: the block of the item was gone, and a process had put the value again
    missing: int = 0


class Incoming:
    """Opens items. `store`: None for none, then only those that travel inline. Threads may share it."""

    def __init__(self, store: Store | None) -> None:
        self.store = store
        self._counts = IncomingStats()
        self._counting = threading.Lock()

    def open(self, item: Item) -> Held:
        """Returns the value, held until it is released and no array of it lives.

        Raises Missing if the value is gone or never was in the store: that request fails, and may be sent again.
        `value()` checks the bytes, and raises DecodeError if they are no value.
        """
        where = item.where
        if isinstance(where, bytes):
            self._count("opened", "inline")
            return Carried(item)
        if self.store is None:
            raise ValueError("an item that lies in a store was received, and there is no store here")
        try:
            opened = self.store.open_stored(where)
            self._count("opened")
            return opened
        except StaleRef as stale:
            # Nothing keeps the error by name: its traceback leads to the frames above, which hold their opened values.
            again = self._put_again(item)
            if again is None:
                self._count("missing")
                what = "without a key" if item.key is None else f"under {item.key.hex()[:16]}…"
                raise Missing(
                    f"'{self.store.name}' has not got the value {what} any more: whoever sent the item has let it go, "
                    "or died. Only its request is concerned: send that again"
                ) from stale
            self._count("opened", "found_by_key")
            return again

    def _put_again(self, item: Item) -> Stored | None:
        if item.key is None or self.store is None:
            return None
        try:
            return self.store.get(item.key)
        except Missing:
            return None

    def stats(self) -> IncomingStats:
        with self._counting:
            return msgspec.structs.replace(self._counts)

    def _count(self, *names: str) -> None:
        with self._counting:
            for name in names:
                setattr(self._counts, name, getattr(self._counts, name) + 1)
