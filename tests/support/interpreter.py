"""Triton's interpreter, which runs kernels on the CPU, without two faults of it (3.6 and 3.9).

The interpreter multiplies the bit patterns of bfloat16 in `tl.dot`, and cuts float32 off where bfloat16 rounds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest


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
def device_arithmetic() -> Iterator[None]:
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


@contextmanager
def fast_calls() -> Iterator[None]:
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
