"""The interface of a device, kept small: all code above runs, and is tested, without a device.

`torch_driver.py` implements a real device. A driver touches only its device, whichever device the calling thread has
made current.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from penstock.errors import PenstockError
from penstock.tensor.cuda.order import DeferredReleases, Marker
from penstock.tensor.kinds import Kind
from penstock.tensor.views import As


class NoDevice(PenstockError, RuntimeError):
    """There is no device here that could be used; the text says what is missing."""


class DeviceError(PenstockError, RuntimeError):
    """The device's driver refused a call; the text is the driver's."""

    def __init__(self, text: str = "", result: str = "") -> None:
        """`result`: the driver's name of the error, if the driver has refused a call."""
        super().__init__(text)
        self.result = result


class StoppedProducer(DeviceError):
    """The producer of device memory lives, and has not sent the memory's descriptor in time."""

    def __str__(self) -> str:
        return (
            "expected a descriptor from the producer of device memory, got none in time: the producer is stopped "
            "(continue or kill the process), or the machine is overloaded"
        )


class ForeignDevice(PenstockError, ValueError):
    """The memory is of a device that this process does not use, and so will not touch."""


class DeviceTensor(NamedTuple):
    """A tensor of the device, as it was given."""

    kind: Kind
    shape: tuple[int, ...]
    nbytes: int  # of its numbers, C-contiguous
    address: int
    is_contiguous: bool  # and plain: its bytes are its numbers


class Driver(Protocol):
    """A device, as a process uses it. Streams are opaque objects of the driver."""

    uuid: bytes  # of the device: 16 bytes, the same in every process
    as_: As  # how an array of host memory must be shown for copy() to take it
    in_flight: DeferredReleases  # of this process
    legacy_reason: str  # why processes share memory by legacy handles, on this device alone; "": by descriptors
    readers: frozenset[bytes]  # uuids of devices that can reach this device's memory; its own is among them

    # ── memory ──
    def allocate(self, nbytes: int) -> int:
        """Returns the address of a new allocation. Raises MemoryExhausted."""

    def free(self, address: int) -> None: ...

    def export(self, address: int) -> bytes:
        """By what another process opens an allocation. Raises DeviceError."""

    def can_map(self, device: bytes, handle: bytes) -> bool:
        """Whether memory of the device with this uuid can be opened here: of this device, or of one within reach."""

    def open(self, handle: bytes, nbytes: int) -> int:
        """Where an allocation of another process, of at least `nbytes`, is mapped here. Raises DeviceError."""

    def close(self, address: int) -> None: ...

    # ── order ──
    def stream(self) -> Any:
        """The current one of this thread."""

    def record(self, stream: Any) -> Marker:
        """Done when everything that was put on the stream until now is done."""

    # ── arrays ──
    def describe(self, tensor: Any) -> DeviceTensor:
        """Raises UnsupportedTensor for what is no tensor of a device; ForeignDevice for one of another."""

    def array(self, address: int, kind: Kind, shape: tuple[int, ...], holder: object) -> Any:
        """A tensor of this memory, without a copy. Whatever shows any of it keeps the holder."""

    def empty(self, kind: Kind, shape: tuple[int, ...]) -> Any:
        """A tensor of the device's own memory, for the current stream."""

    def copy(self, to: Any, source: Any) -> None:
        """Puts a copy on the current stream: between tensors of the device, or from one of them to host memory."""

    def fetch(self, to: Any, address: int) -> None:
        """Puts a copy of device memory, also of another device, to all of a tensor on the current stream."""

    # ── host memory ──
    def register(self, address: int, nbytes: int) -> None:
        """Lets the device read host memory by itself. Raises DeviceError."""

    def unregister(self, address: int) -> None: ...

    def upload(self, to: Any, address: int) -> None:
        """Puts a copy from host memory to all of a tensor on the current stream. If that memory is not registered, the
        caller waits for a part of it, or all."""

    def on(self, stream: Any) -> Any:
        """Returns a context in which this stream is current; None: the current stream stays."""
