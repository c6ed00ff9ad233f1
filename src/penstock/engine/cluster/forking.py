"""The fork server's own process: imports modules, and then forks a process for each request of the launcher.

A forked process begins where a spawned process is after seconds of imports. It is forked twice, and the process between
ends at once: the kernel then makes the launcher the parent, as it is of a spawned process. `launcher.fork_server` is
the other side.

A forked process has no descriptor that a spawned process has not. `random` has a new seed after each fork, and
`numpy.random` gets a new seed. Torch begins with a fixed seed in a spawned process, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import socket
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import IO, Any, NoReturn

from penstock import standard_streams
from penstock.engine.cluster.process import end_with_parent, prctl
from penstock.memory.segment import Descriptor

READY = "ready"
REASON_NBYTES = 4096
PR_SET_NAME = 15
PID = struct.Struct("<i")  # the reply to a request; negative: an errno
COUNT = struct.Struct("<I")  # the last packet of a request: how many descriptors it has
MAX_PASSED = 200  # descriptors of a packet; Linux takes 253
NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
THREADS_END_S = 1.0  # within which threads that a fork ends have left /proc

_passed: list[int] = []  # descriptors of this forked process, by index


class PassedDescriptor:
    """Stands for a descriptor in the pickled arguments of a forked process."""

    def __init__(self, index: int) -> None:
        self._index = index

    def detach(self) -> int:
        return _passed[self._index]


def _socket_of(descriptor: PassedDescriptor) -> socket.socket:
    return socket.socket(fileno=descriptor.detach())


class ArgumentsPickler(pickle.Pickler):
    """Pickles arguments of a forked process, and collects their descriptors."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.descriptors: list[int] = []

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Descriptor):
            self.descriptors.append(value.fd)
            return PassedDescriptor, (len(self.descriptors) - 1,)
        if isinstance(value, socket.socket):
            return _socket_of, (Descriptor(value.fileno(), "a socket"),)
        return NotImplemented


# ── the fork server ──────────────────────────────────────────────────────────────────────────────────────────────────
def serve_forks(first: Callable[[], object], connection: socket.socket, parent: int) -> NoReturn:
    """Runs the fork server until the launcher closes the connection: runs `first`, and then the imports that the
    launcher sends. The first packet to the launcher is READY, or the reason for which no process may be forked from
    this process."""
    end_with_parent(parent)
    early = open_descriptors() - {0, 1, 2, resource_tracker.getfd()}
    standard_streams.guard()
    gc.disable()
    reason = find_failure(first)
    imports = receive_imports(connection)
    reason = reason or find_failure(imports) or find_failure(find_obstacle)
    name = Path("/proc/self/comm").read_text().strip()
    prctl(PR_SET_NAME, process_name(os.getpid()).encode())
    gc.freeze()  # a collection in a forked process would copy the pages of all objects
    with contextlib.suppress(OSError):  # the launcher has closed the connection
        connection.send((reason or READY).encode()[:REASON_NBYTES])
        while request := receive_request(connection):
            connection.send(PID.pack(_fork_twice(request, early, name)))
            for descriptor in request:
                os.close(descriptor)
    os._exit(0)


def open_descriptors() -> set[int]:
    descriptors = {int(name) for name in os.listdir("/proc/self/fd")}
    return {descriptor for descriptor in descriptors if os.path.exists(f"/proc/self/fd/{descriptor}")}


def process_name(pid: int) -> str:
    """Returns the name (`/proc/PID/comm`) of a fork server, and of its forks until they run."""
    return f"pforks {pid}"


def find_failure(check: Callable[[], object]) -> str:
    """Returns the text that `check` returns, or its error; empty: it has neither."""
    try:
        reason = check()
        return reason if isinstance(reason, str) else ""
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


def find_obstacle() -> str:
    """Returns why no process may be forked from this process; empty: nothing forbids it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python counts threads that the fork ends
        first = os.fork()  # OpenBLAS, which numpy loads, ends its threads at a fork
    if not first:
        os._exit(0)
    os.waitpid(first, 0)
    deadline = time.monotonic() + THREADS_END_S
    while len(threads := os.listdir("/proc/self/task")) > 1:
        if time.monotonic() >= deadline:
            names = []
            for thread in threads:
                with contextlib.suppress(OSError):  # it has ended
                    names.append(Path(f"/proc/self/task/{thread}/comm").read_text().strip())
            return f"a module has started threads when it was imported: {', '.join(names)}"
        time.sleep(0.001)
    torch = sys.modules.get("torch")
    if is_cuda_initialized() or (torch is not None and torch.cuda.is_initialized()):  # the latter knows ROCm, too
        return "a module has initialized CUDA when it was imported"
    return ""


def is_cuda_initialized() -> bool:
    """Whether this process has called cuInit, as torch.cuda.is_available does: then its forks have no device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", os.RTLD_NOLOAD)
    except OSError:  # no module has loaded the library
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != NOT_INITIALIZED)


def send_imports(connection: socket.socket, imports: Callable[[], object]) -> None:
    """Raises OSError."""
    with open(os.memfd_create("imports", os.MFD_CLOEXEC), "w+b") as memory:
        pickle.dump(imports, memory)
        memory.seek(0)  # writes the rest; the fork server shares the position
        send_request(connection, [memory.fileno()])


def receive_imports(connection: socket.socket) -> Callable[[], object]:
    """Ends the process if the launcher has closed the connection."""
    request = receive_request(connection)
    if not request:
        os._exit(0)
    with open(request[0], "rb") as file:
        imports: Callable[[], object] = pickle.load(file)
    return imports


def receive_request(connection: socket.socket) -> list[int]:
    """Returns the descriptors of a request; nothing: the launcher has closed the connection. Raises OSError."""
    descriptors: list[int] = []
    while True:
        data, passed, _, _ = socket.recv_fds(connection, COUNT.size, MAX_PASSED, socket.MSG_CMSG_CLOEXEC)
        descriptors += passed
        if not data:
            return []
        (count,) = COUNT.unpack(data)
        if count and count != len(descriptors):
            raise OSError(f"expected {count} descriptors, got {len(descriptors)}")
        if count:
            return descriptors


def send_request(connection: socket.socket, descriptors: Sequence[int]) -> None:
    """Sends a request: the arguments' memfd, the pipe that opens the gate, and the descriptors of the arguments."""
    for begin in range(0, len(descriptors), MAX_PASSED):
        packet = list(descriptors[begin : begin + MAX_PASSED])
        count = len(descriptors) if begin + MAX_PASSED >= len(descriptors) else 0
        socket.send_fds(connection, [COUNT.pack(count)], packet)


def _fork_twice(request: Sequence[int], closed: Collection[int], name: str) -> int:
    """Returns the pid of a process that runs a request and has lost its parent; or a negative errno."""
    pid_in, pid_out = os.pipe()
    try:
        between = os.fork()
        if not between:
            _fork_and_end(request, [*closed, pid_in], pid_out, name)
        os.waitpid(between, 0)
        os.set_blocking(pid_in, False)  # a process that was killed has written nothing
        return int(PID.unpack(os.read(pid_in, PID.size))[0])
    except OSError as error:
        return -(error.errno or 1)
    finally:
        os.close(pid_in)
        os.close(pid_out)


def _fork_and_end(request: Sequence[int], closed: Collection[int], pid_out: int, name: str) -> NoReturn:
    try:
        pid = os.fork()
    except OSError as error:
        pid = -(error.errno or 1)
    if not pid:
        _run_request(request, [*closed, pid_out], name)
    os.write(pid_out, PID.pack(pid))
    os._exit(0)


# ── a forked process ─────────────────────────────────────────────────────────────────────────────────────────────────
def _run_request(request: Sequence[int], closed: Collection[int], name: str) -> NoReturn:
    """Runs a request, once the launcher has seen this process; otherwise ends."""
    try:
        for descriptor in closed:
            os.close(descriptor)
        arguments, gate = request[:2]
        _passed[:] = request[2:]
        if not os.read(gate, 1):
            os._exit(1)
        os.close(gate)
        prctl(PR_SET_NAME, name.encode())
        gc.enable()
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()
        with open(arguments, "rb") as file:
            target, values, process = pickle.load(file)
        multiprocessing.current_process().name = process
        target(*values)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
