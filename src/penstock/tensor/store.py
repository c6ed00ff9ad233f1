"""One store that many processes share: trees of tensors under a key of their content, put once and read by all peers.

The native core decides which peer writes a key, which peers wait for it, what is evicted, and what a death gives back.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from penstock import _native
from penstock.errors import LayoutMismatch, MemoryExhausted, Missing
from penstock.installing import how_to_install
from penstock.memory import Pool, Ref, Ticket
from penstock.memory.pool import BLOCK_ALIGN
from penstock.memory.segment import attached_segment, fitting, placement, short, within
from penstock.tensor.source import source
from penstock.tensor.stored import Making, Stored, block_nbytes, write_value
from penstock.tensor.tree import Plan, plan

LOOK_AGAIN = 0.05  # seconds; of a take() that waits for room
MAX_ROUNDS = 64  # of making room that other peers took first, after the deadline
PUT_TIMEOUT = 5.0  # seconds: for another process to write the same key, or for room that is held


def key_of(*contents: Any, salt: bytes = b"") -> bytes:
    """Returns a key by content: blake3 of the bytes, dtypes and shapes of arrays, of bytes and of text.

    Two contents with one key cannot be made, so a hit never shows one user what another has put. Different `salt`s
    never share: give each tenant one if not even the existence of an equal value may show. Where the content has been
    hashed already (by SHA-256, say), those 32 bytes are as good a key.
    """
    try:
        from blake3 import blake3
    except ImportError:
        hint = how_to_install("store")
        raise ImportError(f"key_of needs blake3: {hint}, or bring keys of 32 bytes") from None
    hashing = blake3()
    for content in (salt, *contents):
        if isinstance(content, str):
            content = content.encode()
            what = b"s"
        elif isinstance(content, (bytes, bytearray, memoryview)):
            what = b"b"
        else:
            found = source(content)
            what = f"a{found.kind.name}{found.shape}".encode()
            array = found.array
            is_plain = isinstance(array, np.ndarray) and array.flags.c_contiguous and array.dtype.isnative
            content = memoryview(array.reshape(-1).view(np.uint8)) if is_plain and found.nbytes else found.tobytes()
        nbytes = memoryview(content).nbytes
        hashing.update(b"%d:%d:" % (len(what), nbytes) + what)  # so that no two lists of contents are one text
        hashing.update(content)
    digest: bytes = hashing.digest()
    return digest


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
    hits: int
    misses: int
    puts: int
    evictions: int
    evicted_nbytes: int
    fills_awaited: int
    abandoned: int
    items: tuple[Kept, ...]


class Store(Pool):
    """A pool that keeps values by key until their room is wanted: the longest unused, and those that free most, first.

    Any number of processes put and get; what one of them holds is never evicted. It is a pool too: blocks can be taken
    and shared without a key, from the same memory.
    """

    def __init__(self, segment: _native.Segment, peer_name: str = "") -> None:
        super().__init__(segment, peer_name)
        self._pool_nbytes = segment.pool_nbytes
        self._kept: _native.Store | None = None
        self._pins: dict[bytes, Stored] = {}
        self._pinned: Counter[bytes] = Counter()

    @classmethod
    def create(  # type: ignore[override]
        cls,
        nbytes: int,
        *,
        name: str = "store",
        peer_name: str = "",
        max_items: int = 4096,
        max_peers: int = 32,
        huge_pages: bool | str = False,
        numa_node: int | None = None,
        numa_required: bool = False,
        prefault: bool = True,
    ) -> Store:
        """Claims all its pages now. Raises MemoryExhausted, with both numbers, if there are not so many."""
        within("max_items", max_items, 1, _native.MAX_BLOCKS)
        shape = {
            "kind": 2,
            "max_peers": within("max_peers", max_peers, 1, _native.MAX_PEERS),
            "max_blocks": max_items,
            "has_grants": 1,
            "pool_nbytes": -(-fitting(nbytes, "a store") // BLOCK_ALIGN) * BLOCK_ALIGN,
            "buckets": 1 << max_items.bit_length(),
        }
        options = placement(huge_pages, numa_node, numa_required)
        return cls(_native.Segment.create(short(name), shape, prefault=prefault, **options), peer_name)

    @classmethod
    def attach(cls, where: Ticket | str | int, *, peer_name: str = "") -> Store:
        with attached_segment(where) as segment:
            if segment.kind != 2 or not segment.keeps:
                raise LayoutMismatch(f"'{segment.name}' is not a store")
            return cls(segment, peer_name)

    @property
    def nbytes(self) -> int:
        """Of all values and blocks that fit."""
        return self._pool_nbytes

    @property
    def _store(self) -> _native.Store:
        if self._kept is None or not self._kept.is_ours:
            self._kept = _native.Store(self.place)
            self._pins, self._pinned = {}, Counter()  # of the process before a fork()
        return self._kept

    # ── values ──
    def put(self, key: bytes, value: Any, *, timeout: float | None = PUT_TIMEOUT, detach: bool = False) -> Stored:
        """Keeps a tree (dicts, lists, tuples; tensors and small values) under a key, and holds it.

        value: may be a `Plan` of it.
        Copies once, unless the key is there. Waits while another writer writes the key; if that dies, writes the value.
        Raises MemoryExhausted, which names the holders, when all that is in the way is held for `timeout` seconds;
        Timeout when another writer of the key takes longer; UnsupportedTensor for what cannot be kept.
        """
        planned = value if isinstance(value, Plan) else plan(value, detach=detach)
        with self._making(key, planned, timeout) as making:
            return making.commit()

    def make(self, key: bytes, value: Any, *, timeout: float | None = PUT_TIMEOUT, detach: bool = False) -> Making:
        """Returns a place under a key for a tree with tensors that are still `Empty`, to be filled where they will lie.

        Copies only the arrays and small values that are given now. As with put(), one writer makes the value, unless
        the key is there. Waits and raises as put() does. Other writers of the key wait while it is being made, so slow
        work should be done before.
        """
        return self._making(key, plan(value, detach=detach, is_filled_later=True), timeout)

    def _making(self, key: bytes, planned: Plan, timeout: float | None) -> Making:
        is_new, lease = self._store.begin(key, block_nbytes(planned), timeout)
        return Making(self._store, lease, planned, is_new)

    def lend(self, value: Any, *, timeout: float | None = 0, detach: bool = False) -> Stored:
        """Copies a value once into a block without a key, and holds it. A process that receives its `ref` can open it
        as long as any process holds it; with its last lease it is gone. Raises MemoryExhausted, as `take`."""
        planned = value if isinstance(value, Plan) else plan(value, detach=detach)
        with self.take(block_nbytes(planned), timeout) as lease:
            write_value(lease, planned)
            return self.open_stored(Ref(*lease.ref_numbers()))  # for reading: no holder may change what others read

    def get(self, key: bytes) -> Stored:
        """Returns the value kept under the key, held. Raises Missing if there is none, or it is still being written."""
        kept = self._kept
        stored = (kept if kept is not None and kept.is_ours else self._store).get_value(key)
        if stored is None:
            raise Missing(f"'{self.name}' keeps nothing under {key.hex()[:16]}…")
        return stored

    def get_many(self, keys: Iterable[bytes]) -> dict[bytes, Stored]:
        """Returns the values kept under these keys, held, by key; keys without a value are left out."""
        get = self._store.get_value
        found = {key: get(key) for key in keys}
        return {key: stored for key, stored in found.items() if stored is not None}

    def open_stored(self, ref: Ref) -> Stored:
        """Returns a value by the `ref` of one of its holders. Raises StaleRef if it is gone."""
        return Stored(self.open(ref))

    def take(self, nbytes: int, timeout: float | None = 0) -> _native.Lease:
        """Returns a writable lease of a block without a key, as `Pool.take`; values without a holder give way to it."""
        deadline = None if timeout is None else time.monotonic() + timeout
        made_room = 0
        while True:
            try:
                if 0 <= nbytes <= self._pool_nbytes:
                    return self.place.take(nbytes, 0)  # most often there is room, and no other check is needed
                return super().take(nbytes, 0)
            except MemoryExhausted:
                left = None if deadline is None else deadline - time.monotonic()
                is_late = left is not None and left <= 0
                may_make = nbytes <= self.nbytes and (made_room < MAX_ROUNDS or not is_late)
                if may_make and self._store.make_room(nbytes):
                    made_room += 1
                    continue  # if another peer took that room first, more is made
                if nbytes > self.nbytes or is_late:
                    raise
            try:
                # A block that comes back may be the room, or have been in the way of making it: so each wait is short.
                return super().take(nbytes, LOOK_AGAIN if left is None else min(left, LOOK_AGAIN))
            except MemoryExhausted:
                pass

    # ── what stays, and what goes ──
    def pin(self, key: bytes) -> None:
        """Holds a value until it is unpinned as often, or this process ends. Raises Missing if it is not there."""
        stored = self._pins.get(key) or self.get(key)
        self._pins[key] = stored
        self._pinned[key] += 1

    def unpin(self, key: bytes) -> None:
        if not self._pinned[key]:
            raise Missing(f"'{self.name}': this process has not pinned {key.hex()[:16]}…")
        self._pinned[key] -= 1
        if not self._pinned[key]:
            del self._pinned[key], self._pins[key]

    def remove(self, key: bytes) -> bool:
        """Keeps the key no longer; holders of the value keep theirs. Returns False if the key was not there."""
        return self._store.remove(key)

    def clear(self) -> int:
        """Keeps no key any longer. Returns the number of keys given up."""
        return self._store.clear()

    def stats_of_keys(self) -> StoreStats:
        native: dict[str, Any] = self._store.stats()
        items = tuple(Kept(*item) for item in native.pop("items"))
        return StoreStats(**native, items=items)

    def close(self) -> None:
        self._pins, self._pinned, self._kept = {}, Counter(), None
        super().close()
