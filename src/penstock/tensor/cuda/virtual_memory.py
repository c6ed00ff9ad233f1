"""Device memory behind a descriptor (`cuMemCreate`), which other processes map, and each device that can reach it.

A thread of the producer sends the descriptor (SCM_RIGHTS) to processes of the same user. `/proc/PID/fd` opens a
driver's file anew, without the memory, and `pidfd_getfd` needs the right to trace the producer, which Yama gives to
ancestors alone. The memory lives as long as a descriptor or a mapping: the producer may free it while peers read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from penstock.tensor.cuda.driver import DeviceError, StoppedProducer

SEND_TIMEOUT_S = 1.0  # of a descriptor, until which the producer counts as stopped: the steps of a worker wait, too
STOPPED_RETRY_S = 10.0  # between two waits for a stopped producer: calls between them fail at once
ACCEPT_RETRY_S = 0.05  # after an error that passes, as when the process has no descriptor left
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class DescriptorHandle(msgspec.Struct, frozen=True, array_like=True, tag="descriptor"):
    """Names the memory for other processes."""

    socket: str  # abstract: in no file system, and gone with the process
    nbytes: int  # of the memory, a multiple of the device's granularity


class DescriptorServer:
    """Sends a descriptor to each process of this user that connects. Owns the descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.name = f"penstock-{secrets.token_hex(16)}"
        self._closing = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(f"\0{self.name}")
            self._listener.listen()
            self._thread = threading.Thread(target=self._serve, name="descriptor of device memory", daemon=True)
            self._thread.start()
        except BaseException:
            self._listener.close()
            raise

    def close(self) -> None:
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._thread.join()
        self._listener.close()
        os.close(self._fd)

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno == errno.EINVAL:  # closed
                    return
                self._closing.wait(ACCEPT_RETRY_S)
                continue
            with connection, contextlib.suppress(OSError):
                if is_own_user(connection):
                    socket.send_fds(connection, [b"\0"], [self._fd])


def is_own_user(connection: socket.socket) -> bool:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    user: int = CREDENTIALS.unpack(raw)[1]
    return user == os.geteuid()


def receive_descriptor(name: str) -> int:
    """Returns the descriptor that a server sends. Raises DeviceError, of which StoppedProducer after SEND_TIMEOUT_S."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(SEND_TIMEOUT_S)
        try:
            connection.connect(f"\0{name}")
            fds = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)[1] if is_own_user(connection) else []
        except (TimeoutError, BlockingIOError):  # nothing is sent, or the queue of connections is full
            raise StoppedProducer from None
        except OSError as error:
            raise DeviceError(
                f"the producer of device memory sends no descriptor: {error}: expected a producer that lives, in the "
                "same network namespace"
            ) from None
    if not fds:
        raise DeviceError("the producer of device memory sends no descriptor: it is of another user")
    return fds[0]


class VirtualMemory:
    """Memory of one device. All calls are made with a context of the device."""

    def __init__(self, cuda: Any, ask: Callable[..., tuple[Any, ...]], device: int, readers: Iterable[int]) -> None:
        """`ask`: of the driver. `readers`: numbers of other devices that can reach the memory of this one."""
        self._ask = ask
        self._kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._properties = cuda.CUmemAllocationProp()
        self._properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.requestedHandleTypes = self._kind
        self._properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device
        self._own, self._all = ([self._access(cuda, each) for each in ids] for ids in ([device], [device, *readers]))
        minimum = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._granularity = int(ask("cuMemGetAllocationGranularity", self._properties, minimum)[0])
        self._nbytes: dict[int, int] = {}  # of each mapping, by address
        self._servers: dict[int, DescriptorServer] = {}  # of what was allocated here
        self._lock = threading.Lock()  # of `_stopped`: threads open the memory of several producers
        self._stopped: dict[str, float] = {}  # time of the next wait for a stopped producer, by the handle's socket

    @staticmethod
    def is_supported(cuda: Any, ask: Callable[..., tuple[Any, ...]], number: Any) -> bool:
        attributes = cuda.CUdevice_attribute
        needed = (
            attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        )
        return all(ask("cuDeviceGetAttribute", attribute, number)[0] for attribute in needed)

    @staticmethod
    def _access(cuda: Any, device: int) -> Any:
        access = cuda.CUmemAccessDesc()
        access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def allocate(self, nbytes: int) -> int:
        """Returns the address of new memory, which other devices can reach, too."""
        nbytes = -(-nbytes // self._granularity) * self._granularity
        (memory,) = self._ask("cuMemCreate", nbytes, self._properties, 0)
        try:
            address = self._map(memory, nbytes, self._all)
            try:
                (fd,) = self._ask("cuMemExportToShareableHandle", memory, self._kind, 0)
                try:
                    self._servers[address] = DescriptorServer(int(fd))
                except BaseException:
                    os.close(int(fd))
                    raise
            except BaseException:
                self.close(address)
                raise
        finally:
            self._ask("cuMemRelease", memory)  # mapping and descriptor keep the memory
        return address

    def handle(self, address: int) -> DescriptorHandle | None:
        """Returns None for memory that was not allocated here."""
        server = self._servers.get(address)
        return None if server is None else DescriptorHandle(server.name, self._nbytes[address])

    def open(self, handle: DescriptorHandle) -> int:
        """Maps the memory of another process for this device. Raises DeviceError."""
        fd = self._receive(handle.socket)
        try:
            (memory,) = self._ask("cuMemImportFromShareableHandle", fd, self._kind)
        finally:
            os.close(fd)
        try:
            return self._map(memory, handle.nbytes, self._own)
        finally:
            self._ask("cuMemRelease", memory)

    def close(self, address: int) -> bool:
        """Unmaps memory, which is freed with its last mapping. Returns False for memory that is not mapped here."""
        nbytes = self._nbytes.pop(address, None)
        if nbytes is None:
            return False
        server = self._servers.pop(address, None)
        if server is not None:
            server.close()
        self._ask("cuMemUnmap", address, nbytes)
        self._ask("cuMemAddressFree", address, nbytes)
        return True

    def _receive(self, name: str) -> int:
        """Waits for a stopped producer once in STOPPED_RETRY_S: each image of the producer would wait else."""
        now = time.monotonic()
        with self._lock:
            self._stopped = {each: retry_at for each, retry_at in self._stopped.items() if retry_at > now}
            if name in self._stopped:
                raise StoppedProducer
        try:
            return receive_descriptor(name)
        except StoppedProducer:
            with self._lock:
                self._stopped[name] = time.monotonic() + STOPPED_RETRY_S
            raise

    def _map(self, memory: Any, nbytes: int, access: list[Any]) -> int:
        address = int(self._ask("cuMemAddressReserve", nbytes, 0, 0, 0)[0])
        try:
            self._ask("cuMemMap", address, nbytes, 0, memory, 0)
            try:
                self._ask("cuMemSetAccess", address, nbytes, access, len(access))
            except BaseException:
                self._ask("cuMemUnmap", address, nbytes)
                raise
        except BaseException:
            self._ask("cuMemAddressFree", address, nbytes)
            raise
        self._nbytes[address] = nbytes
        return address
