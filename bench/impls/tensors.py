"""Ways to give a tensor to other processes, behind one interface: what they are driven by, and what they are given.

Each module `tensors_*.py` is one or several such ways. An end that stores first `put`s, and `send`s no more than what
finds it; others put nothing and send everything. `get` gives what shows the numbers. Needs nothing of ours: the peer
interpreter imports it too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench import impls

PAGE_NBYTES = 4096
TILE = np.arange(251, dtype=np.uint8)
CHUNK = np.tile(TILE, 4096)  # compared at a time


class Sender(impls.Sender):
    """The end that has the tensor. After `expect`, all tensors of the next phase hold `pattern(nbytes)`."""

    is_compared_with_memcpy = False

    def prepare(self) -> None:
        """Before each tensor, and not measured: lets the last one go, makes the next."""

    def put(self) -> Any:
        """Puts the tensor where others find it; returns what finds it there, or the tensor itself."""
        raise NotImplementedError

    def copy(self) -> None:
        """Copies the same bytes once to memory of this process alone."""
        raise NotImplementedError

    def warm(self) -> None:
        """Touches all the memory that tensors are put to, so that the kernel has no part in what follows."""

    def shared_nbytes(self) -> int:
        """This process's part of the shared memory in which tensors lie."""
        return weigh("Pss_Shmem:")


class Receiver(impls.Receiver):
    """An end that gets the tensor."""

    def get(self, token: Any) -> Any:
        """An array or tensor by what was received."""
        return token

    def shared_nbytes(self) -> int:
        return weigh("Pss_Shmem:")


def pattern(nbytes: int) -> np.ndarray[Any, Any]:
    """The numbers that every way carries: known, and not all the same; as 4-byte floats, as images are."""
    return np.resize(TILE, nbytes).view(np.float32)


def bytes_of(shown: Any) -> np.ndarray[Any, Any]:
    """The bytes of an array of NumPy or tensor of torch, where they lie."""
    array = shown if isinstance(shown, np.ndarray) else shown.numpy()
    return array.reshape(-1).view(np.uint8)


def read_pages(shown: Any) -> int:
    """A byte of each page, so that all of it is mapped and there."""
    return int(np.add.reduce(bytes_of(shown)[::PAGE_NBYTES], dtype=np.uint64))


def compare(shown: Any, nbytes: int) -> None:
    """A way that loses or changes numbers is worth nothing: the first tensor of a phase is compared in full."""
    result = bytes_of(shown)
    is_same = len(result) == nbytes and all(
        np.array_equal(part, CHUNK[: len(part)])
        for part in (result[at : at + len(CHUNK)] for at in range(0, nbytes, len(CHUNK)))
    )
    if not is_same:
        raise ValueError(f"a tensor of {nbytes} bytes arrived changed or cut ({len(result)} bytes)")


def weigh(*parts: str) -> int:
    """This process's part of the memory that it maps, of these kinds: pages shared with others count by share."""
    with open("/proc/self/smaps_rollup") as rollup:
        return sum(int(line.split()[1]) << 10 for line in rollup if line.startswith(parts))
