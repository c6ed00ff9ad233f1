"""A real device: torch for tensors, streams and events, NVIDIA's `cuda-bindings` for the rest.

The memory (`virtual_memory.py`), its handles and the registering of host memory go by the driver's own interface, each
call with the primary context pushed on the calling thread and popped again: torch uses the same context, the only
context. The runtime's interface would choose by the thread's current device, which is the first device unless the
thread chose one. torch's sharing of storages is not used either: torch takes memory from a caching allocator, leaves a
file in /dev/shm for the counts of each handle, and needs a handle for each tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.errors import MemoryExhausted, UnsupportedTensor
from penstock.installing import how_to_install
from penstock.tensor.cuda.driver import DeviceError, DeviceTensor, Driver, ForeignDevice, NoDevice
from penstock.tensor.cuda.order import PASSED, DeferredReleases, Marker
from penstock.tensor.cuda.ref import UUID_NBYTES
from penstock.tensor.cuda.virtual_memory import DescriptorHandle, VirtualMemory
from penstock.tensor.kinds import Kind, kind_of, nbytes_of, torch_dtype
from penstock.tensor.views import As

HANDLE_NBYTES = 64  # of CUipcMemHandle
PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"


class LegacyHandle(msgspec.Struct, frozen=True, array_like=True, tag="legacy"):
    """Names memory of a driver without memory behind descriptors, for the same device."""

    ipc_handle: bytes

    def __post_init__(self) -> None:
        if len(self.ipc_handle) != HANDLE_NBYTES:
            raise ValueError(f"expected a handle of {HANDLE_NBYTES} bytes, got {len(self.ipc_handle)}")


HANDLES: msgspec.msgpack.Decoder[LegacyHandle | DescriptorHandle] = msgspec.msgpack.Decoder(
    LegacyHandle | DescriptorHandle
)


def needed() -> tuple[Any, Any]:
    """torch with CUDA, and the driver's interface. Raises NoDevice, which says what is missing."""
    try:
        import torch
    except ImportError:
        raise NoDevice(f"no tensors of a device: torch is not installed ({how_to_install('cuda')})") from None
    if torch.version.cuda is None:
        raise NoDevice(f"no tensors of a device: torch {torch.__version__} is built without CUDA")
    try:
        from cuda.bindings import driver
    except ImportError:
        raise NoDevice(f"no tensors of a device: cuda-bindings is not installed ({how_to_install('cuda')})") from None
    if not torch.cuda.is_available():
        raise NoDevice("no tensors of a device: torch sees none (no GPU, no NVIDIA driver, or CUDA_VISIBLE_DEVICES)")
    return torch, driver


class TorchDriver:
    as_: As = "torch"

    def __init__(self, device: int) -> None:
        torch, driver = needed()
        if not 0 <= device < torch.cuda.device_count():
            raise NoDevice(f"expected a device from 0 to {torch.cuda.device_count() - 1}, got {device}")
        self._torch, self._cuda = torch, driver
        self._device = torch.device("cuda", device)
        self.in_flight = DeferredReleases()
        self._ask("cuInit", 0)
        (number,) = self._ask("cuDeviceGet", device)
        self.uuid = self._uuid_of(number)
        (self._context,) = self._ask("cuDevicePrimaryCtxRetain", number)
        self._virtual: VirtualMemory | None = None
        self.legacy_reason = ""
        self.readers = self._peers = frozenset({self.uuid})
        if VirtualMemory.is_supported(driver, self._ask, number):
            numbers = {index: self._ask("cuDeviceGet", index)[0] for index in range(torch.cuda.device_count())}
            del numbers[device]
            readers = [index for index, other in numbers.items() if self._can_reach(other, number)]
            self._virtual = self._try_virtual(readers)
            if self._virtual is not None:
                self.readers |= {self._uuid_of(numbers[index]) for index in readers}
                self._peers |= {self._uuid_of(other) for other in numbers.values() if self._can_reach(number, other)}
        else:
            self.legacy_reason = "the driver has no memory behind descriptors"

    # ── memory ──
    def allocate(self, nbytes: int) -> int:
        with self._pushed():
            try:
                if self._virtual is not None:
                    return self._virtual.allocate(nbytes)
                (address,) = self._ask("cuMemAlloc", nbytes)
            except DeviceError as error:
                if error.result != OUT_OF_MEMORY:
                    raise
                free, total = self._ask("cuMemGetInfo")
                exhausted = MemoryExhausted(
                    f"a pool of {nbytes} bytes does not fit the device: {free} of its {total} bytes are free"
                )
                exhausted.requested, exhausted.free = nbytes, int(free)
                raise exhausted from None
        return int(address)

    def free(self, address: int) -> None:
        with self._pushed():
            if self._virtual is None or not self._virtual.close(address):
                self._ask("cuMemFree", address)

    def export(self, address: int) -> bytes:
        handle: DescriptorHandle | LegacyHandle | None = (
            None if self._virtual is None else self._virtual.handle(address)
        )
        if handle is None:
            with self._pushed():
                (ipc_handle,) = self._ask("cuIpcGetMemHandle", address)
            handle = LegacyHandle(ctypes.string_at(ipc_handle.getPtr(), HANDLE_NBYTES))
        return msgspec.msgpack.encode(handle)

    def can_map(self, device: bytes, handle: bytes) -> bool:
        if isinstance(_decoded(handle), LegacyHandle):  # of another device, it would begin a context there
            return device == self.uuid
        return self._virtual is not None and device in self._peers

    def open(self, handle: bytes, nbytes: int) -> int:
        decoded = _decoded(handle)
        if isinstance(decoded, LegacyHandle):
            return self._open_legacy(decoded.ipc_handle, nbytes)
        if self._virtual is None:
            raise DeviceError(f"device {self._device.index} maps no memory behind descriptors")
        _require_size(decoded.nbytes, nbytes)
        with self._pushed():
            return self._virtual.open(decoded)

    def _open_legacy(self, handle: bytes, nbytes: int) -> int:
        named = self._cuda.CUipcMemHandle()
        ctypes.memmove(named.getPtr(), handle, HANDLE_NBYTES)
        lazily = int(self._cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)  # the only flag there is
        with self._pushed():
            (mapped,) = self._ask("cuIpcOpenMemHandle", named, lazily)
            address = int(mapped)
            try:
                first, size = self._ask("cuMemGetAddressRange", address)
                _require_size(int(size) if int(first) == address else 0, nbytes)
            except BaseException:
                self._ask("cuIpcCloseMemHandle", address)
                raise
        return address

    def close(self, address: int) -> None:
        with self._pushed():
            if self._virtual is None or not self._virtual.close(address):
                self._ask("cuIpcCloseMemHandle", address)

    # ── order ──
    def stream(self) -> Any:
        return self._torch.cuda.current_stream(self._device)

    def record(self, stream: Any) -> Marker:
        if stream.query():  # in a few microseconds: creating, recording and querying an event takes many
            return PASSED
        event = self._torch.cuda.Event()
        event.record(stream)
        marker: Marker = event
        return marker

    # ── arrays ──
    def describe(self, tensor: Any) -> DeviceTensor:
        torch = self._torch
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cuda" or tensor.layout is not torch.strided:
            raise UnsupportedTensor(
                f"expected a dense torch tensor of a device, got {_what(tensor)}: Store.put sends others"
            )
        if tensor.device != self._device:
            raise ForeignDevice(f"the tensor lies on {tensor.device}, and this is the driver of {self._device}")
        if tensor.requires_grad:
            raise UnsupportedTensor(
                "expected a tensor without gradient, got one that requires grad: send tensor.detach()"
            )
        kind = kind_of(tensor.dtype)
        shape = tuple(tensor.shape)
        is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        return DeviceTensor(kind, shape, nbytes_of(kind, shape), tensor.data_ptr(), is_plain)

    def array(self, address: int, kind: Kind, shape: tuple[int, ...], holder: object) -> Any:
        nbytes = nbytes_of(kind, shape)
        if not nbytes:
            return self.empty(kind, shape)
        whole = self._torch.as_tensor(_Exported(address, nbytes, holder), device=self._device)
        return whole.view(torch_dtype(kind)).view(shape)

    def empty(self, kind: Kind, shape: tuple[int, ...]) -> Any:
        return self._torch.empty(shape, dtype=torch_dtype(kind), device=self._device)

    def copy(self, to: Any, source: Any) -> None:
        if not to.numel():
            return
        kind = kind_of(to.dtype)
        if kind.numpy is None and not source.is_conj() and not source.is_neg():  # torch does not copy all of these
            bits = getattr(self._torch, kind.bits.name.removeprefix("u") if kind.itemsize > 1 else "uint8")
            to, source = to.view(bits), source.view(bits)
        to.copy_(source, non_blocking=True)

    def fetch(self, to: Any, address: int) -> None:
        nbytes = to.numel() * to.element_size()
        if nbytes:
            with self._pushed():
                self._ask("cuMemcpyDtoDAsync", to.data_ptr(), address, nbytes, self.stream().cuda_stream)

    # ── host memory ──
    def register(self, address: int, nbytes: int) -> None:
        with self._pushed():
            self._ask("cuMemHostRegister", address, nbytes, PORTABLE)

    def unregister(self, address: int) -> None:
        with self._pushed():
            self._ask("cuMemHostUnregister", address)

    def upload(self, to: Any, address: int) -> None:
        nbytes = to.numel() * to.element_size()
        if not nbytes:
            return
        with self._pushed():
            self._ask("cuMemcpyHtoDAsync", to.data_ptr(), address, nbytes, self.stream().cuda_stream)

    def on(self, stream: Any) -> Any:
        return contextlib.nullcontext() if stream is None else self._torch.cuda.stream(stream)

    # ── within ──
    def _try_virtual(self, readers: list[int]) -> VirtualMemory | None:
        """Returns None where the driver does not do what its attributes say: sandboxes refuse to export memory."""
        try:
            with self._pushed():
                memory = VirtualMemory(self._cuda, self._ask, self._device.index, readers)
                try:
                    memory.close(memory.allocate(1))
                except DeviceError as error:
                    if error.result != OUT_OF_MEMORY:  # which says nothing about sharing
                        raise
        except (DeviceError, OSError) as error:
            self.legacy_reason = str(error)
            return None
        return memory

    def _can_reach(self, device: Any, other: Any) -> bool:
        return bool(self._ask("cuDeviceCanAccessPeer", device, other)[0])

    def _uuid_of(self, number: Any) -> bytes:
        # Of a slice of a device (MIG) the older call names the whole device; newer bindings have only the newer one.
        newest = "cuDeviceGetUuid_v2" if hasattr(self._cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        (uuid,) = self._ask(newest, number)
        return bytes(uuid.bytes)[:UUID_NBYTES]

    @contextlib.contextmanager
    def _pushed(self) -> Iterator[None]:
        self._ask("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._ask("cuCtxPopCurrent")

    def _ask(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """Returns the call's values after its result. Raises DeviceError with the result's name."""
        result, *values = getattr(self._cuda, name)(*arguments)
        if int(result) != 0:
            error_name = getattr(result, "name", str(result))
            raise DeviceError(f"{name} of device {self._device.index}: {error_name}", error_name)
        return tuple(values)


class _Exported:
    """Device memory for torch, which keeps this object as long as a tensor shows the memory."""

    def __init__(self, address: int, nbytes: int, holder: object) -> None:
        self.holder = holder
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),  # torch takes no memory that says it is read-only
            "strides": None,
            "version": 2,  # 3 would have a stream to wait for: share() has waited
        }


def _decoded(handle: bytes) -> LegacyHandle | DescriptorHandle:
    try:
        return HANDLES.decode(handle)
    except msgspec.MsgspecError as error:
        raise DeviceError(f"expected the handle of device memory: {error}") from None


def _require_size(size: int, nbytes: int) -> None:
    if size < nbytes:
        raise DeviceError(f"expected the memory of a pool of {nbytes} bytes, got {size} bytes")


def _what(tensor: Any) -> str:
    where = getattr(tensor, "device", None)
    return f"a {type(tensor).__name__}" + (f" on {where}" if where is not None else "")


def driver_of(device: int | None = None) -> Driver:
    """Returns the driver of a device by its number in this process; None: of torch's current device.

    Raises NoDevice. A process has one driver for each device.
    """
    return _driver(int(needed()[0].cuda.current_device()) if device is None else device)


@functools.cache
def _driver(device: int) -> Driver:
    return TorchDriver(device)
