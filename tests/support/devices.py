"""A device that is not there: its memory is a file that processes share, and its streams stop and go on when told to.

So everything but the real driver is tested on every machine: handles are opened in other processes, memory is really
shared, and a copy that was put on a stopped stream reads what lies there when the stream goes on.
"""

import contextlib
import ctypes
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from penstock.errors import MemoryExhausted, UnsupportedTensor
from penstock.tensor.cuda.driver import DeviceError, DeviceTensor, ForeignDevice
from penstock.tensor.cuda.order import DeferredReleases
from penstock.tensor.kinds import Kind, kind_of_numpy
from penstock.tensor.views import As

HANDLE = struct.Struct("<QQQ40x")  # pid, descriptor, inode; 64 bytes as a real one


class Passed:
    """A place on a stream."""

    def __init__(self) -> None:
        self.is_passed = False

    def query(self) -> bool:
        return self.is_passed


class Stream:
    """Does what is put on it at once, or, while it is stopped, when it goes on."""

    def __init__(self, name: str = "default") -> None:
        self.name = name
        self.is_stopped = False
        self.work: list[Callable[[], object]] = []

    def put(self, work: Callable[[], object]) -> None:
        if self.is_stopped:
            self.work.append(work)
        else:
            work()

    def stop(self) -> None:
        self.is_stopped = True

    def go_on(self) -> None:
        self.is_stopped = False
        work, self.work = self.work, []
        for task in work:
            task()


class DeviceArray(np.ndarray[Any, Any]):
    """An array that lies on a device, as far as anybody but the fake driver can tell."""

    uuid: bytes = b""

    def __array_finalize__(self, other: Any) -> None:
        self.uuid = getattr(other, "uuid", b"")


class FakeDriver:
    as_: As = "numpy"
    legacy_reason = ""

    def __init__(self, number: int = 0, memory_nbytes: int = 1 << 30, peers: tuple[int, ...] = ()) -> None:
        self.uuid = bytes([number]) * 16
        self.readers = frozenset(bytes([peer]) * 16 for peer in (number, *peers))
        self.memory_nbytes = memory_nbytes
        self.in_flight = DeferredReleases()
        self.current = Stream()
        self.allocated: dict[int, int] = {}  # descriptors, by address
        self.mapped: dict[int, tuple[mmap.mmap, Any]] = {}
        self.opens = 0  # of handles
        self.registered: dict[int, int] = {}
        self.refuses_to_register = False
        self.uploaded_from: list[int] = []

    # ── memory ──
    def _map(self, fd: int, nbytes: int) -> int:
        mapping = mmap.mmap(fd, nbytes)
        exported = (ctypes.c_char * nbytes).from_buffer(mapping)
        address = ctypes.addressof(exported)
        self.mapped[address] = mapping, exported
        return address

    def _unmap(self, address: int) -> None:
        mapping, exported = self.mapped.pop(address)
        del exported
        mapping.close()

    def allocate(self, nbytes: int) -> int:
        if nbytes > self.memory_nbytes:
            raise MemoryExhausted(f"the fake device has {self.memory_nbytes} bytes")
        fd = os.memfd_create("penstock-device")
        os.ftruncate(fd, nbytes)
        address = self._map(fd, nbytes)
        self.allocated[address] = fd
        return address

    def free(self, address: int) -> None:
        self._unmap(address)
        os.close(self.allocated.pop(address))

    def export(self, address: int) -> bytes:
        fd = self.allocated[address]
        return HANDLE.pack(os.getpid(), fd, os.fstat(fd).st_ino)

    def can_map(self, device: bytes, handle: bytes) -> bool:
        return device in self.readers

    def open(self, handle: bytes, nbytes: int) -> int:
        if len(handle) != HANDLE.size:
            raise DeviceError("not a handle")
        pid, number, inode = HANDLE.unpack(handle)
        if pid == os.getpid():
            raise DeviceError("a handle is not opened where it was made")
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        except OSError as error:
            raise DeviceError(f"the memory is gone: {error}") from None
        try:
            status = os.fstat(fd)
            if status.st_ino != inode or status.st_size < nbytes:
                raise DeviceError("not the memory that was exported")
            self.opens += 1
            return self._map(fd, nbytes)
        finally:
            os.close(fd)

    def close(self, address: int) -> None:
        self._unmap(address)

    # ── order ──
    def stream(self) -> Stream:
        return self.current

    def record(self, stream: Stream) -> Passed:
        event = Passed()
        stream.put(lambda: setattr(event, "is_passed", True))
        return event

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def on(self, stream: Stream | None) -> Any:
        return contextlib.nullcontext() if stream is None else self._on(stream)

    # ── arrays ──
    def describe(self, tensor: Any) -> DeviceTensor:
        if not isinstance(tensor, DeviceArray):
            raise UnsupportedTensor(f"not a tensor of a device: {type(tensor).__name__}")
        if tensor.uuid != self.uuid:
            raise ForeignDevice("a tensor of another device")
        kind = kind_of_numpy(tensor.dtype)
        return DeviceTensor(kind, tensor.shape, tensor.nbytes, tensor.ctypes.data, tensor.flags.c_contiguous)

    def copy_of(self, array: Any) -> Any:
        """The array, as one of this device."""
        view = array.view(DeviceArray)
        view.uuid = self.uuid
        return view

    def array(self, address: int, kind: Kind, shape: tuple[int, ...], holder: object) -> Any:
        nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        if not nbytes:
            return self.empty(kind, shape)
        exported = (ctypes.c_char * nbytes).from_address(address)
        exported.holder = holder  # type: ignore[attr-defined]
        return self.copy_of(np.frombuffer(exported, kind.numpy or kind.bits).reshape(shape))

    def empty(self, kind: Kind, shape: tuple[int, ...]) -> Any:
        return self.copy_of(np.empty(shape, kind.numpy or kind.bits))

    def copy(self, to: Any, source: Any) -> None:
        target, values = self._bare(to), self._bare(source)
        self.current.put(lambda: np.copyto(target, values))

    def _bare(self, array: Any) -> Any:
        """Returns the array without the holder of its shared memory: work on a stream does not hold memory."""
        address = array.ctypes.data
        if not any(first <= address < first + len(mapping) for first, (mapping, _) in self.mapped.items()):
            return array
        bare = type("Bare", (), {"__array_interface__": dict(array.__array_interface__)})()
        return np.asarray(bare)

    def fetch(self, to: Any, address: int) -> None:
        self.current.put(lambda: ctypes.memmove(to.ctypes.data, address, to.nbytes))

    # ── host memory ──
    def register(self, address: int, nbytes: int) -> None:
        if self.refuses_to_register:
            raise DeviceError("no context, or no room for so many pinned pages")
        assert address not in self.registered, "registered twice"
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def upload(self, to: Any, address: int) -> None:
        self.uploaded_from.append(address)
        self.current.put(lambda: ctypes.memmove(to.ctypes.data, address, to.nbytes))

    def is_registered(self, address: int) -> bool:
        return any(first <= address < first + nbytes for first, nbytes in self.registered.items())
