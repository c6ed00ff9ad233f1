"""The files in which prompt embeddings are sent: npy or safetensors, with one array of [tokens, hidden size].

Neither format can hold code. `torch.save` and `numpy.savez` write pickles or archives that may have some; these are
refused by name. The headers are read here: `numpy.lib.format` evaluates a header as Python, and `safetensors` copies
the numbers while no other thread can run.
"""

from __future__ import annotations

import re
from math import prod
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

Embeds: TypeAlias = npt.NDArray[Any]  # [tokens, hidden size]: float32, float16, or int16 with the bits of bfloat16

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]

MAX_HEADER = 4096  # bytes; of one array it is about 100
NPY, ZIP = b"\x93NUMPY", b"PK\x03\x04"
PICKLE = re.compile(rb"\x80[\x02-\x05]")
BFLOAT16_EXPONENT = 0x7F80

_NPY_LENGTHS = {b"\1\0": 2, b"\2\0": 4, b"\3\0": 4}  # bytes of the header's length, by version
_NPY_SHAPE = rb"(?:(?:0|[1-9]\d{0,8})(?:, *|(?=\))))*"
_NPY_HEADER = re.compile(
    rb"\{ *'descr': *'([^'\\]*)', *'fortran_order': *(False|True), *'shape': *\((" + _NPY_SHAPE + rb")\),? *\}[ \n]*"
)
_NPY_DTYPES = {b"<f4": np.float32, b"<f2": np.float16}
_SAFETENSORS_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.int16}


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[Number]
    data_offsets: tuple[Number, Number]


_HEADER: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_METADATA = msgspec.json.Decoder(dict[str, str] | None)
_ENTRY = msgspec.json.Decoder(_Entry)


def parse_embeds(raw: bytes) -> Embeds:
    """Returns the array of a file, as a view of its bytes. Raises ValueError with the defect."""
    if raw.startswith(NPY):
        embeds = _parse_npy(raw)
    elif raw.startswith(ZIP):
        raise ValueError(f"a zip archive, as torch.save and numpy.savez write it, {_WAY_OUT}")
    elif raw[8:9] == b"{":
        embeds = _parse_safetensors(raw)
    elif PICKLE.match(raw):
        raise ValueError(f"a pickle, as torch.save writes it, {_WAY_OUT}")
    else:
        raise ValueError(f"its first bytes {raw[:8]!r} are of neither format")
    if embeds.ndim == 3 and embeds.shape[0] == 1:  # a batch of one
        embeds = embeds[0]
    if embeds.ndim != 2 or 0 in embeds.shape:
        raise ValueError(f"expected a shape of [tokens, hidden size], got {list(embeds.shape)}")
    if not _is_finite(embeds):
        raise ValueError("a number is NaN or infinite")
    return embeds


_WAY_OUT = "is not read, as it may hold code: safetensors.torch.save and numpy.save write files without"


def _parse_npy(raw: bytes) -> Embeds:
    size = _NPY_LENGTHS.get(raw[6:8])
    if size is None:
        raise ValueError(f"expected npy of version 1, 2 or 3, got {raw[6:8]!r}")
    begin = 8 + size
    end = begin + _header_nbytes(raw, 8, size)
    match = _NPY_HEADER.fullmatch(raw, begin, end)
    if match is None:
        raise ValueError(f"expected the header that numpy.save writes for one array, got {raw[begin:end][:80]!r}")
    dtype = _NPY_DTYPES.get(match[1])
    if dtype is None:
        raise ValueError(f"expected float32 or float16 ('<f4' or '<f2'), got {match[1][:16]!r}: npy has no bfloat16")
    shape = [int(number) for number in match[3].split(b",") if number.strip()]
    return _numbers(raw, end, dtype, shape, "F" if match[2] == b"True" else "C")


def _parse_safetensors(raw: bytes) -> Embeds:
    end = 8 + _header_nbytes(raw, 0, 8)
    try:
        header = _HEADER.decode(raw[8:end].decode())
        _METADATA.decode(header.pop("__metadata__", b"null"))
        entries = {name: _ENTRY.decode(value) for name, value in header.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the header of safetensors is invalid: {error}") from None
    if len(entries) != 1:
        raise ValueError(f"expected one tensor, got {len(entries)}: {', '.join(entries)[:80]}")
    ((name, entry),) = entries.items()
    dtype = _SAFETENSORS_DTYPES.get(entry.dtype)
    if dtype is None:
        raise ValueError(f"expected F32, BF16 or F16, got {entry.dtype[:16]!r} in the tensor {name[:80]!r}")
    if entry.data_offsets != (0, len(raw) - end):
        raise ValueError(f"expected data_offsets of [0, {len(raw) - end}], got {list(entry.data_offsets)}")
    return _numbers(raw, end, dtype, entry.shape, "C")


def _header_nbytes(raw: bytes, at: int, size: int) -> int:
    nbytes = int.from_bytes(raw[at : at + size], "little")
    if nbytes > MAX_HEADER:
        raise ValueError(f"expected a header of at most {MAX_HEADER} bytes, got one of {nbytes}")
    if len(raw) < at + size + nbytes:
        raise ValueError("the header is cut off")
    return nbytes


def _numbers(raw: bytes, begin: int, dtype: Any, shape: list[int], order: Any) -> Embeds:
    if len(shape) not in (2, 3):
        raise ValueError(f"expected a shape of [tokens, hidden size], got {str(shape)[:80]}")
    nbytes = prod(shape) * np.dtype(dtype).itemsize
    if len(raw) - begin != nbytes:
        raise ValueError(f"expected {nbytes} bytes for a shape of {shape}, got {len(raw) - begin}")
    return np.frombuffer(raw, dtype, offset=begin).reshape(shape, order=order)


def _is_finite(embeds: Embeds) -> bool:
    if embeds.dtype == np.int16:
        return not (embeds & BFLOAT16_EXPONENT == BFLOAT16_EXPONENT).any()
    return bool(np.isfinite(embeds).all())
