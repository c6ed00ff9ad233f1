"""Tensors of a CPU, as native kernels read them: rows by their addresses, and memory in large pages.

Also replaces what modules compute by kernels, and has the number of the kernels' threads, which is not always torch's.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.cluster.logs import event

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # options of glibc's malloc.h
MAX_MMAP_THRESHOLD = 32 << 20  # glibc refuses more
KEPT_NBYTES = 256 << 20  # free memory at the end of the heap
_kernel_threads = 1


def set_threads(count: int, of_torch: int | None = None) -> None:
    """Sets the number of threads of native kernels, and that of torch; None: the same."""
    global _kernel_threads
    _kernel_threads = count
    if torch.get_num_threads() != (of_torch or count):
        torch.set_num_threads(of_torch or count)


def kernel_threads() -> int:
    """Returns the number of threads of native kernels."""
    return _kernel_threads


def rows_of(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Returns a tensor [..., size] as rows of contiguous elements. Raises ValueError for any other tensor."""
    is_plain = type(x) is Tensor and x.device.type == "cpu"  # of another tensor, the address is none of ours
    if not is_plain or x.dtype != dtype or x.shape[-1] != size:
        kind = f"{type(x).__name__} {list(x.shape)} of {x.dtype} on {x.device}"
        raise ValueError(f"expected a Tensor [..., {size}] of {str(dtype).removeprefix('torch.')} on cpu, got a {kind}")
    rows = x.reshape(-1, size)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def replace_forwards(
    model: nn.Module, parts: Sequence[str], find: Callable[[Any], Callable[..., Any] | None], kind: str
) -> None:
    """Replaces the computation of modules with these parts by what `find` returns. None: the module keeps its own."""
    replaced = stock = 0
    module: Any  # its method is replaced
    for module in model.modules():
        if not all(hasattr(module, name) for name in parts):
            continue
        computation = find(module)
        if computation is None:
            stock += 1
            continue
        module.forward = computation
        replaced += 1
    if replaced or stock:
        event(f"{kind} layers replaced", layers=replaced, stock=stock)


def huge_pages(nbytes: int) -> mmap.mmap:
    """Returns memory of zeros, allocated when it is written to, in large pages where the kernel has any."""
    pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a kernel, or a Python, that knows of one size only
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def keep_freed_memory() -> None:
    """Keeps the memory of freed tensors for the next ones, where the C library is glibc: so a step has no fresh pages.

    Otherwise glibc unmaps each large tensor, and the end of its heap: a step of 2,048 tokens had 27,000 page faults.
    """
    with contextlib.suppress(AttributeError):  # another C library
        set_option = ctypes.CDLL(None).mallopt
        set_option(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD)
        set_option(M_TRIM_THRESHOLD, KEPT_NBYTES)
