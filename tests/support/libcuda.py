"""A CUDA driver without a device, under the real `cuda-bindings`; and torch on that driver.

    with open_device() as double:
        pool = CudaPool.create(1 << 20)  # by cuda-bindings, which calls libcuda.c
        double.driver.fail("cuMemAlloc", 1)  # the next call of this name returns an error

Other processes call `use_device`, and share memory with this process. Streams of `torch.cuda` are streams of the
driver: `torch.cuda._sleep` delays all later work of a stream, and `driver.stop` holds the work until `driver.go_on`.
Delayed operations read and write their memory when their turn comes. Until then their results are POISON.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'penstock[torch]'")
pytest.importorskip("cuda.bindings", reason="needs cuda-bindings: pip install 'penstock[cuda]'")

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

from tests.support.cuda_double import CudaDouble, OnDevice, is_view, poison, replace

OUT_OF_MEMORY, ILLEGAL_ADDRESS = 2, 700  # CUresult
NOT_READY = 600
OWN, OPENED = 1, 2  # kinds of memory
HELD = (
    "allocations",
    "opened handles",
    "registered ranges",
    "contexts of this thread",
    "reserved addresses",
    "memory behind descriptors",
)

_work: dict[int, Callable[[], object]] = {}  # of streams, by the argument of cuLaunchHostFunc
_numbers = itertools.count(1)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _run(number: int) -> None:
    _work.pop(number)()


class DriverLibrary:
    """libcuda.c in this process, and what a test tells the driver and asks of the driver."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.double_fault.restype = ctypes.c_char_p
        library.double_calls.restype = ctypes.c_long
        library.double_fail.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]
        for name in ("double_is_registered", "double_adopt"):
            getattr(library, name).argtypes = [ctypes.c_uint64, ctypes.c_size_t]
        library.double_kind.argtypes = [ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int]
        library.double_forget.argtypes = [ctypes.c_uint64]
        library.double_sleep.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
        library.double_stop.argtypes = [ctypes.c_void_p, ctypes.c_int]
        library.double_is_idle.argtypes = [ctypes.c_void_p]
        self.library = library

    def call(self, name: str, *arguments: Any) -> int:
        """Calls a function of the driver as torch does: an error raises RuntimeError. Returns 0, or NOT_READY."""
        result: int = getattr(self.library, name)(*arguments)
        if result not in (0, NOT_READY):
            raise RuntimeError(f"CUDA error: {name} returned {result}")
        return result

    def fail(self, name: str = "", call: int = 1, result: int = OUT_OF_MEMORY) -> None:
        """The `call`-th call of a function from now on returns an error. Without a name, all calls count."""
        self.library.double_fail(name.encode(), call, result)

    def fail_no_more(self) -> int:
        """Returns how many calls were counted since `fail`."""
        calls: int = self.library.double_calls()
        self.library.double_fail(b"", 0, 0)
        return calls

    def part(self, device: int, peer: int) -> None:
        """Two devices can no longer reach each other."""
        self.library.double_reach(device, peer, 0)
        self.library.double_reach(peer, device, 0)

    def stop(self, stream: Any) -> None:
        self.library.double_stop(stream.cuda_stream, 1)

    def go_on(self, stream: Any) -> None:
        self.library.double_stop(stream.cuda_stream, 0)

    def launch(self, stream: Any, work: Callable[[], object]) -> None:
        number = next(_numbers)
        _work[number] = work
        self.call("cuLaunchHostFunc", ctypes.c_void_p(stream.cuda_stream), _run, ctypes.c_void_p(number))

    def is_idle(self, stream: Any) -> bool:
        return bool(self.library.double_is_idle(stream.cuda_stream))

    def is_exported(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in memory that the driver manages, allocated here or in another process."""
        device = DriverDouble.current.device.index
        return self.library.double_kind(tensor.untyped_storage().data_ptr(), 1, device) in (OWN, OPENED)

    def held(self) -> dict[str, int]:
        """Returns how much this process holds, without kinds of which it holds none."""
        counts = {name: self.library.double_held(number) for number, name in enumerate(HELD)}
        return {name: count for name, count in counts.items() if count}

    def faults(self) -> list[str]:
        """Returns what has been done wrong since the last call."""
        numbers = itertools.count()
        texts = list(iter(lambda: self.library.double_fault(next(numbers)), None))
        self.library.double_clear_faults()
        return [text.decode() for text in texts]


class Event:
    """In place of `torch.cuda.Event`. The driver keeps its 16 bytes: a destructor of a cycle may still ask about it."""

    def __init__(self, **_: Any) -> None:
        self._driver = DriverDouble.current.driver
        self._handle = ctypes.c_void_p()
        self._launched = 0

    def record(self, stream: Stream | None = None) -> None:
        if not self._handle:
            self._driver.call("cuEventCreate", ctypes.byref(self._handle), 0)
        self._launched = CudaDouble.current.launched
        stream = stream or DriverDouble.current.stream
        self._driver.call("cuEventRecord", self._handle, ctypes.c_void_p(stream.cuda_stream))

    def query(self) -> bool:
        is_passed = not self._handle or self._driver.call("cuEventQuery", self._handle) == 0
        if is_passed:
            CudaDouble.current.pass_copies(self._launched)
        return is_passed

    def synchronize(self) -> None:
        if self._handle:
            self._driver.call("cuEventSynchronize", self._handle)
        CudaDouble.current.pass_copies(self._launched)

    def wait(self, stream: Stream) -> None:
        self._driver.call("cuStreamWaitEvent", ctypes.c_void_p(stream.cuda_stream), self._handle, 0)


class Stream:
    """In place of `torch.cuda.Stream`."""

    def __init__(self, *, is_default: bool = False, **_: Any) -> None:
        self._driver = DriverDouble.current.driver
        handle = ctypes.c_void_p()
        if not is_default:
            self._driver.call("cuStreamCreate", ctypes.byref(handle), 1)
        self.cuda_stream = handle.value or 0

    def query(self) -> bool:
        return self._driver.call("cuStreamQuery", ctypes.c_void_p(self.cuda_stream)) == 0

    def synchronize(self) -> None:
        self._driver.call("cuStreamSynchronize", ctypes.c_void_p(self.cuda_stream))

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class DriverDouble(CudaDouble):
    """A double of torch's CUDA on the driver. The process uses one device at a time: torch.cuda.set_device."""

    current: DriverDouble  # type: ignore[misc]
    stream: Stream
    Stream = Stream
    Event = Event

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.device = torch.device("cuda", number)
        self.driver = DriverLibrary(library())

    def replace_torch(self, undo: contextlib.ExitStack) -> None:
        self.default_stream = self.stream = Stream(is_default=True)
        super().replace_torch(undo)
        plain = torch.as_tensor

        def as_tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            return self._exported(data) if hasattr(data, "__cuda_array_interface__") else plain(data, *args, **kwargs)

        replace(undo, torch, {"as_tensor": as_tensor})
        replace(undo, torch.version, {"cuda": "13.0"})
        replace(
            undo,
            torch.cuda,
            {
                "device_count": lambda: 2,
                "get_device_name": lambda _=None: "a double of a device",
                "current_device": lambda: self.device.index,
                "set_device": self._set_device,
                "_sleep": lambda cycles: self.driver.library.double_sleep(self.stream.cuda_stream, cycles),
            },
        )

    def _set_device(self, device: int) -> None:
        self.device = torch.device("cuda", device)

    def finish(self) -> None:
        """Does all work of the default stream, which outlives this double."""
        self.driver.go_on(self.default_stream)
        self.default_stream.synchronize()

    def wait(self, why: str) -> None:
        super().wait(why)
        self.stream.synchronize()

    # ── memory ──
    def _exported(self, data: Any) -> torch.Tensor:
        """Returns a tensor of memory that another library has allocated."""
        interface = data.__cuda_array_interface__
        address, (nbytes,) = interface["data"][0], interface["shape"]
        if self.driver.library.double_kind(address, nbytes, self.device.index) not in (OWN, OPENED):
            raise RuntimeError(f"CUDA error: {nbytes} bytes at {address:#x} are no memory of a device")
        memory = (ctypes.c_char * nbytes).from_address(address)
        memory.holder = data  # type: ignore[attr-defined]
        with _disable_current_modes():
            return OnDevice(torch.frombuffer(memory, dtype=torch.uint8))

    def hold(self, tensor: OnDevice) -> None:
        if self.driver.is_exported(tensor.numbers):
            return
        storage = tensor.numbers.untyped_storage()
        super().hold(tensor)
        if self._references[storage.data_ptr()] == 1 and storage.nbytes():
            self.driver.library.double_adopt(storage.data_ptr(), storage.nbytes())

    def _let_go(self, address: int, nbytes: int) -> None:
        super()._let_go(address, nbytes)
        if address not in self._references:
            self.driver.library.double_forget(address)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        nbytes = tensor.numel() * tensor.element_size()
        is_registered = self.driver.library.double_is_registered(tensor.data_ptr(), nbytes)
        return super().is_pinned(tensor) or bool(is_registered)

    # ── order ──
    def use(self, *values: Any) -> None:
        """Streams of the driver are in order, and tensors that are used too early hold POISON."""

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Computes at once if the stream is idle. Else the results are POISON until it is their turn."""
        if self.tape is not None or is_view(func) or self.driver.is_idle(self.stream):
            return func(*args, **kwargs)
        is_write = any(argument.alias_info is not None for argument in func._schema.arguments)
        results = args[0] if is_write else func(*args, **kwargs)
        targets = [] if is_write else [value for value in tree_flatten(results)[0] if isinstance(value, torch.Tensor)]
        for target in targets:
            poison(target)
        self._launch(func, args, kwargs, targets)
        return results

    def queue_back(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        poison(target)
        self._launch(torch.ops.aten.copy_.default, (target, source), {}, [])
        return target

    def _launch(self, func: Any, args: Any, kwargs: Any, targets: list[torch.Tensor]) -> None:
        args, kwargs = tree_map_only(torch.Tensor, self._without_holder, (args, kwargs))
        exported = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
        exported = [tensor for tensor in exported if self.driver.is_exported(tensor)]

        def work() -> None:
            if not all(self.driver.is_exported(tensor) for tensor in exported):
                self.driver.library.double_add_fault(b"memory of the device was closed before work on it was done")
                return
            with _disable_current_modes(), torch.no_grad():
                results = tree_flatten(func(*args, **kwargs))[0]
                for target, result in zip(targets, results, strict=False):
                    target.copy_(result)

        self.driver.launch(self.stream, work)

    def _without_holder(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the same memory. The work of a device holds no memory of a pool."""
        if not self.driver.is_exported(tensor):
            return tensor
        storage = tensor.untyped_storage()
        memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
        bare = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(bare, tensor.storage_offset(), tensor.shape, tensor.stride())


# ── the library ──
@functools.cache
def library() -> ctypes.CDLL:
    """Loads libcuda.c before cuda-bindings asks for a library of this name. A child finds its parent's."""
    with contextlib.suppress(OSError):
        inherited = ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
        if hasattr(inherited, "double_fail"):
            return inherited
    return ctypes.CDLL(str(_built() / "libcuda.so.1"), ctypes.RTLD_GLOBAL)


_folder: tempfile.TemporaryDirectory[str]  # removed with the process


@functools.cache
def _built() -> Path:
    global _folder
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "a C compiler builds the driver"
    _folder = tempfile.TemporaryDirectory(prefix="penstock-libcuda-")
    options = ["-std=gnu11", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcuda.so.1"]
    source = Path(__file__).with_name("libcuda.c")
    subprocess.run([compiler, *options, "-o", str(Path(_folder.name) / "libcuda.so.1"), str(source)], check=True)
    return Path(_folder.name)


def has_device() -> bool:
    return torch.version.cuda is not None and torch.cuda.is_available()


@contextlib.contextmanager
def open_device(number: int = 0) -> Iterator[DriverDouble]:
    """Returns a double of a device, and lets children find the driver."""
    from penstock.tensor.cuda import torch_driver

    with contextlib.ExitStack() as undo:
        double = undo.enter_context(DriverDouble(number))
        path = os.environ.get("LD_LIBRARY_PATH")
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(_built()), path]))
        undo.callback(os.environ.__setitem__, "LD_LIBRARY_PATH", path) if path is not None else undo.callback(
            os.environ.pop, "LD_LIBRARY_PATH"
        )
        undo.callback(torch_driver._driver.cache_clear)
        undo.callback(double.finish)
        yield double


def use_device(number: int) -> None:
    """Opens a device in a child, to the end of the process: a real device if there is one."""
    if not has_device():
        DriverDouble(number).__enter__()
    torch.cuda.set_device(number)
