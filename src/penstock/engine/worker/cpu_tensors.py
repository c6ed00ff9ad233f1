"""Tensors of a CPU, as native kernels read them: rows by their addresses, and memory in large pages."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor


def rows_of(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Returns a tensor [..., size] as rows of contiguous elements. Raises ValueError for any other tensor."""
    is_plain = type(x) is Tensor and x.device.type == "cpu"  # of another tensor, the address is none of ours
    if not is_plain or x.dtype != dtype or x.shape[-1] != size:
        kind = f"{type(x).__name__} {list(x.shape)} of {x.dtype} on {x.device}"
        raise ValueError(f"expected a Tensor [..., {size}] of {str(dtype).removeprefix('torch.')} on cpu, got a {kind}")
    rows = x.reshape(-1, size)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def huge_pages(nbytes: int) -> mmap.mmap:
    """Returns memory of zeros, allocated when it is written to, in large pages where the kernel has any."""
    pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a kernel, or a Python, that knows of one size only
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
