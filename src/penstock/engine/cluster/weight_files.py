"""The files of a model's weights, and their headers, checked. A launcher, a node and each worker read them.

The body of a safetensors file is read by a worker alone. `safetensors` checks a header, too, but its error names
neither the file nor the tensor, and reading it needs torch.
"""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

INDEX, ALONE = "model.safetensors.index.json", "model.safetensors"  # of weights: in several files, or in one
MAX_HEADER_NBYTES = 100 << 20  # as safetensors itself allows
LENGTH_NBYTES = 8  # in front of the header
POINTER = b"version https://git-lfs"
DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
METADATA = "__metadata__"

Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor as the header of its file describes it. `data_offsets` count from the end of the header."""

    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]

    @property
    def nbytes(self) -> int:
        begin, end = self.data_offsets
        return end - begin


class WeightHeader(NamedTuple):
    """The header of one file of weights."""

    path: Path
    raw: bytes  # as it is in the file, with its length in front
    tensors: dict[str, StoredTensor]


class ModelWeights(NamedTuple):
    headers: list[WeightHeader]  # by the name of the file
    file_of: dict[str, str]  # the name of the file of each tensor


def read_weights(directory: Path) -> ModelWeights:
    """Returns the headers of all files of weights. Raises ValueError, which names the file and the tensor, unless all
    files are there and whole, and have the tensors of the index; and OSError."""
    index = directory / INDEX
    if not index.exists():
        if not (directory / ALONE).exists():
            raise ValueError(f"{directory}: no {ALONE} and no {INDEX}: only weights in safetensors are read")
        header = read_header(directory / ALONE)
        return ModelWeights([header], dict.fromkeys(header.tensors, ALONE))
    file_of = read_index(index)
    files = sorted(set(file_of.values()))
    missing = [name for name in files if not (directory / name).exists()]
    if missing:
        how_many = f"{len(missing)} of {len(files)} files of {INDEX} are missing"
        raise ValueError(f"{directory}: {how_many}, {missing[0]} first")
    headers = {name: read_header(directory / name) for name in files}
    for name, file in file_of.items():
        if name not in headers[file].tensors:
            raise ValueError(f"{directory / file} has no tensor {name!r}, which {INDEX} expects there")
    return ModelWeights(list(headers.values()), file_of)


def read_index(path: Path) -> dict[str, str]:
    """Returns the file of each tensor. Raises ValueError and OSError."""
    try:
        return msgspec.convert(_decode(path.read_bytes())["weight_map"], dict[str, str])
    except KeyError:
        raise ValueError(f"{path} is invalid: it has no weight_map") from None
    except msgspec.ValidationError as error:
        raise ValueError(f"weight_map of {path} is invalid: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path} is invalid: {error}") from None


def read_header(path: Path) -> WeightHeader:
    """Returns the header of a file of safetensors. Raises ValueError, which names the file and the tensor, unless the
    tensors have the sizes of their shapes, and fill the rest of the file without gap or overlap; and OSError."""
    with open(path, "rb") as file:
        nbytes = path.stat().st_size
        begin = file.read(max(LENGTH_NBYTES, len(POINTER)))
        if begin == POINTER:
            raise ValueError(f"{path} is a pointer of Git LFS instead of the file: run git lfs pull")
        header_nbytes = int.from_bytes(begin[:LENGTH_NBYTES], "little")
        if len(begin) < LENGTH_NBYTES or header_nbytes > MAX_HEADER_NBYTES:
            raise ValueError(f"{path} is not a file of safetensors")
        file.seek(0)
        raw = file.read(LENGTH_NBYTES + header_nbytes)
    if len(raw) < LENGTH_NBYTES + header_nbytes:
        raise ValueError(f"{path} is cut off: it has {nbytes} bytes of {LENGTH_NBYTES + header_nbytes}")
    try:
        described = _decode(raw[LENGTH_NBYTES:])
        msgspec.convert(described.pop(METADATA, None), dict[str, str] | None)
        tensors = msgspec.convert(described, dict[str, StoredTensor])
    except ValueError as error:
        raise ValueError(f"{path} is not a file of safetensors: {error}") from None
    _require_sizes(path, tensors)
    _require_tiles(path, tensors, len(raw), nbytes)
    return WeightHeader(path, raw, tensors)


def _decode(text: bytes) -> dict[str, Any]:
    """Returns an object of JSON. Raises ValueError, also for a name that comes twice."""
    try:
        whole = json.loads(text.decode(), object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(whole, dict):
        raise ValueError(f"expected an object of JSON, got {type(whole).__name__}")
    return whole


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name in counts if counts[name] > 1)
        raise ValueError(f"the name {twice!r} comes twice")
    return fields


def _require_sizes(path: Path, tensors: dict[str, StoredTensor]) -> None:
    for name, tensor in tensors.items():
        bits = DTYPE_BITS.get(tensor.dtype)
        if bits is None:
            raise ValueError(f"{path}: the tensor {name!r} has the dtype {tensor.dtype!r}, which is not known")
        if bits * prod(tensor.shape) != 8 * tensor.nbytes:
            raise ValueError(
                f"{path}: the tensor {name!r} of {tensor.dtype} {list(tensor.shape)} takes {bits * prod(tensor.shape)} "
                f"bits, and its data_offsets {list(tensor.data_offsets)} have {tensor.nbytes} bytes"
            )


def _require_tiles(path: Path, tensors: dict[str, StoredTensor], header_nbytes: int, nbytes: int) -> None:
    end, before = 0, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin = tensor.data_offsets[0]
        if begin != end:
            how = "overlaps" if begin < end else "leaves a gap after"
            raise ValueError(f"{path}: the tensor {name!r} begins at {begin} and {how} {before}, which ends at {end}")
        end, before = tensor.data_offsets[1], f"the tensor {name!r}"
    if nbytes < header_nbytes + end:
        raise ValueError(f"{path} is cut off: it has {nbytes} bytes of {header_nbytes + end}")
    if nbytes > header_nbytes + end:
        raise ValueError(f"{path} has {nbytes - header_nbytes - end} bytes after its last tensor, {before}")
