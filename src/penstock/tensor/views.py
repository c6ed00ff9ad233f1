"""Views: read-only arrays, without a copy, over bytes that another process wrote.

NumPy's arrays are marked read-only, also through `__dlpack__`. torch has no read-only tensors: a tensor in a pool lies
in a mapping that the kernel guards. A stray write is a SIGSEGV of the writing process, and the numbers stay unchanged.
A private (copy-on-write) mapping would let the writing process live. A private mapping was rejected: after a write, the
page would never show the next block at the same place. `writable=True` gives a private copy for writing. Pickling
copies, too: NumPy the numbers of the view, torch the view's whole tensor.

Numbers are not checked, bool included. A byte other than 0 and 1 comes only from a writer that wrote bytes as bool.
NumPy takes such a byte as true; torch's result is unspecified. A check of all bytes would cost as much as a copy, and
the writer could still write after the check.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from penstock._native import BlockLease, Bytes, use_kinds
from penstock.tensor.kinds import KIND_OF_CODE, KINDS, Kind, needed_torch, numpy_dtype, torch_dtype

if TYPE_CHECKING:
    from typing_extensions import Buffer

As = Literal["numpy", "torch", "bits"]


def view(buffer: Buffer, kind: Kind, shape: tuple[int, ...], offset: int = 0, as_: As = "numpy") -> Any:
    """Returns an array over the buffer, which the array keeps. tree.py has checked the size.

    as_: "numpy", with the dtypes of ml_dtypes for kinds that NumPy lacks, or unsigned integers of the same width if
    ml_dtypes is not installed; "bits", always with integers for these kinds; or "torch".
    """
    readonly = memoryview(buffer).toreadonly()
    array = _array(readonly, kind.numpy or kind.bits, shape, offset)
    if as_ != "torch":
        return shown_as(array, kind, as_)
    # torch gets a copy of memory that no mapping guards: a caller's bytes, or a block that this process can write.
    is_guarded = isinstance(readonly.obj, (BlockLease, Bytes)) and memoryview(buffer).readonly
    return shown_as(array if is_guarded else array.copy(), kind, as_)


def writable_as(buffer: Buffer, kind: Kind, shape: tuple[int, ...], offset: int, as_: As) -> Any:
    """Returns the same over a writable buffer: other processes see what is written to the array."""
    return shown_as(_array(memoryview(buffer), kind.numpy or kind.bits, shape, offset), kind, as_)


def copied(buffer: Buffer, kind: Kind, shape: tuple[int, ...], offset: int = 0, as_: As = "numpy") -> Any:
    """A private copy, which may be written."""
    return shown_as(_array(memoryview(buffer), kind.numpy or kind.bits, shape, offset).copy(), kind, as_)


def shown_as(bits: np.ndarray[Any, Any], kind: Kind, as_: As) -> Any:
    """Returns the memory as an array of this library."""
    if as_ == "bits":
        return bits
    if as_ == "numpy":
        return bits if kind.numpy is not None else bits.view(numpy_dtype(kind))
    if as_ != "torch":
        raise ValueError(f"expected as_ to be 'numpy', 'torch' or 'bits', got {as_!r}")
    tensor = needed_torch().from_numpy(bits) if bits.flags.writeable else _tensor(bits)
    return tensor if kind.numpy is not None else tensor.view(torch_dtype(kind))


def _array(buffer: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int) -> np.ndarray[Any, Any]:
    count = 1
    for size in shape:
        count *= size
    if not count:  # frombuffer refuses to make an array of nothing
        empty = np.empty(shape, dtype)
        empty.flags.writeable = not buffer.readonly
        return empty
    array: np.ndarray[Any, Any] = np.frombuffer(buffer, dtype, count, offset)
    if not array.flags.aligned:  # only from a writer that did not align it: torch and SIMD code need not support that
        array = array.copy()
        array.flags.writeable = not buffer.readonly
    return array.reshape(shape)


def _tensor(array: np.ndarray[Any, Any]) -> Any:
    torch = needed_torch()
    try:
        return torch.from_dlpack(array)
    except BufferError:  # NumPy before 2.1 cannot say "read-only" to another library
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.from_numpy(array)


use_kinds(
    [(kind.itemsize, kind.numpy or kind.bits, kind.numpy) for kind in KINDS],
    lambda code: numpy_dtype(KIND_OF_CODE[code]),
    lambda bits, code: shown_as(bits, KIND_OF_CODE[code], "torch"),
)
