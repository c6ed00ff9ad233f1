"""Tensors of a device between processes: put into a slice of device memory, or made in it, and seen where they lie.

A tensor goes to the same device by the pool, which a process opens once; within one process by the memory itself; to
a device that can reach the pool by a copy that the receiver makes; to any other device, and when the pool is full or
there is none, by host memory. Each way is counted. Pool and store record the holders, `order.py` decides when a slice
is free, and the caller how references travel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import msgspec

from penstock._native import Lease
from penstock.codec.buffer import Buffer
from penstock.errors import MemoryExhausted, Missing, StaleRef, Timeout
from penstock.memory import Ref
from penstock.tensor.cuda.driver import DeviceTensor, Driver, ForeignDevice
from penstock.tensor.cuda.order import wait_for
from penstock.tensor.cuda.pool import SHARE_TIMEOUT, CudaPool, Slice
from penstock.tensor.cuda.ref import CudaRef, HostRef, Place, Reference
from penstock.tensor.cuda.torch_driver import driver_of
from penstock.tensor.cuda.uploads import Uploads
from penstock.tensor.handle import Handle
from penstock.tensor.kinds import Kind, kind_of, nbytes_of
from penstock.tensor.scope import INLINE_NBYTES
from penstock.tensor.store import Store
from penstock.tensor.tree import Empty, Plan, plan, read_to_fill


class CudaStats(msgspec.Struct):
    """What one `CudaTensors` did, in this process."""

    puts: int = 0
    put_nbytes: int = 0
    peered: int = 0  # of the puts: in the pool, for a receiver on another device that can reach the pool
    foreign: int = 0  # of the puts: by host memory, for a receiver on a device that cannot
    overflowed: int = 0  # of the puts: by host memory, because there was no pool, or no room
    shares: int = 0  # without a copy
    views: int = 0
    fetched: int = 0  # of the views: copied from another device


class CudaTensors:
    """Tensors in a pool of device memory, and in a store of host memory for receivers without access to the pool.

    A producer has one; a consumer has one for each producer. Without a pool all tensors go by host memory; without a
    store, or without room there, such a tensor travels in its message.
    """

    def __init__(
        self,
        pool: CudaPool | None,
        store: Store | None,
        *,
        driver: Driver | None = None,
        inline_nbytes: int = INLINE_NBYTES,
    ) -> None:
        """driver: None for that of the pool, or of torch's current device. inline_nbytes: what goes by host memory and
        is no larger travels in its message."""
        self.inline_nbytes = inline_nbytes
        self.pool = pool
        self.store = store
        self.driver = driver or (pool.driver if pool is not None else driver_of())
        self.uploads = Uploads(*([store] if store is not None else []), driver=self.driver)
        self.stats = CudaStats()

    @property
    def place(self) -> Place:
        """Returns this process's place as a receiver of tensors, to be sent to their senders."""
        return Place(
            self.driver.uuid,
            self.pool.peer.index if self.pool is not None and self.pool.is_reachable else None,
            self.store.pool.peer.index if self.store is not None else None,
        )

    # ── senders ──
    def put(self, tensor: Any, to: Iterable[Place], *, timeout: float | None = 0) -> Reference:
        """Returns a reference to a copy of this tensor, which each of `to` may view once.

        Copied once, on the current stream, and complete when this returns: a receiver waits for nothing. The copy lies
        in a slice of the pool if all of `to` can have that and there is room (waits `timeout` seconds for it); else in
        host memory: in the store, or within the reference.
        """
        described = self.driver.describe(tensor)
        places = tuple(to)
        if not places:
            raise ValueError("expected at least one place in `to`, got none: pass CudaTensors.place of each receiver")
        self.stats.puts += 1
        self.stats.put_nbytes += described.nbytes
        others = [place for place in places if place.device != self.driver.uuid]
        if any(place.slices is None for place in others):
            self.stats.foreign += 1
            return self._by_host(tensor, described, places, timeout)
        part = self._taken(described.nbytes, timeout) if all(place.slices is not None for place in places) else None
        if part is None or self.pool is None:
            self.stats.overflowed += 1
            return self._by_host(tensor, described, places, timeout)
        self.stats.peered += bool(others)
        copy = self.driver.array(part.address, described.kind, described.shape, part)
        self.driver.copy(copy, tensor)
        return self._shared(part, described.kind, described.shape, 0, places)

    def lend(self, tensor: Any, *, is_near: bool = True, timeout: float | None = 0) -> tuple[Reference, Slice | Lease]:
        """Returns a reference to a copy of this tensor, which any process may view any number of times until the second
        result is released. `is_near`: the devices of all readers can reach the pool. The copy lies there if there is
        room, else in the store. Raises MemoryExhausted."""
        described = self.driver.describe(tensor)
        self.stats.puts += 1
        self.stats.put_nbytes += described.nbytes
        part = self._taken(described.nbytes, timeout) if is_near else None
        if part is not None:
            self.driver.copy(self.driver.array(part.address, described.kind, described.shape, part), tensor)
            return self._shared(part, described.kind, described.shape, 0, ()), part
        self.stats.overflowed += is_near
        self.stats.foreign += not is_near
        lease = self._stored(tensor, described, timeout)
        if lease is None:
            raise MemoryExhausted(
                f"a tensor of {described.nbytes} bytes has no room, neither in a pool of device memory nor in a store"
            )
        return HostRef(Handle(None, lease.ref)), lease

    def empty(self, shape: Iterable[int] | int, dtype: Any, *, timeout: float | None = 0) -> Any:
        """A tensor in the pool, to be filled in place and given to share(). Raises MemoryExhausted."""
        kind = kind_of(dtype)
        sizes = (shape,) if isinstance(shape, int) else tuple(map(int, shape))
        if self.pool is None:
            raise MemoryExhausted(
                f"a tensor of {nbytes_of(kind, sizes)} bytes does not fit: these CudaTensors have no pool"
            )
        part = self.pool.take(nbytes_of(kind, sizes), timeout)
        return self.driver.array(part.address, kind, sizes, part)

    def share(self, tensor: Any, to: Iterable[Place]) -> CudaRef:
        """Returns a reference to a tensor of empty(), or to a contiguous part of it, without a copy.

        For devices that can reach the pool. Waits until the current stream has written the tensor, which must not be
        written from then on. Raises ValueError for any other tensor, or place: put() copies.
        """
        described = self.driver.describe(tensor)
        places = tuple(to)
        if not described.is_contiguous:
            raise ValueError("expected a contiguous tensor: CudaTensors.put copies others")
        if any(place.slices is None for place in places):
            raise ValueError("expected places that can reach the pool: CudaTensors.put sends to others by host memory")
        part = self.pool.part_at(described.address, described.nbytes) if self.pool is not None else None
        if part is None:
            raise ValueError(
                "expected a tensor of CudaTensors.empty, got one outside this pool: CudaTensors.put copies it"
            )
        ref = self._shared(part, described.kind, described.shape, described.address - part.address, places)
        self.stats.shares += 1
        return ref

    def revoke(self, ref: Reference, to: Iterable[Place]) -> None:
        """Takes back what was granted with a reference that could not be sent after all."""
        for place in to:
            if isinstance(ref, HostRef):
                if self.store is not None and isinstance(ref.handle.where, Ref) and place.store is not None:
                    self.store.pool.revoke(ref.handle.where, place.store)
            elif self.pool is not None and place.slices is not None:
                self.pool.books.revoke(ref.where, place.slices)

    # ── receivers ──
    def view(self, ref: Reference) -> Any:
        """Returns the tensor on this process's device: in place, held as long as any view lives; or, if the tensor came
        by host memory or from another device, copied to the device on the current stream.

        The tensor must not be written. Drop the tensor on the stream that used it, or call `used_on`. Raises StaleRef
        if the tensor is gone or never existed, PeerDied if the producer died, ForeignDevice for a tensor of a
        device out of reach; all before any memory is touched.
        """
        self.stats.views += 1
        if isinstance(ref, HostRef):
            with self._opened(ref) as lease:
                return self.uploads.copy_to_device(lease.value(self.driver.as_))
        if self.pool is None:
            raise ValueError(
                "a tensor in a pool of device memory was received: create these CudaTensors with that CudaPool"
            )
        if ref.device != self.pool.about.device:
            raise ForeignDevice(
                f"the tensor lies on device {ref.device.hex()}, and the pool on {self.pool.about.device.hex()}"
            )
        part = self.pool.open(ref.where)
        if ref.device == self.driver.uuid:
            return self.driver.array(part.address, ref.kind, ref.shape, part)
        self.stats.fetched += 1
        copy = self.driver.empty(ref.kind, ref.shape)
        self.driver.fetch(copy, part.address)
        part.release()  # when the copy is done
        return copy

    def used_on(self, tensor: Any, stream: Any) -> None:
        """Keeps the slice of a pool's tensor for a stream's work too. Call it for a stream other than those that are
        current when the tensor is viewed and when it is dropped."""
        # One byte of it: where a slice ends, the next one begins.
        part = self.pool.part_at(self.driver.describe(tensor).address, 1) if self.pool is not None else None
        if part is not None:
            part.used_on(stream)

    def drop(self, ref: Reference) -> None:
        """Gives up a grant of this process, unread. Does nothing if the tensor is gone already."""
        if isinstance(ref, HostRef):
            with contextlib.suppress(StaleRef):
                self._opened(ref).release()
        elif self.pool is not None:
            with contextlib.suppress(StaleRef):
                self.pool.drop(ref.where)

    # ── for both ──
    def flush(self, timeout: float | None = 0) -> bool:
        """Gives back what the device is done with; an idle process should call it. Returns whether that was all."""
        uploads = self.uploads.flush(timeout)
        slices = self.pool.flush(timeout) if self.pool is not None else self.driver.in_flight.flush(timeout)
        return uploads and slices

    def close(self) -> bool:
        """Closes what this made: not the pools. False: copies are under way; call it again."""
        return self.uploads.close()

    # ── within ──
    def _taken(self, nbytes: int, timeout: float | None) -> Slice | None:
        if self.pool is None:
            return None
        try:
            return self.pool.take(nbytes, timeout)
        except MemoryExhausted:
            return None

    def _shared(
        self, part: Slice, kind: Kind, shape: tuple[int, ...], offset: int, places: tuple[Place, ...]
    ) -> CudaRef:
        assert self.pool is not None, "a slice without a pool"
        peers = [place.slices for place in places if place.slices is not None]
        ref = self.pool.share(part, peers).slice(offset, nbytes_of(kind, shape))
        return CudaRef(kind.code, shape, self.driver.uuid, ref)

    def _opened(self, ref: HostRef) -> Lease:
        try:
            return ref.handle.open(self.store)
        except Missing as missing:
            raise StaleRef(str(missing)) from None

    def _by_host(
        self, tensor: Any, described: DeviceTensor, places: tuple[Place, ...], timeout: float | None
    ) -> HostRef:
        peers = [place.store for place in places if place.store is not None]
        if described.nbytes > self.inline_nbytes and len(peers) == len(places):
            lease = self._stored(tensor, described, timeout)
            if lease is not None and self.store is not None:
                with lease:
                    self.store.pool.grant_all(lease.ref, peers)
                    return HostRef(Handle(None, lease.ref))
        planned = _plan(described)
        numbers = bytearray(planned.nbytes)
        self._copied(read_to_fill(planned.layout, numbers, as_=self.driver.as_), tensor)
        return HostRef(Handle(None, planned.layout, Buffer(numbers)))

    def _stored(self, tensor: Any, described: DeviceTensor, timeout: float | None) -> Lease | None:
        """Returns a copy of the tensor in the store; None: there is no store, or no room."""
        if self.store is None:
            return None
        try:
            loan = self.store.loan(None, _plan(described), timeout=timeout)
        except MemoryExhausted:
            return None
        self._copied(loan.value(self.driver.as_), tensor)
        return loan.commit()

    def _copied(self, to: Any, tensor: Any) -> None:
        self.driver.copy(to, tensor)
        if not wait_for([self.driver.record(self.driver.stream())], SHARE_TIMEOUT):
            raise Timeout(f"the device has not copied a tensor to host memory within {SHARE_TIMEOUT:g} s")


def _plan(described: DeviceTensor) -> Plan:
    return plan(Empty(described.shape, described.kind.name), is_filled_later=True)
