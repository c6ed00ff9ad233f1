"""The fingerprint of a model: tells two fine-tunes of one shape apart without reading all weights.

| file | what the fingerprint covers |
|---|---|
| config.json, tokenizer.json | all bytes |
| each file of weights | its name and its header: names, dtypes, shapes and offsets of all tensors |
| a tensor of up to 4 pages of 4 KiB | all bytes |
| a larger tensor | its first page, its last page, and 2 pages between them, drawn from its name |

A copy of the files on another machine has the same fingerprint. Training, merging an adapter and quantizing change
almost every page of the tensors that they touch. Not covered are the other pages of a large tensor (a few rows of an
embedding table that were edited by hand, say), and the files that no worker reads: the chat template, the processor's
settings, generation_config.json.

A sample is read with `pread`, and the kernel is told all positions beforehand. So a model of 15 GB with 300 tensors
costs 1,200 pages, or 5 MB, also where no page is cached.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from penstock.engine.cluster.weight_files import INDEX, StoredTensor, WeightHeader, read_weights

WHOLE_FILES = ("config.json", "tokenizer.json")
PAGE = 4096  # bytes: the kernel reads no less
MAX_PAGES = 4  # of a tensor
WORD_NBYTES = 8


class ModelFingerprint(NamedTuple):
    """Hashes of the parts of a model, in hexadecimal. Two equal parts have the same hash on all machines."""

    config: str
    tokenizer: str
    weights: str

    @property
    def digest(self) -> bytes:
        """Returns a hash of all parts."""
        return hashlib.sha256("/".join(self).encode()).digest()

    @property
    def word(self) -> int:
        """Returns the hash as one word of the status board, which is never 0."""
        return int.from_bytes(self.digest[:WORD_NBYTES], "little") | 1


class ModelFiles:
    """The files of a model, as they were when this object was created.

    A worker creates it, loads the model, and calls `require_unchanged`: then the fingerprint is that of the tensors in
    its memory, and not of files that have taken the place of those it has loaded. `weights_identity` changes with each
    write or replacement of a file of weights, also where the fingerprint misses an edit. A copy has another.
    """

    def __init__(self, directory: Path) -> None:
        """Raises ValueError and OSError, as `read_weights` does."""
        self._directory = directory
        self._files = _files(directory)
        self.fingerprint = model_fingerprint(directory)

    @property
    def weights_identity(self) -> list[tuple[str, int, int, int, int, int]]:
        """Returns name, device, inode, size and times of each file of weights."""
        weights = ((path, about) for path, about in self._files.items() if path.suffix == ".safetensors")
        return [(path.name, *_state(about), about.st_ctime_ns) for path, about in weights]

    def require_unchanged(self) -> None:
        """Raises RuntimeError if a file was written or replaced meanwhile."""
        before, now = (
            {path: _state(about) for path, about in files.items()} for files in (self._files, _files(self._directory))
        )
        for path in before.keys() | now.keys():
            if before.get(path) != now.get(path):
                raise RuntimeError(f"{path} was written or replaced while the model was loaded: start again")


def files_state(directory: Path) -> list[tuple[str, int, int, int, int, int]]:
    """Returns name, device, inode, size and times of each file of a model. Raises OSError."""
    return [(path.name, *_state(about), about.st_ctime_ns) for path, about in _files(directory).items()]


def model_fingerprint(directory: Path) -> ModelFingerprint:
    """Returns the fingerprint of the model in a directory. Raises ValueError and OSError, as `read_weights` does."""
    config, tokenizer = (file_hash(directory / name) for name in WHOLE_FILES)
    return ModelFingerprint(config, tokenizer, _weights_hash(directory))


def file_hash(path: Path) -> str:
    """Returns a hash of a file, in hexadecimal. A file that is missing has the hash of an empty one."""
    return hashlib.sha256(path.read_bytes() if path.exists() else b"").hexdigest()[:16]


def _weights_hash(directory: Path) -> str:
    hashing = hashlib.sha256()
    for header in read_weights(directory).headers:
        hashing.update(f"{header.path.name} {len(header.raw)} ".encode() + header.raw)
        for sample in _samples(header):
            hashing.update(sample)
    return hashing.hexdigest()[:32]


def _samples(header: WeightHeader) -> Iterator[bytes]:
    ranges = [part for item in sorted(header.tensors.items()) for part in _sampled_ranges(*item, len(header.raw))]
    file = os.open(header.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        for begin, end in ranges:
            os.posix_fadvise(file, begin, end - begin, os.POSIX_FADV_WILLNEED)
        for begin, end in ranges:
            sample = os.pread(file, end - begin, begin)
            if len(sample) < end - begin:
                raise ValueError(f"{header.path} was cut off while it was read: byte {begin + len(sample)} is missing")
            yield sample
    finally:
        os.close(file)


def _sampled_ranges(name: str, tensor: StoredTensor, header_nbytes: int) -> list[tuple[int, int]]:
    """Returns the ranges of bytes in the file that are read of a tensor: each lies in one page, or is all of it."""
    begin, end = (header_nbytes + offset for offset in tensor.data_offsets)
    first, last = begin // PAGE, (end - 1) // PAGE
    if last - first < MAX_PAGES:
        return [(begin, end)]
    drawn = hashlib.sha256(name.encode()).digest()
    numbers = [int.from_bytes(drawn[at : at + 8], "little") for at in range(0, 8 * (MAX_PAGES - 2), 8)]
    pages = [first, last, *(first + 1 + number % (last - first - 1) for number in numbers)]
    return [(max(begin, page * PAGE), min(end, (page + 1) * PAGE)) for page in pages]


def _files(directory: Path) -> dict[Path, os.stat_result]:
    """Returns what the kernel knows of each file, by path; those of weights come last. A link leads to its file."""
    paths = [*(directory / name for name in (*WHOLE_FILES, INDEX)), *sorted(directory.glob("*.safetensors"))]
    return {path: path.stat() for path in paths if path.exists()}


def _state(about: os.stat_result) -> tuple[int, int, int, int]:
    """Returns what changes when a file is written, or replaced."""
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
