"""A CUDA device that is not there: tensors say that they lie on `cuda:0`, and their numbers lie on the CPU.

    with CudaDouble() as double:
        runner = ModelRunner(path, device="cuda", ...)  # runs whole, and answers
        with double.watched() as report:
            runner.launch(batch, step)
        assert not report.faults

The double computes at once. What a device does later, it does late where the host can notice it:

* A copy to the device reads pinned memory, which must not change until an event behind the copy has passed.
* A copy to the host arrives when an event behind it has passed. Until then its memory holds POISON.
* A replay of a graph runs the recorded operations on the recorded memory. What the replay before it has written is
  POISON then, as graphs share one pool of memory; and so is memory for a result (`out=`), up to the operation that
  writes it: an operation that reads it before is a fault.
* Memory that `empty` allocates holds POISON.
* A wait invalidates a capture, which torch's allocator then counts as underway for ever. So does a question about an
  event, of the capturing thread, or of any thread if the mode of the capture is "global".
* Work that uses memory after work of another stream has to wait for that stream.

A report counts launches, copies and allocations, and names the line of each operation that makes the host wait for the
device or copies memory that is not pinned. With TRITON_INTERPRET=1, Triton's interpreter runs kernels of our own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from penstock.engine.worker.cuda import launcher

CUDA = torch.device("cuda", 0)
POISON = 0x5B  # each byte of memory that holds no result yet, or no longer
MULTIPROCESSORS = 2
GRANULE = 512  # bytes: the allocator of torch rounds up to a multiple
# Operations of several that one kernel or library call computes on a device.
FUSED = ("scaled_dot_product_attention", "linear", "matmul", "layer_norm", "rms_norm")
# Their result, or its shape, depends on numbers: the host waits for the device.
READING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique", "equal", "is_nonzero", "bincount")
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
SILENT = ("empty", "new_empty", "detach", "_unsafe_view", "lift")  # no kernel
UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
OVERWRITING = ("copy_", "fill_", "zero_")  # do not read their first argument
SKIPPED = (
    "/torch/",
    "/tests/support/cuda_double.py",
    "/contextlib.py",
)  # frames that are not the cause of an operation


class Fault(NamedTuple):
    what: str
    line: str  # file:line of the call, and of the line of ours that has led to it, if that is another


class Report:
    """What happened while a double was watched."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.launches: Counter[str] = Counter()  # by line
        self.allocations: Counter[str] = Counter()  # on the device, by line
        self.copies_up = self.copies_back = self.pinned = self.replays = 0

    def counts(self) -> dict[str, int]:
        return {
            "launches": self.launches.total() + self.replays,
            "allocations": self.allocations.total(),
            "copies_up": self.copies_up,
            "copies_back": self.copies_back,
            "pinned": self.pinned,
        }


class OnDevice(torch.Tensor):
    """A tensor on the device. `numbers` has its contents."""

    numbers: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> OnDevice:
        wrapper: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=CudaDouble.current.device,
        )
        wrapper.numbers = numbers
        return wrapper

    def __init__(self, numbers: torch.Tensor) -> None:
        CudaDouble.current.hold(self)

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def tolist(self) -> Any:
        double = CudaDouble.current
        double.wait("tolist")
        return self.numbers.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> OnDevice:
        return memo.setdefault(id(self), OnDevice(self.numbers.clone()))

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return CudaDouble.current.__torch_dispatch__(func, types, args, kwargs)


class _Copy(NamedTuple):
    """A copy that the device has been told to make."""

    source: torch.Tensor
    before: torch.Tensor | None  # what the pinned source held when an upload was launched; None: a copy to the host
    target: torch.Tensor
    line: str
    report: Report  # of the time when it was launched


class CudaDouble(TorchDispatchMode):
    """A device with `total_nbytes` of memory. `fail_at`: the number of the allocation that fails, from 1 on."""

    current: ClassVar[CudaDouble]
    Stream: ClassVar[type]
    Event: ClassVar[type]

    def __init__(self, total_nbytes: int = 1 << 30) -> None:
        super().__init__()
        self.device = CUDA
        self.total_nbytes = total_nbytes
        self.held_nbytes = self.peak_nbytes = self.allocated = 0
        self.pool_nbytes = 0  # kept for all graphs: as much as the largest has needed
        self.fail_at = 0
        self.held_when_emptied: list[int] = []  # bytes, at each call of `empty_cache`
        self.report = Report()  # read only while the double is watched
        self.tape: list[_Operation] | None = None
        self.is_capture_invalid = False  # of the tape
        self.captures_underway = 0  # for the allocator
        self.sync_mode = 0
        self._copies: list[_Copy] = []  # that the host cannot know to be done, the oldest first
        self._launched = 0  # of all copies
        self._pinned: dict[
            int, torch.Tensor
        ] = {}  # by address: alive as long as the double, so that none is used again
        self._references: Counter[int] = Counter()  # tensors of each memory on the device, by address
        self._replayed: _Graph | None = None
        self.default_stream: Any = None
        self.capture: tuple[str, int] | None = None  # the mode of the capture, and its thread
        self.host_passed: Counter[int] = Counter()  # work that the host knows to be done, by stream
        self._used: dict[int, tuple[int, int]] = {}  # of memory, by address: stream and number of its last work
        self._undo = contextlib.ExitStack()
        self._num_entered = 0

    def __enter__(self) -> CudaDouble:
        if not self._num_entered:
            load_guard()
            CudaDouble.current = self
            self.default_stream = self.default_stream or self.Stream()
            self.stream = self.default_stream
            self.replace_torch(self._undo)
        self._num_entered += 1  # an operation that torch decomposes enters once more
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._num_entered -= 1
        if not self._num_entered:
            self._undo.close()

    def replace_torch(self, undo: contextlib.ExitStack) -> None:
        """Until `undo` is closed."""
        _device_constructors()  # is cached at its first call, and must have torch's own functions
        replace(undo, torch, _torch_of(self))
        replace(undo, torch.cuda, _torch_cuda_of(self))
        replace(undo, launcher, {"launch": self.launch_kernel})

    @contextlib.contextmanager
    def watched(self) -> Iterator[Report]:
        """Reports what happens within."""
        before, self.report = self.report, Report()
        try:
            yield self.report
        finally:
            self.report = before

    # ── what the host asks of the device ──
    def wait(self, why: str) -> None:
        """The host waits for the device. RuntimeError where that is forbidden, as by torch."""
        self.fault(f"waits: {why}")
        if self.tape is not None:
            self.is_capture_invalid = True
            raise RuntimeError(f"operation not permitted when stream is capturing: {why}")
        if self.sync_mode == 2:
            raise RuntimeError(f"called a synchronizing CUDA operation: {why}")
        self.pass_copies(self._launched)
        for stream, number in self._used.values():
            self.host_passed[stream] = max(self.host_passed[stream], number)

    def ask_event(self) -> None:
        """Raises RuntimeError where a capture forbids that, which is then invalid."""
        if self.capture is not None and (self.capture[0] == "global" or self.capture[1] == threading.get_ident()):
            self.is_capture_invalid = True
            raise RuntimeError("operation not permitted when stream is capturing: a question about an event")

    def fault(self, what: str) -> None:
        self.report.faults.append(Fault(what, line_of_call()))

    def pass_copies(self, launched: int) -> None:
        """All copies up to this number are done: copies to the host arrive."""
        while self._copies and self._launched - len(self._copies) < launched:
            copy = self._copies.pop(0)
            if copy.before is None:
                copy.target.copy_(copy.source)
            elif not _same_bytes(copy.source, copy.before):
                copy.report.faults.append(Fault("pinned memory was written before its copy was done", copy.line))

    @property
    def launched(self) -> int:
        return self._launched

    # ── memory ──
    def hold(self, tensor: OnDevice) -> None:
        storage = tensor.numbers.untyped_storage()
        address, nbytes = storage.data_ptr(), -(-storage.nbytes() // GRANULE) * GRANULE
        if not self._references[address] and nbytes:
            self.allocated += 1
            if self.allocated == self.fail_at or self.held_nbytes + self.pool_nbytes + nbytes > self.total_nbytes:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes. (a double)")
            self.held_nbytes += nbytes
            self.peak_nbytes = max(self.peak_nbytes, self.held_nbytes)
            self.report.allocations[line_of_call()] += 1
        self._references[address] += 1
        weakref.finalize(tensor, self._let_go, address, nbytes)

    def _let_go(self, address: int, nbytes: int) -> None:
        self._references[address] -= 1
        if not self._references[address]:
            del self._references[address]
            self._used.pop(address, None)
            self.held_nbytes -= nbytes

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        self.report.pinned += 1
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def use(self, *values: Any) -> None:
        """Work of the current stream uses the memory of these tensors."""
        if self.tape is not None:
            return
        stream = self.stream
        stream.passed |= self.host_passed
        stream.passed[stream.number] += 1
        for tensor in tree_flatten(values)[0]:
            if isinstance(tensor, OnDevice):
                address = tensor.numbers.untyped_storage().data_ptr()
                other, number = self._used.get(address, (stream.number, 0))
                if stream.passed[other] < number:
                    self.fault("uses memory of another stream without waiting for that stream")
                self._used[address] = stream.number, stream.passed[stream.number]

    # ── operations ──
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.inference_mode(False), torch.no_grad():  # inference tensors cannot be views of wrappers
            return self._dispatch(func, args, dict(kwargs or {}))

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        if name in ("pin_memory", "_pin_memory"):
            return self.pin(args[0].clone())
        if name == "is_pinned":
            return self.is_pinned(args[0])
        if name not in FUSED and torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        ):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        ours = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, OnDevice)]
        device = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if not ours and (device is None or device.type != "cuda"):
            must_pin = kwargs.pop("pin_memory", None)
            result = func(*args, **kwargs)
            return self.pin(result) if must_pin else result
        if name == "_to_copy" and device is not None:
            if not ours:
                return self._upload(func, args[0], kwargs)
            if device.type == "cpu":
                return self._copy_back(func, ours[0], kwargs)
        if name == "copy_" and isinstance(args[0], OnDevice) != isinstance(args[1], OnDevice):
            return self._copy_over(*args, **kwargs)
        self._check_operands(name, args, kwargs)
        return self._compute(func, name, args, kwargs, ours)

    def _check_operands(self, name: str, args: Any, kwargs: Any) -> None:
        if name.startswith(READING):
            self.wait(name)
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            self.wait("repeat_interleave without output_size")
        if name in INDEXING:
            for index in args[1]:
                if index is None:
                    continue
                if index.dtype in (torch.bool, torch.uint8):
                    self.wait("index of booleans")
                elif not isinstance(index, OnDevice):
                    self._pageable("an index on the host")
            args = [args[0], *args[2:]]
        if name.endswith("_like") or name.startswith("new_"):  # a shape alone is taken
            return
        for value in tree_flatten((args, kwargs))[0]:
            if isinstance(value, torch.Tensor) and not isinstance(value, OnDevice) and value.dim():
                raise RuntimeError(f"Expected all tensors to be on the same device: {name}")

    def _compute(self, func: Any, name: str, args: Any, kwargs: Any, ours: list[OnDevice]) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        for option in ("pin_memory", *(("non_blocking",) if name == "_to_copy" else ())):
            kwargs.pop(option, None)
        if name == "histc" and not args[0].is_floating_point():
            func = _Widened(func)
        if name in UNWRITTEN:
            func = _Poisoned(func)
        numbers = self.compute(func, numbers_of(args), numbers_of(kwargs))
        known = {id(tensor.numbers): tensor for tensor in ours}
        result = tree_map_only(
            torch.Tensor, lambda tensor: known[id(tensor)] if id(tensor) in known else OnDevice(tensor), numbers
        )
        if not is_view(func):
            self.use(ours, result)
            if not name.startswith(SILENT):
                self.report.launches[line_of_call()] += 1
            if self.tape is not None:
                self.tape.append(_Operation(func, numbers_of(args), numbers_of(kwargs), numbers, line_of_call()))
        return result

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the result of an operation on the numbers of tensors."""
        return func(*args, **kwargs)

    def launch_kernel(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        def run(*args: Any, **options: Any) -> None:
            with torch.utils._python_dispatch._disable_current_modes():
                kernel[grid](*args, **options)

        self.use(args, options)
        args, options = numbers_of(args), numbers_of(options)
        run(*args, **options)
        self.report.launches[line_of_call()] += 1
        if self.tape is not None:
            self.tape.append(_Operation(run, args, options, None, line_of_call()))

    # ── copies ──
    def _pageable(self, what: str) -> None:
        self.fault(f"copies pageable memory: {what}")
        if self.tape is not None or self.sync_mode == 2:
            self.wait("a pageable copy")

    def _upload(self, func: Any, source: torch.Tensor, kwargs: Any) -> OnDevice:
        is_queued = kwargs.pop("non_blocking", False)
        numbers = self.compute(func, (source,), {**kwargs, "device": torch.device("cpu")})
        if numbers.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
            numbers = numbers.clone()
        on_device = OnDevice(numbers)
        self.use(on_device)
        self._note_upload(source, numbers, is_queued)
        return on_device

    def _note_upload(self, source: torch.Tensor, target: torch.Tensor, is_queued: bool) -> None:
        self.report.copies_up += 1
        if not self.is_pinned(source):
            self._pageable(f"{source.numel() * source.element_size()} bytes to the device")
        elif not is_queued:
            self.wait("a copy to the device that is not queued")
        else:
            self._queue(source, source.clone(), target)

    def _copy_back(self, func: Any, source: OnDevice, kwargs: Any) -> torch.Tensor:
        is_queued = kwargs.pop("non_blocking", False)
        self.use(source)
        self.report.copies_back += 1
        if not is_queued:
            self.wait("a copy to the host that is not queued")
        target: torch.Tensor = func(source.numbers, **kwargs)
        if target.untyped_storage().data_ptr() == source.numbers.untyped_storage().data_ptr():
            target = target.clone()
        # As torch does, into pinned memory.
        return self.queue_back(source.numbers, self.pin(target)) if is_queued else target

    def _copy_over(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        self.use(target, source)
        if isinstance(target, OnDevice):
            numbers = self.compute(torch.ops.aten.copy_.default, (target.numbers, source), {})
            if source.dim():
                self._note_upload(source, numbers, non_blocking)
            return target
        assert isinstance(source, OnDevice)
        self.report.copies_back += 1
        if not non_blocking or not self.is_pinned(target):
            self.wait("a copy to the host that is not queued, or into pageable memory")
            return target.copy_(source.numbers)
        return self.queue_back(source.numbers, target)

    def queue_back(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        result = source.to(target.dtype).expand_as(target).clone()
        poison(target)
        self._queue(result, None, target)
        return target

    def _queue(self, source: torch.Tensor, before: torch.Tensor | None, target: torch.Tensor) -> None:
        if self.tape is not None:  # a replay would copy again, from memory or to memory that has another use by then
            raise RuntimeError("operation not permitted when stream is capturing: a copy from or to the host")
        self._copies.append(_Copy(source, before, target, line_of_call(), self.report))
        self._launched += 1

    # ── graphs ──
    def replay(self, graph: _Graph) -> None:
        self.report.replays += 1
        if self._replayed is not None and self._replayed is not graph:
            self._replayed.poison()
        self._replayed = graph
        with torch.utils._python_dispatch._disable_current_modes():
            unwritten = _Extents()
            for operation in graph.operations:
                for memory in operation.outs():
                    poison(memory)
                    unwritten.add(memory)
            for operation in graph.operations:
                if any(map(unwritten.overlaps, operation.reads())):
                    self.report.faults.append(Fault("reads memory for a result before it is written", operation.line))
                operation.run_again()
                for memory in operation.writes():
                    unwritten.remove(memory)


class _Extents:
    """Parts of memory, as ranges of addresses."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add(self, tensor: torch.Tensor) -> None:
        self.remove(tensor)
        self._ranges.append(_extent(tensor))

    def remove(self, tensor: torch.Tensor) -> None:
        begin, end = _extent(tensor)
        sides = [side for low, high in self._ranges for side in ((low, min(high, begin)), (max(low, end), high))]
        self._ranges = [(low, high) for low, high in sides if low < high]

    def overlaps(self, tensor: torch.Tensor) -> bool:
        begin, end = _extent(tensor)
        return any(low < end and begin < high for low, high in self._ranges)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the addresses from the first number of a tensor to the last."""
    count = 0 if not tensor.numel() else 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + count * tensor.element_size()


class _Operation(NamedTuple):
    """An operation of torch, or the launch of a kernel, of which each tensor counts as read."""

    func: Any
    args: Any
    kwargs: Any
    results: Any
    line: str

    def outs(self) -> list[torch.Tensor]:
        schema = getattr(self.func, "_schema", None)
        names = () if schema is None else [argument.name for argument in schema.arguments if argument.is_out]
        return [self.kwargs[name] for name in names if name in self.kwargs]

    def writes(self) -> list[torch.Tensor]:
        is_overwriting = str(getattr(self.func, "overloadpacket", "")).rpartition(".")[2] in OVERWRITING
        return [*self.outs(), *(self.args[:1] if is_overwriting else ())]

    def reads(self) -> list[torch.Tensor]:
        tensors = [value for value in tree_flatten((self.args, self.kwargs))[0] if isinstance(value, torch.Tensor)]
        written = self.writes()
        return [tensor for tensor in tensors if not any(tensor is other for other in written)]

    def run_again(self) -> None:
        results = self.func(*self.args, **self.kwargs)
        for recorded, again in zip(tree_flatten(self.results)[0], tree_flatten(results)[0], strict=True):
            if isinstance(recorded, torch.Tensor) and recorded is not again:
                recorded.copy_(again)


class _Graph:
    """In place of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.operations: list[_Operation] = []

    def replay(self) -> None:
        CudaDouble.current.replay(self)

    def reset(self) -> None:
        self.operations.clear()

    def poison(self) -> None:
        for operation in self.operations:
            for result in tree_flatten(operation.results)[0]:
                is_argument = any(result is value for value in tree_flatten((operation.args, operation.kwargs))[0])
                if isinstance(result, torch.Tensor) and not is_argument:
                    poison(result)


class _Widened:
    """An operation that the CPU has for floats alone."""

    def __init__(self, func: Any) -> None:
        self._func, self._schema = func, func._schema

    def __call__(self, first: torch.Tensor, *others: Any, **kwargs: Any) -> Any:
        return self._func(first.float(), *others, **kwargs)


class _Poisoned:
    """An operation that allocates memory, and does not write it."""

    def __init__(self, func: Any) -> None:
        self._func, self._schema = func, func._schema

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        memory: torch.Tensor = self._func(*args, **kwargs)
        poison(memory)
        return memory


# ── in place of torch.cuda ──
class _Event:
    """Has passed when its second question is asked, or when the host has waited for it."""

    def __init__(self, **_: Any) -> None:
        self._launched = 0
        self._was_asked = False
        self.passed: Counter[int] = Counter()  # work that is done when the event has passed, by stream

    def record(self, stream: _Stream | None = None) -> None:
        double = CudaDouble.current
        self._launched, self._was_asked = double.launched, False
        self.passed = (stream or double.stream).passed.copy()

    def query(self) -> bool:
        CudaDouble.current.ask_event()
        was_asked, self._was_asked = self._was_asked, True
        if was_asked:
            self._pass()
        return was_asked

    def synchronize(self) -> None:
        CudaDouble.current.ask_event()
        self._pass()

    def _pass(self) -> None:
        CudaDouble.current.pass_copies(self._launched)
        CudaDouble.current.host_passed |= self.passed


class _Stream:
    cuda_stream = 0
    _numbers = itertools.count()

    def __init__(self, **_: Any) -> None:
        self.number = next(self._numbers)
        self.passed: Counter[int] = Counter()  # work before what this stream does next, by stream

    def wait_stream(self, other: _Stream) -> None:
        self.passed |= other.passed

    def wait_event(self, event: _Event) -> None:
        self.passed |= event.passed

    def synchronize(self) -> None:
        CudaDouble.current.wait("Stream.synchronize")


CudaDouble.Event, CudaDouble.Stream = _Event, _Stream


def _torch_cuda_of(double: CudaDouble) -> dict[str, Any]:
    """Returns what stands for names of `torch.cuda`."""

    @contextlib.contextmanager
    def stream(entered: Any) -> Iterator[None]:
        before, double.stream = double.stream, entered
        try:
            yield
        finally:
            double.stream = before

    def empty_cache() -> None:
        double.held_when_emptied.append(double.held_nbytes)
        if double.captures_underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    @contextlib.contextmanager
    def graph(recorded: _Graph, *, stream: Any, capture_error_mode: str = "global", **_: Any) -> Iterator[None]:
        empty_cache()
        double.capture = capture_error_mode, threading.get_ident()
        before, double.stream, double.tape = double.stream, stream, recorded.operations
        double.is_capture_invalid = False
        double.captures_underway += 1
        peak, held = double.peak_nbytes, double.held_nbytes
        double.peak_nbytes = held
        try:
            yield
        finally:
            double.tape = double.capture = None
            double.pool_nbytes = max(double.pool_nbytes, double.peak_nbytes - held)
            double.peak_nbytes = max(peak, double.peak_nbytes)
            if double.is_capture_invalid:  # as in torch, the capture does not end, and its stream stays the current one
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
            double.captures_underway -= 1
            double.stream = before

    def set_sync_mode(mode: int | str) -> None:
        double.sync_mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)

    def reset_peak(*_: Any) -> None:
        double.peak_nbytes = double.held_nbytes

    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: SimpleNamespace(multi_processor_count=MULTIPROCESSORS),
        "mem_get_info": lambda *_: (double.total_nbytes - double.held_nbytes - double.pool_nbytes, double.total_nbytes),
        "memory_allocated": lambda *_: double.held_nbytes + double.pool_nbytes,
        "max_memory_allocated": lambda *_: double.peak_nbytes + double.pool_nbytes,
        "reset_peak_memory_stats": reset_peak,
        "empty_cache": empty_cache,
        "synchronize": lambda *_: double.wait("torch.cuda.synchronize"),
        "Event": double.Event,
        "Stream": double.Stream,
        "current_stream": lambda *_: double.stream,
        "default_stream": lambda *_: double.default_stream,
        "stream": stream,
        "CUDAGraph": _Graph,
        "graph": graph,
        "graph_pool_handle": lambda: 0,
        "get_sync_debug_mode": lambda: double.sync_mode,
        "set_sync_debug_mode": set_sync_mode,
    }


def _torch_of(double: CudaDouble) -> dict[str, Any]:
    plain = torch.tensor  # it copies to the device below the dispatch

    def tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        on_host = plain(data, *args, **kwargs)
        if device is None or torch.device(device).type == "cpu":
            return on_host
        if torch.device(device).type != "cuda":
            return on_host.to(device)
        return on_host.to(double.device)

    return {"tensor": tensor}


def replace(undo: contextlib.ExitStack, module: Any, names: dict[str, Any]) -> None:
    """Until `undo` is closed."""
    for name, value in names.items():
        undo.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, value)


@functools.cache
def load_guard() -> None:
    """Builds and loads a device guard for CUDA, once for each torch. A torch that is built with CUDA has its own."""
    assert torch.version.cuda is None, "the double of a device needs a torch without CUDA"
    folder = Path(torch.__file__).parent
    source = Path(__file__).with_name("cuda_guard.cpp")
    key = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    built = source.parents[2] / "build" / f"cuda_guard_{key}.so"
    if not built.exists():
        compiler = shutil.which("g++") or shutil.which("c++")
        assert compiler, "a C++ compiler builds the guard"
        built.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as aside:
            library = Path(aside) / built.name
            options = ["-std=c++20", "-shared", "-fPIC", f"-I{folder / 'include'}", "-o", str(library)]
            subprocess.run([compiler, *options, str(source), f"-L{folder / 'lib'}", "-lc10"], check=True)
            library.replace(built)  # whole or not at all: another process may build it too
    ctypes.CDLL(str(built), ctypes.RTLD_GLOBAL)


# ── helpers ──
def line_of_call() -> str:
    """Returns the innermost line that is neither torch's nor the double's, and the line of ours that led to it."""
    frame: FrameType | None = sys._getframe(1)
    innermost = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if not any(part in path for part in SKIPPED):
            line = f"{Path(path).name}:{frame.f_lineno}"
            if "/penstock/" in path or "/tests/" in path:
                return line if not innermost else f"{innermost}, from {line}"
            innermost = innermost or line
        frame = frame.f_back
    return innermost


def numbers_of(value: Any) -> Any:
    return tree_map_only(OnDevice, lambda tensor: tensor.numbers, value)


def is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def _same_bytes(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(_bytes_of(tensor), _bytes_of(other))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def poison(tensor: torch.Tensor) -> None:
    filled = torch.empty(tensor.numel(), dtype=tensor.dtype)
    filled.view(torch.uint8).fill_(POISON & 1 if tensor.dtype == torch.bool else POISON)
    tensor.copy_(filled.view(tensor.shape))
