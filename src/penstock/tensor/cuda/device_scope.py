"""Tensors of a CUDA device that travel with a request: a scope has them in a pool, and values have references to them.

    scope = DeviceScope(tensors, store, readers)  # in the process that has the tensors
    handle = scope.put({"pixel_values": pixels, "image_grid_thw": grid})
    …
    received = ReceivedTensors(handle_opener)  # in a worker
    received.resolve(handle.open(store).value("torch"))["pixel_values"]  # on the worker's device

As in `Scope`, no lease is granted to a second process: a tensor is there until the scope is released, and a process
that opens a reference later gets Missing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from penstock._native import Lease
from penstock.errors import LayoutMismatch, Missing, PeerDied, StaleRef, UnsupportedTensor
from penstock.tensor.cuda.driver import Driver
from penstock.tensor.cuda.pool import CudaPool, Slice
from penstock.tensor.cuda.ref import HostRef, Reference
from penstock.tensor.cuda.tensors import CudaTensors
from penstock.tensor.cuda.torch_driver import driver_of
from penstock.tensor.handle import Handle
from penstock.tensor.scope import ROOM_TIMEOUT, Scope
from penstock.tensor.store import Store

ENTRY = "penstock.device tensor"  # the only key of a mapping that stands for a tensor
MAX_POOLS = 16  # of other processes that a receiver has open; the pool used least recently is closed


class DeviceEntry(msgspec.Struct, frozen=True, array_like=True):
    """Stands in a value for a tensor."""

    pool: str  # the ticket
    ref: Reference


class DeviceScope(Scope):
    """A scope for values with tensors of a device, each of which is copied once.

    A tensor goes by the pool of device memory if the devices of all readers can reach the pool, else by the store.
    `tensors.stats` counts both ways.

    Args:
        tensors: with a pool of this process, and a store for tensors that cannot go by the pool.
        store: as of `Scope`.
        readers: the uuids of the devices that will read the tensors, as of `worker_devices`.
    """

    def __init__(self, tensors: CudaTensors, store: Store | None = None, readers: Iterable[bytes] = ()) -> None:
        super().__init__(store)
        self._tensors = tensors
        self._is_near = all(uuid in tensors.driver.readers for uuid in readers)
        self._lent: list[Slice | Lease] = []

    def put(self, value: Any, *, key: bytes | None = None) -> Handle:
        """Returns a handle of a value, a mapping of tensors by name. A value with tensors of a device has no key: it
        ends with this scope.

        Raises:
            MemoryExhausted: there is no room for a tensor, neither in the pool nor in the store.
            UnsupportedTensor, ClosedError: as `Scope.put`.
        """
        if not isinstance(value, Mapping):
            return super().put(value, key=key)
        lent: list[Slice | Lease] = []
        entries = {name: self._entry(tensor, lent) for name, tensor in value.items()}
        handle = super().put(entries, key=None if lent else key)
        with self._changing:
            self._require_open()
            self._lent += lent
        return handle

    def release(self) -> None:
        super().release()
        with self._changing:
            lent, self._lent = self._lent, []
        for holder in lent:
            holder.release()

    def _entry(self, tensor: Any, lent: list[Slice | Lease]) -> Any:
        try:
            self._tensors.driver.describe(tensor)
        except UnsupportedTensor:  # no tensor of a device: `Scope.put` takes it, or says why not
            return tensor
        ref, holder = self._tensors.lend(tensor, is_near=self._is_near, timeout=ROOM_TIMEOUT)
        lent.append(holder)
        pool = self._tensors.pool
        return entry_of("" if pool is None else str(pool.ticket), ref)


class ReceivedTensors:
    """The receiver of values of `DeviceScope`: one for each process and device."""

    def __init__(self, open_handle: Callable[[Handle], Lease], *, driver: Driver | None = None) -> None:
        """`open_handle`: opens what travels by the store. `driver`: None for that of torch's current device."""
        self._open_handle = open_handle
        self.driver = driver or driver_of()
        self._tensors: OrderedDict[str, CudaTensors] = OrderedDict()  # by the ticket of the pool

    def resolve(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the value with its tensors: on this process's device, or in the store, where they lie.

        Raises Missing if a tensor is gone, and DeviceError or ForeignDevice if the device cannot reach one.
        """
        return {name: self._tensor(entry) if _is_entry(entry) else entry for name, entry in value.items()}

    def fetched(self) -> int:
        """Returns how many tensors have been copied from other devices."""
        return sum(tensors.stats.fetched for tensors in self._tensors.values())

    def flush(self) -> None:
        """Gives back tensors that the device has done with. Any thread may call it."""
        self.driver.in_flight.poll()

    def close(self) -> None:
        """Closes the pools of senders. Tensors that are viewed keep their memory."""
        while self._tensors:
            _close(self._tensors.popitem()[1])

    def _tensor(self, entry: Mapping[str, Any]) -> Any:
        decoded = msgspec.msgpack.decode(entry[ENTRY], type=DeviceEntry)
        if isinstance(decoded.ref, HostRef):
            return self._open_handle(decoded.ref.handle).value(self.driver.as_)
        try:
            return self._sender(decoded.pool).view(decoded.ref)
        except (StaleRef, PeerDied, LayoutMismatch) as gone:
            if isinstance(gone, PeerDied):
                _close(self._tensors.pop(decoded.pool))
            raise Missing(f"a tensor of a device is gone: {gone}") from None

    def _sender(self, ticket: str) -> CudaTensors:
        tensors = self._tensors.get(ticket)
        if tensors is None:
            pool = CudaPool.attach(ticket, driver=self.driver)
            tensors = self._tensors[ticket] = CudaTensors(pool, None, driver=self.driver)
            if len(self._tensors) > MAX_POOLS:
                _close(self._tensors.popitem(last=False)[1])
        self._tensors.move_to_end(ticket)
        return tensors


def entry_of(ticket: str, ref: Reference) -> dict[str, bytes]:
    """Returns what stands in a value for a tensor."""
    return {ENTRY: msgspec.msgpack.encode(DeviceEntry(ticket, ref))}


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, Mapping) and entry.keys() == {ENTRY}


def _close(tensors: CudaTensors) -> None:
    assert tensors.pool is not None, "receivers have no tensors without a pool"
    tensors.close()
    tensors.pool.close()
