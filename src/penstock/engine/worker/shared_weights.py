"""Weights of a rank, once per node: the first worker fills a file of the launcher, and all later workers map it.

The file has weights that differ from the files of the model: converted, sliced, merged or packed ones. Views of the
files of the model are shared already. A file is filled once, then sealed, and no process can change the content. When
a worker dies before the seal, the next worker begins anew.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Mapping
from logging import WARNING
from math import prod
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine import _native
from penstock.engine.cluster.kept_memory import VERSIONS
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.node_weights import WeightFile
from penstock.engine.worker.cpu_linear import round_up

LAYOUT = 1  # of the file and of packed weights; another number keeps workers from files of earlier ones
LENGTH = struct.Struct("<Q")  # of the table, in front of it
ALIGNED, PAGE_NBYTES = 64, 4096
FILL_POLL_S = 0.01  # seconds between looks at a file that another worker fills
FILL_TIMEOUT_S = 600.0  # seconds, after which a worker loads weights for itself; the lock of a dead filler is free


class SharedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begin: int  # in the content
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        kind: torch.dtype = getattr(torch, self.dtype)
        return prod(self.shape) * kind.itemsize


class WeightTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Begins the file. Tensors that share memory have equal `begin`."""

    key: str
    nbytes: int  # of the content: packed weights, then tensors
    packed_nbytes: int  # 0: each worker packs linear layers for itself
    tensors: dict[str, SharedTensor]


class SharedWeights:
    """The file of a rank: complete, or to be filled by this worker.

    A worker that fills the file calls `fill`, packs linear layers into `packed`, and calls `complete`.
    """

    def __init__(self, file: WeightFile, key: str, table: WeightLayout | None, check: Callable[[], object]) -> None:
        """`table`: of a complete file. Raises OSError."""
        self._file = file
        self._key = key
        self._check = check
        self._mapping: npt.NDArray[np.uint8] | None = None
        self._head = b""
        self._claimed, self._has_large_pages = 0, True  # bytes of the mapping
        self.is_complete = table is not None
        self.tensors: dict[str, Tensor] = {}
        self.packed: npt.NDArray[np.uint16] | None = None
        if table is not None:
            self._map(table, is_writable=False)
            event("weights mapped", tensors=len(self.tensors), mib=file.nbytes >> 20)

    @classmethod
    def open(
        cls, file: WeightFile | None, *parts: object, check: Callable[[], object] = lambda: None
    ) -> SharedWeights | None:
        """Waits while another worker fills the file. `parts`: all that decides the weights, beside versions and the
        kernel. `check`: raises if files of the model have changed. Returns None, and logs why, if this worker loads
        weights for itself."""
        if file is None:
            return None
        parts = LAYOUT, VERSIONS, _native.linear_kernel(), *parts
        key = hashlib.sha256(repr(parts).encode()).hexdigest()
        try:
            if not await_seal(file):
                file.empty()  # a dead filler may have left memory
                return cls(file, key, None, check)
            table = WeightLayout.read(file)
            if table.table.key != key:
                raise ValueError("the file has weights of another model, dtype or version")
            return cls(file, key, table, check)
        except (OSError, ValueError) as error:
            event("weights are not shared", WARNING, reason=error)
            return None

    def fill(self, tensors: Mapping[str, Tensor], packed_nbytes: int) -> bool:
        """Copies weights into the file. Each of `tensors` is its copy then, and has given its memory back. False: there
        is no memory for the file."""
        if packed_nbytes and not gives_large_pages():
            event("packed weights are not shared", WARNING, reason="files in memory get no large pages")
            packed_nbytes = 0
        table = WeightLayout.build(self._key, tensors, packed_nbytes)
        try:
            self._file.empty()
            self._file.resize(table.file_nbytes)
            self._map(table, is_writable=True)
        except OSError as error:
            event("weights are not shared", WARNING, reason=error)
            self._file.empty()
            self._file.unlock()
            return False
        self._head = LENGTH.pack(len(table.encoded)) + table.encoded
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)
            tensor.data = self.tensors[name]
        return True

    def claim(self, begin: int, end: int) -> None:
        """Claims large pages for a part of `packed`, before the part is written: all of `packed` beside all sources
        would take twice the memory."""
        assert self._mapping is not None and self.packed is not None
        first = self.packed.ctypes.data - self._mapping.ctypes.data
        until = round_up(first + 2 * end, _native.LARGE_PAGE_NBYTES)
        if until > self._claimed:
            self._has_large_pages &= _native.claim_large_pages(self._mapping[self._claimed : until])
            self._claimed = until

    def complete(self) -> None:
        """Seals the file, if this worker has filled it. From now on other workers map it.

        Between `open` and `complete` no rank may wait for another rank: the other rank may wait for another group, and
        the other group for this rank.
        """
        if self.is_complete or self._mapping is None:
            return
        self._check()
        self._mapping[: len(self._head)] = np.frombuffer(self._head, np.uint8)
        if not self._has_large_pages:
            event("shared weights have small pages", WARNING, reason="large pages are short")
        _native.protect(self._mapping)
        self._file.seal()
        self._file.unlock()
        self.is_complete = True
        event("weights shared", tensors=len(self.tensors), mib=self._file.nbytes >> 20)

    def _map(self, table: WeightLayout, *, is_writable: bool) -> None:
        """Raises OSError."""
        self._mapping = mapping = _native.map_file(self._file.fileno(), self._file.nbytes, is_writable)
        content = mapping[table.content_at :]
        if table.table.packed_nbytes:
            self.packed = content[: table.table.packed_nbytes].view(np.uint16)
        for name, place in table.table.tensors.items():
            part = torch.from_numpy(content[place.begin : place.begin + place.nbytes])
            self.tensors[name] = part.view(getattr(torch, place.dtype)).view(place.shape)


class WeightLayout(NamedTuple):
    """A table, and its places in the file."""

    table: WeightTable
    encoded: bytes

    @property
    def content_at(self) -> int:
        return round_up(LENGTH.size + len(self.encoded), PAGE_NBYTES)

    @property
    def file_nbytes(self) -> int:
        return round_up(self.content_at + self.table.nbytes, _native.LARGE_PAGE_NBYTES)

    @classmethod
    def build(cls, key: str, tensors: Mapping[str, Tensor], packed_nbytes: int) -> WeightLayout:
        end, places, begins = round_up(packed_nbytes, ALIGNED), {}, dict[tuple[int, int], int]()
        for name, tensor in tensors.items():
            memory = tensor.data_ptr(), tensor.nbytes
            if memory not in begins:
                begins[memory] = end
                end = round_up(end + tensor.nbytes, ALIGNED)
            places[name] = SharedTensor(begins[memory], tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        table = WeightTable(key, end, packed_nbytes, places)
        return cls(table, msgspec.json.encode(table))

    @classmethod
    def read(cls, file: WeightFile) -> WeightLayout:
        """Reads the table of a sealed file. Raises OSError and ValueError."""
        (length,) = LENGTH.unpack(file.read(LENGTH.size, 0).ljust(LENGTH.size, b"\0"))
        encoded = file.read(min(length, file.nbytes), LENGTH.size)
        table = cls(msgspec.json.decode(encoded, type=WeightTable), encoded)
        if file.nbytes != table.file_nbytes:
            raise ValueError(f"the file has {file.nbytes} bytes, and its table expects {table.file_nbytes}")
        return table


def await_seal(file: WeightFile) -> bool:
    """Waits while another process fills a file. Returns False if this process has to fill the file, and has its lock.
    Raises OSError."""
    deadline = time.monotonic() + FILL_TIMEOUT_S
    while not file.is_sealed():
        if file.lock():
            if not file.is_sealed():
                return False
            file.unlock()
            break
        if time.monotonic() >= deadline:
            raise TimeoutError(f"another worker has not filled the file within {FILL_TIMEOUT_S:g} s")
        time.sleep(FILL_POLL_S)
    return True


def gives_large_pages() -> bool:
    """Returns whether the kernel gives a file in memory a large page."""
    probe = WeightFile.create("weights", "probe")
    try:
        probe.resize(_native.LARGE_PAGE_NBYTES)
        return _native.claim_large_pages(_native.map_file(probe.fileno(), _native.LARGE_PAGE_NBYTES, True))
    except OSError:
        return False
    finally:
        probe.close()
