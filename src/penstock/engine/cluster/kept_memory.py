"""Memory that outlives the processes that fill it: the KV cache of each rank, and the ledger of its blocks.

The launcher holds files without names (memfds), and never maps them. They end with the launcher, so nothing is left
behind. The first process that maps a file writes a key of the content. A process that opens the file with another key
finds it empty.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from importlib.metadata import PackageNotFoundError, version
from logging import WARNING
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.engine.cluster.logs import event
from penstock.memory.segment import Descriptor

if TYPE_CHECKING:
    from typing_extensions import Self

PACKAGES = "penstock", "torch", "transformers"  # decide weights, keys and values; a restart may find newer ones
KEY_NBYTES, EPOCH_NBYTES = 32, 16
HEADER = struct.Struct(f"<{KEY_NBYTES}s{EPOCH_NBYTES}sQ")  # key, epoch, count
CONTENT_AT = 4096


def read_versions() -> tuple[str, ...]:
    """Returns the versions of the packages, as they are installed now."""
    versions = []
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):  # a launcher needs none of them
            versions.append(f"{name} {version(name)}")
    return tuple(versions)


VERSIONS = read_versions()  # of the code that this process runs; a fork runs that of the fork server


class MemoryFile:
    """A file in memory without a name. The content lives as long as any process holds the file."""

    FLAGS = os.MFD_CLOEXEC

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def create(cls, kind: str, label: str) -> Self:
        """The name stands in /proc: `penstock inspect` adds up the bytes of each kind. Raises OSError."""
        return cls(os.memfd_create(f"penstock {kind}: {label}", cls.FLAGS))

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_spawn, (type(self), Descriptor(self._fd, type(self).__name__))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        return os.fstat(self._fd).st_size

    def read_header(self) -> tuple[bytes, bytes, int]:
        """Returns key, epoch and count. Of a file that is too short: zeros."""
        key, epoch, count = HEADER.unpack(os.pread(self._fd, HEADER.size, 0).ljust(HEADER.size, b"\0"))
        return key, epoch, count

    def empty(self) -> None:
        """Gives the memory back to the kernel. No process may use a mapping of the file afterwards."""
        os.ftruncate(self._fd, 0)

    def resize(self, nbytes: int) -> None:
        """Raises OSError if memory is short."""
        os.ftruncate(self._fd, nbytes)

    def map(self) -> mmap.mmap:
        """Maps the file for writing, in large pages where the kernel has any for shared memory. Raises OSError."""
        pages = mmap.mmap(self._fd, self.nbytes, mmap.MAP_SHARED)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTDUMP"):
            with contextlib.suppress(OSError, AttributeError):  # a kernel, or a Python, without it
                pages.madvise(getattr(mmap, advice))
        return pages

    def lock(self) -> bool:
        """Returns False if another process has the lock. The lock of a process that dies is free. Raises OSError."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def unlock(self) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._fd)


def _from_spawn(kind: type[MemoryFile], duplicate: Any) -> MemoryFile:
    fd = duplicate.detach()
    os.set_inheritable(fd, False)  # spawn passes inheritable descriptors, and a program would get them, too
    return kind(fd)


class KeptMemory:
    """The content of a file, under a key. A file with another key, count or size is emptied first.

    `epoch` is random, and changes whenever the file is emptied. `is_discarded`: the file had other content.
    """

    def __init__(self, file: MemoryFile, key: bytes, count: int, nbytes: int) -> None:
        """`count`: a number that the next process may read before it knows the size. Raises OSError."""
        size, before = CONTENT_AT + nbytes, file.nbytes
        found_key, epoch, found_count = file.read_header()
        is_same = (before, found_key, found_count) == (size, key, count)
        self.is_discarded = not is_same and before > 0
        if not is_same:
            # No process sees a key with a part of the content: the file is empty, and the key is written last.
            file.empty()
            file.resize(size)
            epoch = os.urandom(EPOCH_NBYTES)
        pages = file.map()
        if not is_same:
            pages[KEY_NBYTES : HEADER.size] = HEADER.pack(bytes(KEY_NBYTES), epoch, count)[KEY_NBYTES:]
            pages[:KEY_NBYTES] = key
        self.epoch = epoch
        self.content = memoryview(pages)[CONTENT_AT:]


class KVFiles(NamedTuple):
    """Files of a group: the KV cache of each rank, and the core's ledger of the blocks."""

    pages: tuple[MemoryFile, ...]
    ledger: MemoryFile

    @classmethod
    def create(cls, group: int, ranks: int) -> KVFiles | None:
        """Returns None, and logs why, if the system has no memory or descriptors left."""
        files: list[MemoryFile] = []
        try:
            files += [MemoryFile.create("kv pages", f"{group}.{rank}") for rank in range(ranks)]
            files.append(MemoryFile.create("kv ledger", str(group)))
        except OSError as error:
            for file in files:
                file.close()
            event("kv cache is not kept", WARNING, group=group, reason=error)
            return None
        return cls(tuple(files[:-1]), files[-1])

    def empty(self) -> None:
        """Gives all memory back. No process of the group may be alive."""
        for file in (self.ledger, *self.pages):
            file.empty()

    def close(self) -> None:
        for file in (self.ledger, *self.pages):
            file.close()
