"""Triton's interpreter, which runs kernels on the CPU, without four faults of it (3.6 and 3.9).

The interpreter multiplies the bit patterns of bfloat16 in `tl.dot`, cuts float32 off where bfloat16 rounds, and lets a
kernel read and write memory outside its tensors. That of 3.6 makes integers of arrays with a dimension, for the bounds
of loops, which numpy refuses from 2.4 on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest

# Methods by which a kernel uses memory: the places of the arguments `pointers` and `mask`
ACCESSES = {"create_masked_load": (0, 1), "create_masked_store": (0, 2), "create_atomic_rmw": (1, 3)}


def require_interpreter() -> None:
    """Skips a module of tests where kernels cannot be interpreted. A process interprets kernels, or compiles them."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("interprets kernels: runs with TRITON_INTERPRET=1", allow_module_level=True)


def require_compiler() -> None:
    """Skips a module of tests where kernels cannot be compiled."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("compiles kernels: runs without TRITON_INTERPRET", allow_module_level=True)


@contextmanager
def _device_arithmetic() -> Iterator[None]:
    """Until the block ends, bfloat16 is rounded and multiplied as on a device, and infinities are no warnings."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def converted(numbers: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(numbers, source, target, mode)
        bits = numbers.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).reshape(numbers.shape)

    def multiplied(builder: Any, left: Any, right: Any, *options: Any) -> Any:
        wide = (builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (left, right))
        return dot(builder, *wide, *options)

    with (
        np.errstate(all="ignore"),
        mock.patch.object(interpreter, "_convert_float", converted),
        mock.patch.object(interpreter.InterpreterBuilder, "create_dot", multiplied),
    ):
        yield


def _extents(arguments: Iterable[Any]) -> list[tuple[int, int]]:
    """Returns where the memory of each tensor begins and ends."""
    import torch

    storages = [argument.untyped_storage() for argument in arguments if isinstance(argument, torch.Tensor)]
    return [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]


@contextmanager
def _checked_bounds() -> Iterator[None]:
    """Until the block ends, a kernel fails that reads or writes a byte outside the storages of its tensors.

    Without this the process crashes, and often in a later test.
    """
    from triton.runtime import interpreter

    extents: list[tuple[int, int]] = []
    run = interpreter.GridExecutor.__call__

    def check(name: str, pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        first = np.broadcast_to(pointers.data, np.broadcast_shapes(pointers.data.shape, mask.data.shape))[mask.data]
        if first.size and not any(begin <= first.min() and first.max() + size <= end for begin, end in extents):
            is_inside = np.zeros(first.shape, bool)
            for begin, end in extents:
                is_inside |= (first >= begin) & (first + size <= end)
            if not is_inside.all():
                raise IndexError(f"{name}: {np.count_nonzero(~is_inside)} of {first.size} addresses are in no tensor")

    def checked(name: str) -> Any:
        method = getattr(interpreter.InterpreterBuilder, name)
        of_pointers, of_mask = ACCESSES[name]

        def access(builder: Any, *arguments: Any) -> Any:
            check(name, arguments[of_pointers], arguments[of_mask])
            return method(builder, *arguments)

        return access

    def run_in_extents(executor: Any, *args: Any, **options: Any) -> None:
        extents[:] = _extents((*args, *options.values()))
        run(executor, *args, **options)

    with contextlib.ExitStack() as stack:
        for name in ACCESSES:
            stack.enter_context(mock.patch.object(interpreter.InterpreterBuilder, name, checked(name)))
        stack.enter_context(mock.patch.object(interpreter.GridExecutor, "__call__", run_in_extents))
        yield


@contextmanager
def _fast_calls() -> Iterator[None]:
    """Until the block ends, a kernel does not replace Triton's language by the interpreter's, after the first has: each
    call of a function by a kernel replaced it again, which took a third of the time."""
    import triton.language as tl
    from triton.runtime import interpreter

    replace = interpreter._patch_lang

    def replace_once(function: Any) -> Any:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(language.load) for language in languages):
            replace(function)
        return interpreter._LangPatchScope()

    with mock.patch.object(interpreter, "_patch_lang", replace_once):
        yield


@contextmanager
def _loop_bounds() -> Iterator[None]:
    """Until the block ends, numbers of a kernel are bounds of loops under each numpy."""
    from triton.runtime import interpreter

    replace = interpreter._patch_lang_tensor

    def replace_with_index(tensor: Any, scope: Any) -> None:
        replace(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda number: int(number.handle.data.item()))

    with mock.patch.object(interpreter, "_patch_lang_tensor", replace_with_index):
        yield


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Until the block ends, kernels run as on a device."""
    with _device_arithmetic(), _checked_bounds(), _fast_calls(), _loop_bounds():
        yield
