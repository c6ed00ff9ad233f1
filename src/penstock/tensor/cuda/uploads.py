"""Copies from shared host memory to a device, by the device: the first copy registers (pins) the memory.

A source is held until its copy is done.

Received views lie in a read-only mapping, which many devices refuse to register, with the flag for read-only memory
(attribute HOST_REGISTER_READ_ONLY_SUPPORTED) or without. Instead, the writable mapping of the same bytes is registered,
which a process that takes blocks has anyway, and copies use the address in the writable mapping. No view leads to the
writable mapping: a stray write through a view still ends the writing process. Where registering fails, copies go from
pageable memory, and are counted.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from penstock import _native
from penstock.errors import ClosedError, Timeout, UnsupportedTensor
from penstock.memory.segment import Shareable
from penstock.tensor.cuda.driver import Driver
from penstock.tensor.cuda.order import DeferredReleases, wait_for
from penstock.tensor.cuda.torch_driver import driver_of
from penstock.tensor.source import source

CLOSE_TIMEOUT = 5.0  # seconds, for copies that are under way
COPY_TIMEOUT = 30.0  # seconds, for one that is waited for


class UploadStats(msgspec.Struct):
    """Counters of an `Uploads`."""

    copies: int = 0
    copied_nbytes: int = 0
    pageable: int = 0  # of the copies: not from registered memory
    registered_nbytes: int = 0
    refusals: int = 0  # to register a segment; asked once for each


class _View:
    """The source of a copy, held until the copy is done. The view's lease goes with the last source."""

    __slots__ = ("view",)

    def __init__(self, view: Any) -> None:
        self.view = view

    def give_back(self) -> None:
        self.view = None


class _Pinned:
    """A segment with its mapping. `address` None: registering failed."""

    def __init__(self, segment: _native.Segment, driver: Driver) -> None:
        self.segment = segment
        self.error = ""
        self.address: int | None = None
        self.nbytes = 0
        try:
            segment.claim_all()  # registering touches every page, whether there is memory for it or not
            mapping = segment.mapping(True, True)
            if mapping is not None:
                driver.register(*mapping)
                self.address, self.nbytes = mapping
        except Exception as error:  # of the device; or there is no memory to claim, or no room for a second mapping
            self.error = str(error)

    def forget(self, driver: Driver) -> None:
        if self.address is not None:
            driver.unregister(self.address)


class _Dropped:
    """What an `Uploads` dropped without close() leaves: held until its copies are done, and then unregistered."""

    def __init__(self, in_flight: DeferredReleases, pinned: dict[int, _Pinned], driver: Driver) -> None:
        self._in_flight = in_flight
        self._pinned = pinned
        self._driver = driver

    def query(self) -> bool:
        return not self._in_flight.poll()

    def give_back(self) -> None:
        for pinned in self._pinned.values():
            pinned.forget(self._driver)
        self._pinned.clear()


class Uploads:
    """Copies to one device (the driver's; None: torch's current one) from these segments, pools and stores.

    Registering takes about as long as reading the memory once, pins all of it, and waits for the first copy. Without
    close(), the memory is unregistered after this is dropped, when the driver next polls and the copies are done.
    """

    def __init__(self, *sources: Shareable, driver: Driver | None = None) -> None:
        self._driver = driver or driver_of()
        self._pinned: dict[int, _Pinned] = {}  # by nonce
        self._in_flight = DeferredReleases()  # separate: close() must wait for these copies only
        self._segments = [shareable._segment for shareable in sources]
        for segment in self._segments:
            if segment.kind == _native.CHANNEL:
                raise ValueError(f"expected segments, pools and stores, got channel '{segment.name}': its memory grows")
        self._is_closed = False
        self.stats = UploadStats()

    def copy_to_device(self, view: Any, *, stream: Any = None, non_blocking: bool = True) -> Any:
        """A tensor of the device with the numbers of a view, copied on `stream` (None: the current one).

        Returns while the copy may be under way: the tensor is for that stream, and the view is held until the copy is
        done. non_blocking=False waits for it. Raises UnsupportedTensor for what does not lie in host memory.
        """
        if self._is_closed:
            raise ClosedError("the uploads are closed")
        self._in_flight.poll()
        tensor = source(view)
        array = tensor.array
        if not hasattr(array, "ctypes") or not array.flags.c_contiguous or not array.dtype.isnative:
            raise UnsupportedTensor("expected a contiguous view: use numpy.ascontiguousarray first")
        driver = self._driver
        address = self._registered(array.ctypes.data, tensor.nbytes)
        self.stats.copies += 1
        self.stats.copied_nbytes += tensor.nbytes
        if address is None:
            self.stats.pageable += 1
        with driver.on(stream):
            copy = driver.empty(tensor.kind, tensor.shape)
            try:
                driver.upload(copy, array.ctypes.data if address is None else address)
            finally:  # also when it failed: part of the copy may have begun
                marker = driver.record(driver.stream())
                self._in_flight.keep([marker], _View((view, array)))
        if not non_blocking and not wait_for([marker], COPY_TIMEOUT):
            raise Timeout(f"the device has not copied {tensor.nbytes} bytes within {COPY_TIMEOUT:g} s")
        return copy

    def register(self) -> None:
        """Registers the memory now: no first copy waits for that. `refusals` says what could not be registered."""
        for segment in self._segments:
            self._pinned_segment(segment)

    def is_registered(self, view: Any) -> bool:
        """Returns whether a contiguous view lies in memory that is registered, or registers it."""
        tensor = source(view)
        return self._registered(tensor.array.ctypes.data, tensor.nbytes) is not None

    def flush(self, timeout: float | None = 0) -> bool:
        """Releases each view with a finished copy, waiting up to `timeout` seconds. Returns whether that was all."""
        return self._in_flight.flush(timeout)

    def refusals(self) -> list[str]:
        """Why segments could not be registered."""
        return [pinned.error for pinned in self._pinned.values() if pinned.error]

    def close(self, timeout: float | None = CLOSE_TIMEOUT) -> bool:
        """Waits for the copies and unregisters. False: some are not done within `timeout` seconds, so the memory stays
        registered; call it again."""
        self._is_closed = True
        if not self._in_flight.flush(timeout):
            return False
        for pinned in self._pinned.values():
            pinned.forget(self._driver)
            self.stats.registered_nbytes -= pinned.nbytes
        self._pinned.clear()
        self._segments.clear()
        return True

    def __del__(self) -> None:
        if sys.is_finalizing() or not (self._pinned or self._in_flight):
            return
        dropped = _Dropped(self._in_flight, self._pinned, self._driver)
        self._driver.in_flight.keep([dropped], dropped)
        self._driver.in_flight.poll()

    def __enter__(self) -> Uploads:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _registered(self, address: int, nbytes: int) -> int | None:
        """Where the same bytes lie in a registered mapping; None: in none."""
        for segment in self._segments:
            for is_writable in (False, True):
                mapping = segment.mapping(is_writable)
                if mapping is None or not 0 <= address - mapping[0] <= mapping[1] - nbytes:
                    continue
                pinned = self._pinned_segment(segment)
                return None if pinned.address is None else pinned.address + (address - mapping[0])
        return None

    def _pinned_segment(self, segment: _native.Segment) -> _Pinned:
        pinned = self._pinned.get(segment.nonce)
        if pinned is None:
            pinned = self._pinned[segment.nonce] = _Pinned(segment, self._driver)
            self.stats.registered_nbytes += pinned.nbytes
            self.stats.refusals += bool(pinned.error)
        return pinned
