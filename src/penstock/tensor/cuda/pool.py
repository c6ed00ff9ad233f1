"""A pool of device memory: allocated once, by one process, and lent out in slices to every process within reach.

An ordinary pool (`books`) records the holders of each slice. Blocks of the books have offsets and sizes, and no host
memory, not even addresses. Leases, grants, generations, recovery after a death, StaleRef and `penstock inspect` are
therefore the core's, without a second implementation.

The producer allocates the memory, and writes the memory's handle and the device's uuid into the books, for attaching
processes. A consumer opens the handle with the first slice, and closes the mapping when the pool is closed, or when the
producer is dead, for which a thread waits. `order.py` decides when a released slice is free. No mapping guards device
memory: a kernel that writes to a received slice changes the slice for all holders.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any

import msgspec

from penstock import _native
from penstock.errors import ClosedError, LayoutMismatch, MemoryExhausted, PeerDied, Timeout
from penstock.memory import Peer, Pool, PoolStats, Ref, Ticket
from penstock.memory.segment import Shareable, attached_segment, fitting, short, within
from penstock.tensor.cuda.driver import DeviceError, Driver, ForeignDevice
from penstock.tensor.cuda.order import NEVER, wait_for
from penstock.tensor.cuda.torch_driver import driver_of

ROOM_POLL_S = 0.05  # seconds; of a take() that waits for room, and must see to its own slices in flight
SHARE_TIMEOUT = 30.0  # seconds, for the device to finish what it writes
LATE_POLL_S = 0.2  # seconds between looks at slices that hold a mapping without a producer, or without a pool
ALIGN = 512  # of slices: what the device's own allocator gives, and vector loads may rely on


class About(msgspec.Struct, frozen=True):
    """The description of the memory in the books."""

    device: bytes
    handle: bytes
    pid: int  # of the producer
    start: int


class Mapped:
    """The memory of a pool in this process: allocated here, or opened."""

    def __init__(self, driver: Driver, address: int, *, is_own: bool) -> None:
        self.driver = driver
        self.address = address
        self.is_own = is_own

    def __del__(self) -> None:
        # CudaPool.close() alone frees the producer's own memory: it knows whether a peer has it mapped.
        if not self.is_own and not sys.is_finalizing():
            with contextlib.suppress(DeviceError):
                self.driver.close(self.address)


# Pools that this process allocated, by nonce: a handle cannot be opened where it was made, and need not be.
_own: weakref.WeakValueDictionary[int, Mapped] = weakref.WeakValueDictionary()


class Held:
    """A lease of a slice, and the mapping that it lies in."""

    __slots__ = ("lease", "mapped")

    def __init__(self, lease: _native.BlockLease, mapped: Mapped) -> None:
        self.lease: _native.BlockLease | None = lease
        self.mapped: Mapped | None = mapped

    def give_back(self) -> None:
        self.mapped = None  # first: a peer that has left has closed the mapping, and the producer may free it
        self.lease = None


class Slice:
    """The right to touch a slice of device memory. Every tensor of it keeps it; it is given back in stream order."""

    __slots__ = ("__weakref__", "_driver", "_held", "_streams", "address", "ref")

    def __init__(self, driver: Driver, lease: _native.BlockLease, mapped: Mapped) -> None:
        self._driver = driver
        self._held: Held | None = None
        self._streams = [driver.stream()]  # which may raise: then there is nothing to give back in order
        self._held = Held(lease, mapped)
        self.ref = Ref(*lease.ref_numbers())
        self.address = mapped.address + self.ref.offset

    @property
    def nbytes(self) -> int:
        return self.ref.nbytes

    @property
    def lease(self) -> _native.BlockLease:
        if self._held is None or self._held.lease is None:
            raise ClosedError("the slice has been released")
        return self._held.lease

    def used_on(self, stream: Any) -> None:
        """Records that a stream has work on the slice. Not needed for the streams that are current when the slice is
        opened and released."""
        if stream not in self._streams:
            self._streams.append(stream)

    def marked(self) -> list[Any]:
        """Returns markers for all work until now: one for each stream of the slice, the current one included."""
        streams = list(self._streams)
        current = self._driver.stream()
        if current not in streams:
            streams.append(current)
        return [self._driver.record(stream) for stream in streams]

    def release(self) -> None:
        """Gives the slice back when the work now on its streams is done. Does nothing if it has been released."""
        held, self._held = self._held, None
        if held is None:
            return
        try:
            markers = self.marked()
        except BaseException:
            self._driver.in_flight.keep([NEVER], held)  # the work still on it is unknown
            raise
        self._driver.in_flight.keep(markers, held)
        self._driver.in_flight.poll()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.release()


class CudaPool(Shareable):
    """Device memory that is lent out. One for each producing process and device; others attach, or are spawned with it.

    Attaching calls no CUDA function. A process on a device that cannot reach the producer's device can attach, and gets
    ForeignDevice when it opens a slice.
    """

    def __init__(self, segment: _native.Segment, *, driver: Driver | None = None, peer_name: str = "") -> None:
        super().__init__(segment)
        if not segment.is_elsewhere:
            raise LayoutMismatch(f"expected a pool of device memory, got segment '{segment.name}', which is none")
        try:
            self.about = msgspec.msgpack.decode(segment.schema, type=About)
        except (msgspec.MsgspecError, ValueError) as error:
            raise LayoutMismatch(f"'{segment.name}' does not say where its memory lies: {error}") from None
        self.books = Pool(segment, peer_name)
        self._given_driver = driver
        self._mapped: Mapped | None = _own.get(segment.nonce)
        self._mapping = threading.Lock()  # so that threads open the handle once; never taken by a destructor
        self._frees = False  # only the pool of create() does: a second pool of the same memory in this process does not
        self._parts: weakref.WeakSet[Slice] = weakref.WeakSet()
        self._producer = -1  # its pidfd, once we have mapped
        self._stop_watch: weakref.finalize[[int, int], CudaPool] | None = None  # of the producer, by a thread

    @classmethod
    def create(
        cls,
        nbytes: int,
        *,
        name: str = "",
        peer_name: str = "",
        max_blocks: int = 1024,
        max_peers: int = 32,
        driver: Driver | None = None,
    ) -> CudaPool:
        """Allocates it now, on the driver's device (None: torch's current one); close() frees it, or the process's end.
        Raises MemoryExhausted, NoDevice."""
        driver = driver or driver_of()
        nbytes = -(-fitting(nbytes, "a pool") // ALIGN) * ALIGN
        shape = {
            "kind": _native.POOL,
            "max_peers": within("max_peers", max_peers, 1, _native.MAX_PEERS),
            "max_blocks": within("max_blocks", max_blocks, 1, _native.MAX_BLOCKS),
            "has_grants": 1,
            "pool_nbytes": nbytes,
            "elsewhere": 1,
        }
        address = driver.allocate(nbytes)
        try:
            about = About(driver.uuid, driver.export(address), *_native.process_identity())
            schema = msgspec.msgpack.encode(about)
            segment = _native.Segment.create(short(name or "device memory"), shape, schema=schema)
        except BaseException:
            driver.free(address)
            raise
        mapped = _own[segment.nonce] = Mapped(driver, address, is_own=True)
        pool = cls(segment, driver=driver, peer_name=peer_name)
        pool._mapped = mapped
        pool._frees = True
        pool.books.join()
        return pool

    @classmethod
    def attach(cls, where: Ticket | str | int, *, driver: Driver | None = None, peer_name: str = "") -> CudaPool:
        """Maps nothing yet, and makes no context."""
        with attached_segment(where) as segment:
            return cls(segment, driver=driver, peer_name=peer_name)

    @property
    def driver(self) -> Driver:
        if self._given_driver is None:
            self._given_driver = driver_of()
        return self._given_driver

    @property
    def nbytes(self) -> int:
        return self._segment.pool_nbytes

    @property
    def is_producer(self) -> bool:
        """Whether this process has allocated the memory."""
        return self._mapped is not None and self._mapped.is_own

    @property
    def peer(self) -> Peer:
        return self.books.peer

    def peers(self) -> list[Peer]:
        return self.books.peers()

    def stats(self) -> PoolStats:
        """Slices in flight are taken."""
        return self.books.stats()

    @property
    def is_reachable(self) -> bool:
        """Whether this process's device can read the memory."""
        return self.driver.can_map(self.about.device, self.about.handle)

    # ── slices ──
    def take(self, nbytes: int, timeout: float | None = 0) -> Slice:
        """A slice to write to; for the producer. Waits up to `timeout` seconds (None: for ever) for others to come
        back. Raises MemoryExhausted, which names the holders."""
        if not self.is_producer:
            raise ForeignDevice(f"only pid {self.about.pid}, which created pool '{self.name}', takes slices of it")
        driver = self.driver
        deadline = None if timeout is None else time.monotonic() + timeout
        room = max(-(-nbytes // ALIGN), 1) * ALIGN
        while True:
            driver.in_flight.poll()
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            try:
                lease = self.books.take(room, ROOM_POLL_S if left is None else min(left, ROOM_POLL_S))
            except MemoryExhausted:
                if room > self.nbytes or left == 0:
                    raise
            else:
                return self._part(lease)

    def share(self, part: Slice, to: Iterable[Peer | int], *, timeout: float | None = SHARE_TIMEOUT) -> Ref:
        """Returns a reference to a slice, granted once to each peer in `to`. Waits until the work on its streams is
        done, so a peer that opens it need not wait. Raises Timeout if that takes longer than `timeout` seconds."""
        if not wait_for(part.marked(), timeout):
            raise Timeout(f"the device has not finished writing a slice of '{self.name}' within {timeout} s")
        return self.books.share(part.lease, to)

    def open(self, ref: Ref) -> Slice:
        """The slice that a reference names. Raises StaleRef if it is gone or was never there; ForeignDevice if the
        device of this process cannot reach the pool's; PeerDied if the producer is dead. Nothing is touched then."""
        if not self.is_reachable:
            raise ForeignDevice(
                f"'{self.name}' lies on device {self.about.device.hex()}, which {self.driver.uuid.hex()}, used by this "
                "process, cannot reach: send the producer this process's CudaTensors.place"
            )
        self.driver.in_flight.poll()
        if self._has_lost_producer():
            raise PeerDied(f"the producer of '{self.name}', pid {self.about.pid}, died, and its memory with it")
        lease = self.books.open(ref)
        return self._part(lease)

    def part_at(self, address: int, nbytes: int) -> Slice | None:
        """The slice of this process that some memory lies in; None: it lies in none."""
        for part in list(self._parts):
            if 0 <= address - part.address <= part.nbytes - nbytes:
                return part
        return None

    def drop(self, ref: Ref) -> None:
        """Gives up what was granted to us, unread: nothing is mapped for it. Raises StaleRef."""
        self.books.open(ref).release()

    def flush(self, timeout: float | None = 0) -> bool:
        """Gives back what the device is done with; an idle process should call it. Returns whether that was all."""
        self._has_lost_producer()
        return self.driver.in_flight.flush(timeout)

    # ── the mapping ──
    def _part(self, lease: _native.BlockLease) -> Slice:
        part = Slice(self.driver, lease, self._map())
        self._parts.add(part)
        return part

    def _map(self) -> Mapped:
        if self._is_closed:
            raise ClosedError(f"pool '{self.name}' is closed")
        if self.is_producer:
            assert self._mapped is not None
            return self._mapped
        with self._mapping:
            mapped = self._mapped
            if mapped is None:
                address = self.driver.open(self.about.handle, self.nbytes)
                mapped = self._mapped = Mapped(self.driver, address, is_own=False)
                self._watch_producer(mapped)
            return mapped

    def _watch_producer(self, mapped: Mapped) -> None:
        if self._producer < 0:  # unknown: open() and flush() look again
            return
        end, stop = os.pipe()
        self._stop_watch = weakref.finalize(self, _stop, stop, os.getpid())
        arguments = os.dup(self._producer), end, weakref.ref(self), weakref.ref(mapped)
        threading.Thread(target=_close_late, args=arguments, name="device memory", daemon=True).start()

    def _has_lost_producer(self) -> bool:
        """Whether it is dead: its memory is closed with the last slice then. False while that is unknown."""
        if self._is_closed or self.is_producer:
            return False
        with self._mapping:
            if self._producer < 0:
                try:
                    self._producer = _native.open_process(self.about.pid, self.about.start)
                except OSError:
                    return False
        if self._producer >= 0:
            poll = select.poll()  # unlike select(), for descriptors of any number
            poll.register(self._producer, select.POLLIN)
            if not poll.poll(0):
                return False
        self._mapped = None
        return True

    def close(self) -> bool:
        """Gives this process's place up, as soon as its last slice is back. The producer's frees the memory.

        False: it could not be freed, because slices are in use or in flight, or other peers have the pool open: memory
        that a peer has mapped must not be freed. Call it again then; the end of the process frees it in any case.
        """
        self._is_closed = True
        if self._stop_watch is not None:
            self._stop_watch()
        if self._producer >= 0:
            os.close(self._producer)
            self._producer = -1
        mapped = self._mapped
        if mapped is not None:
            mapped.driver.in_flight.poll()
        if mapped is None or not self._frees:
            self._mapped = None
            self.books.close()
            return True
        if self.books.stats().blocks or any(
            peer.state not in ("dead", "left") for peer in self.peers() if peer.index != self.peer.index
        ):
            return False
        self._mapped = None
        self.books.close()
        del _own[self._segment.nonce]
        mapped.driver.free(mapped.address)
        return True

    def __enter__(self) -> CudaPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stop(end: int, pid: int) -> None:
    if os.getpid() == pid:  # a fork has a copy of the pool, and not the thread
        with contextlib.suppress(BrokenPipeError):  # the thread has ended
            os.write(end, b"\0")
    os.close(end)


def _close_late(producer: int, end: int, pool: weakref.ref[CudaPool], mapped: weakref.ref[Mapped]) -> None:
    """Waits until the producer of mapped memory dies, or the pool is closed or dropped, which `end` tells. Closes the
    mapping with the last slice then, whether or not the process touches a pool again."""
    poll = select.poll()
    poll.register(producer, select.POLLIN)
    poll.register(end, select.POLLIN)
    try:
        poll.poll()
    finally:
        os.close(producer)
        os.close(end)
    while (mapping := mapped()) is not None:
        if (opened := pool()) is not None:
            opened._mapped = None
        with contextlib.suppress(Exception):  # of a lost device: the end of the process closes the mapping
            mapping.driver.in_flight.poll()
        del opened, mapping
        time.sleep(LATE_POLL_S)
