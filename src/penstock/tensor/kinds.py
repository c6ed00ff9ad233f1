"""Kinds of numbers: the plain dtypes of torch and NumPy, and the small number of each on the wire.

source.py and views.py know the arrays of each library.
"""

from __future__ import annotations

import functools
import sys
from math import prod
from typing import Any, NamedTuple

import numpy as np

from penstock import _native
from penstock.codec.dtypes import DTYPES, MAX_DIMENSIONS, NUMPY_NAMES
from penstock.errors import UnsupportedTensor


class Kind(NamedTuple):
    code: int  # on the wire; never given to another kind
    name: str  # torch's, and NumPy's or ml_dtypes' where they have one
    itemsize: int
    bits: np.dtype[Any]  # the NumPy dtype of kinds without one: unsigned integers of the same width
    numpy: np.dtype[Any] | None


# The order is the wire's: new kinds go to the end. Kinds from uint1 on have one number per byte, as in torch.
_TORCH_NAMES = (  # that NumPy lacks
    "bfloat16 complex32 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 "
    "uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 int7"
).split()
_WIDTHS = {"bfloat16": 2, "complex32": 4}  # of the others; the rest have one byte


def _kinds() -> list[Kind]:
    kinds = []
    for code, name in enumerate((*NUMPY_NAMES, *_TORCH_NAMES), 1):
        dtype = DTYPES.get(code)
        itemsize = dtype.itemsize if dtype is not None else _WIDTHS.get(name, 1)
        kinds.append(Kind(code, name, itemsize, np.dtype(f"u{min(itemsize, 8)}"), dtype))
    return kinds


KINDS = _kinds()
KIND_OF_CODE = {kind.code: kind for kind in KINDS}
KIND_OF_NAME = {kind.name: kind for kind in KINDS}
_KIND_OF_NUMPY = {kind.numpy: kind for kind in KINDS if kind.numpy is not None}
_KIND_OF_TORCH: dict[Any, Kind] = {}


def kind_of(dtype: Any) -> Kind:
    """The kind that a torch dtype, a NumPy dtype, or a name of one means. Raises UnsupportedTensor if none does."""
    kind = _KIND_OF_TORCH.get(dtype) if type(dtype).__module__ == "torch" else None
    if kind is not None:
        return kind
    if type(dtype).__module__ == "torch":
        kind = KIND_OF_NAME.get(str(dtype).removeprefix("torch."))
        if kind is not None:
            _KIND_OF_TORCH[dtype] = kind
            return kind
        raise UnsupportedTensor(f"expected a tensor of numbers, got {dtype}: {_advice(str(dtype))}")
    if isinstance(dtype, str) and dtype in KIND_OF_NAME:
        return KIND_OF_NAME[dtype]
    return kind_of_numpy(np.dtype(dtype))


def kind_of_numpy(dtype: np.dtype[Any]) -> Kind:
    kind = _KIND_OF_NUMPY.get(dtype)
    if kind is None:
        native = dtype if dtype.isnative else dtype.newbyteorder("=")
        # ml_dtypes' own have names that NumPy does not know, and need not be imported to be recognised.
        is_foreign = native.isbuiltin == 2
        kind = _KIND_OF_NUMPY.get(native) or (KIND_OF_NAME.get(native.name) if is_foreign else None)
        if kind is None or kind.itemsize != native.itemsize:
            raise UnsupportedTensor(
                f"expected an array of numbers, got {dtype}: {_advice('foreign' if is_foreign else dtype.kind)}"
            )
    return kind


def _advice(what: str) -> str:
    if what == "O":
        return "objects are addresses of this process"
    if what in "mM":
        return "send it as .view('int64')"
    if what in "USTV":
        return "send the text or the fields by themselves"
    if "q" in what:
        return "send .int_repr() and the scales"
    return "convert it, or send its bytes as .view('uint8')"


def nbytes_of(kind: Kind, shape: tuple[int, ...]) -> int:
    """Returns the size of a C-contiguous tensor. Raises ValueError if no tensor has the shape: it may be untrusted."""
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"expected at most {MAX_DIMENSIONS} dimensions, got {len(shape)}")
    for size in shape:
        if type(size) is not int or not 0 <= size <= _native.MAX_NBYTES:
            raise ValueError(f"expected sizes from 0 to {_native.MAX_NBYTES}, got {shape!r:.80}")
    nbytes = prod(shape) * kind.itemsize
    # A size of 0 makes all other sizes harmless here, but not to code that multiplies only the other sizes.
    if nbytes > _native.MAX_NBYTES or (nbytes == 0 and prod(filter(None, shape)) * kind.itemsize > _native.MAX_NBYTES):
        raise ValueError(f"expected a tensor of at most {_native.MAX_NBYTES} bytes, got {kind.name} {shape!r:.80}")
    return nbytes


@functools.cache
def numpy_dtype(kind: Kind) -> np.dtype[Any]:
    """Returns how NumPy shows a kind that it lacks: as ml_dtypes does if installed, else as unsigned integers."""
    try:
        import ml_dtypes
    except ImportError:
        return kind.bits
    named = getattr(ml_dtypes, kind.name, None)
    if named is None or np.dtype(named).itemsize != kind.itemsize:
        return kind.bits
    dtype: np.dtype[Any] = np.dtype(named)
    return dtype


@functools.cache
def torch_dtype(kind: Kind) -> Any:
    """Raises UnsupportedTensor where this torch is too old to have it."""
    torch = needed_torch()
    torch_type = getattr(torch, kind.name, None)
    if not isinstance(torch_type, torch.dtype):
        raise UnsupportedTensor(f"torch {torch.__version__} has no {kind.name}: view it as numpy")
    return torch_type


def imported(name: str) -> Any:
    """Returns a library if this process has imported it; None: no object here can be an array of the library."""
    return sys.modules.get(name)


def needed_torch() -> Any:
    """torch, imported now if it has not been. Raises ImportError where there is none."""
    import torch

    return torch
