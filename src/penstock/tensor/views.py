"""What comes out: arrays over bytes that somebody else wrote, without a copy, and read-only.

NumPy's arrays say that they are read-only, also through `__dlpack__`. torch has no read-only tensors: one that lies in
a pool lies in a mapping that the kernel guards. A stray write through it is a SIGSEGV of the process that writes,
never another number for the others. A private (copy-on-write) mapping would let that process live, and was not taken:
a page that it has written once would never show it the next block at that place. Who wants to write says
`writable=True`, and has a copy. Pickling copies too: NumPy what a view shows, torch the whole tensor that it is of.

Numbers are shown as they lie, bool too: a byte that is neither 0 nor 1, which only somebody who wrote bytes as bool can
have left there, is true to NumPy and to torch whatever it makes of it. To look at all of them would cost what a copy
does, and whoever can write them can do so after the look. A tensor that travels inline is looked at (ref.py).
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from penstock._native import Bytes, Lease, use_kinds
from penstock.tensor.kinds import KIND_OF_CODE, KINDS, Kind, needed_torch, numpy_dtype, torch_dtype

if TYPE_CHECKING:
    from typing_extensions import Buffer

As = Literal["numpy", "torch", "bits"]


def view(buffer: Buffer, kind: Kind, shape: tuple[int, ...], offset: int = 0, as_: As = "numpy") -> Any:
    """An array over the buffer, which it keeps. The caller has checked that they fit: ref.py, tree.py.

    as_: "numpy", where kinds that NumPy has no word for are those of ml_dtypes if that is installed, and else unsigned
    integers of the same width; "bits", where those are always such integers; or "torch".
    """
    seen = memoryview(buffer).toreadonly()
    array = _array(seen, kind.numpy or kind.bits, shape, offset)
    if as_ != "torch":
        return shown_as(array, kind, as_)
    # What no mapping guards, torch has a copy of: somebody's bytes, or a block that this process can still write.
    is_guarded = isinstance(seen.obj, (Lease, Bytes)) and memoryview(buffer).readonly
    return shown_as(array if is_guarded else array.copy(), kind, as_)


def writable_as(buffer: Buffer, kind: Kind, shape: tuple[int, ...], offset: int, as_: As) -> Any:
    """The same over a buffer that may be written: whoever has the array writes what others see."""
    return shown_as(_array(memoryview(buffer), kind.numpy or kind.bits, shape, offset), kind, as_)


def copied(buffer: Buffer, kind: Kind, shape: tuple[int, ...], offset: int = 0, as_: As = "numpy") -> Any:
    """A private copy, which may be written."""
    return shown_as(_array(memoryview(buffer), kind.numpy or kind.bits, shape, offset).copy(), kind, as_)


def shown_as(bits: np.ndarray[Any, Any], kind: Kind, as_: As) -> Any:
    """The same memory as this library shows it."""
    if as_ == "bits":
        return bits
    if as_ == "numpy":
        return bits if kind.numpy is not None else bits.view(numpy_dtype(kind))
    if as_ != "torch":
        raise ValueError(f"as_ is 'numpy', 'torch' or 'bits', not {as_!r}")
    made = needed_torch().from_numpy(bits) if bits.flags.writeable else _tensor(bits)
    return made if kind.numpy is not None else made.view(torch_dtype(kind))


def _array(buffer: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int) -> np.ndarray[Any, Any]:
    count = 1
    for size in shape:
        count *= size
    if not count:  # frombuffer refuses to make an array of nothing
        made = np.empty(shape, dtype)
        made.flags.writeable = not buffer.readonly
        return made
    found: np.ndarray[Any, Any] = np.frombuffer(buffer, dtype, count, offset)
    if not found.flags.aligned:  # only from who did not align it: torch and SIMD code need not bear it
        found = found.copy()
        found.flags.writeable = not buffer.readonly
    return found.reshape(shape)


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
