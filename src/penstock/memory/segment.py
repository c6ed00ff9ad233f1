"""Segments: anonymous shared memory, and how segments reach other processes.

The native core claims, seals and maps. A segment has no name in any file system: the kernel frees the memory when the
last process with a descriptor or mapping has ended, in whatever way.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from penstock import _native
from penstock.errors import LayoutMismatch, MemoryExhausted

HUGE_NBYTES = 2 << 20
GRANULE_NBYTES = 1 << 20  # a growing pool claims pages in granules of this size, and keeps the pages

_T = TypeVar("_T", bound="Shareable")


class Ticket(msgspec.Struct, frozen=True):
    """What an unrelated process of the same user needs to attach. Good while its owner lives and keeps the segment.

    Examples:
        >>> ring = Ring()
        >>> attach(ring.ticket).name, attach(str(ring.ticket)).name
        ('ring', 'ring')
    """

    pid: int
    start: int
    fd: int
    inode: int
    nonce: int

    def __str__(self) -> str:
        return f"penstock:{self.pid}:{self.start}:{self.fd}:{self.inode}:{self.nonce:x}"

    @classmethod
    def parse(cls, text: str) -> Ticket:
        """Returns the ticket that a text describes.

        Args:
            text: `str(channel.ticket)`.

        Raises:
            LayoutMismatch: the text is not a ticket.

        Examples:
            >>> Ticket.parse("penstock:4711:1234:5:678:9a").pid
            4711
        """
        parts = text.strip().split(":")
        try:
            scheme, pid, start, fd, inode, nonce = parts
            if scheme != "penstock":
                raise ValueError
            return cls(int(pid), int(start), int(fd), int(inode), int(nonce, 16))
        except ValueError:
            raise LayoutMismatch(f"expected a ticket, penstock:PID:START:FD:INODE:NONCE, got {text!r}") from None


def within(what: str, value: int, least: int, most: int) -> int:
    """Returns `value`. Raises TypeError or ValueError unless `value` is a whole number in the range."""
    if not isinstance(value, int):
        raise TypeError(f"expected {what} to be a whole number, got {value!r}")
    if not least <= value <= most:
        raise ValueError(f"expected {what} from {least} to {most}, got {value}")
    return value


def require_class(name: str, value: object, kind: type) -> None:
    """Raises TypeError for an option of a wrong class."""
    if not isinstance(value, kind):
        raise TypeError(f"expected {name} to be a {kind.__name__}, got {value!r}")


def fitting(nbytes: int, what: str) -> int:
    """The size, if a segment can have it at all."""
    if not isinstance(nbytes, int):
        raise TypeError(f"expected a whole number of bytes for {what}, got {nbytes!r}")
    if nbytes <= 0:
        raise ValueError(f"expected at least one byte for {what}, got {nbytes}")
    if nbytes > _native.MAX_NBYTES:
        available, limit = _native.memory_available()
        error = MemoryExhausted(f"{what} of {nbytes} bytes does not fit: {limit} has {available} left")
        error.requested, error.free = nbytes, available
        raise error
    return nbytes


def granule_nbytes(pool_nbytes: int) -> int:
    """Returns the size of the granules in which a growing pool claims pages."""
    granule = GRANULE_NBYTES
    while pool_nbytes > granule * _native.MAX_GRANULES:
        granule *= 2
    return granule


class MemoryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where shared memory lies, and when its pages are claimed. `penstock inspect` shows options without effect.

    Args:
        huge_pages: pages of 2 MiB. True: if the machine has any; "require": MemoryExhausted if not. A huge page is
            claimed as a whole.
        numa_node: the node that the memory lies on; None: near the process that touches a page first.
        numa_required: raises ValueError or OSError where the memory cannot lie on the node.
        prefault: all pages are claimed and touched now, so that no call lacks memory or waits for the kernel to clear
            pages. Default: False for a store, which claims pages as values fill it, and True for all else.

    Raises:
        ValueError: an option is out of its range.

    Examples:
        >>> ring = Ring(memory=MemoryOptions(numa_node=0, prefault=False))
    """

    huge_pages: bool | str = False
    numa_node: int | None = None
    numa_required: bool = False
    prefault: bool | None = None

    def __post_init__(self) -> None:
        if self.huge_pages not in (False, True, "require"):
            raise ValueError(f"expected huge_pages to be False, True or 'require', got {self.huge_pages!r}")
        if self.numa_node is not None:
            within("numa_node", self.numa_node, 0, 1023)


def short(name: str) -> str:
    """As much of a name as there is room for, cut between characters."""
    if not isinstance(name, str):
        raise TypeError(f"expected a name of type str, got {name!r}")
    if not name.isprintable():
        raise ValueError(f"expected a name of printable characters, got {name!r}")
    return name.encode()[: _native.MAX_NAME_NBYTES].decode(errors="ignore")


def create_segment(name: str, shape: dict[str, Any], memory: MemoryOptions, *, schema: bytes = b"") -> _native.Segment:
    """Creates a segment. `shape`: the content, with the names of the native core."""
    require_class("memory", memory, MemoryOptions)
    return _native.Segment.create(
        short(name),
        shape,
        huge_nbytes=HUGE_NBYTES if memory.huge_pages else 0,
        huge_required=memory.huge_pages == "require",
        numa_node=-1 if memory.numa_node is None else memory.numa_node,
        numa_required=memory.numa_required,
        prefault=memory.prefault is not False,
        schema=schema,
    )


class Descriptor:
    """A descriptor among the arguments of a process that is being started. There it is an object with `detach()`, which
    returns the number of the process's own duplicate."""

    def __init__(self, fd: int, owner: str) -> None:
        """`owner`: of the descriptor, for an error."""
        self.fd = fd
        self._owner = owner

    def __reduce__(self) -> tuple[Any, ...]:
        # Imported here: only processes that spawn with multiprocessing need the module.
        from multiprocessing import context, reduction

        if context.get_spawning_popen() is None:
            self.detach()
        return _as_it_is, (reduction.DupFd(self.fd),)

    def detach(self) -> int:
        """Raises TypeError: this process has the descriptor, and a copy of its owner would be another owner."""
        raise TypeError(f"{self._owner} can be pickled only while a process is being spawned: give others its ticket")


def _as_it_is(duplicate: Any) -> Any:
    return duplicate


class Shareable:
    """An object in a segment: reaches a child at spawn, and any other process by the ticket."""

    _segment: _native.Segment

    def __init__(self, segment: _native.Segment) -> None:
        self._segment = segment
        self._is_closed = False

    @property
    def name(self) -> str:
        return self._segment.name

    @property
    def segment_nbytes(self) -> int:
        """Bytes of memory that are claimed, control structures included."""
        return self._segment.claimed_nbytes

    @property
    def fd(self) -> int:
        """The descriptor: `subprocess.Popen(..., pass_fds=[x.fd])`, and there `penstock.attach(fd)`."""
        return self._segment.fd

    @property
    def ticket(self) -> Ticket:
        return Ticket(*self._segment.ticket())

    def __reduce__(self) -> tuple[Any, ...]:
        descriptor = Descriptor(self._segment.fd, f"{type(self).__name__} '{self.name}'")
        return _from_spawn, (type(self), descriptor, *self._state())

    def __repr__(self) -> str:
        return f"{type(self).__name__}('{self.name}'{', closed' if self._is_closed else ''})"

    def _state(self) -> tuple[Any, ...]:
        """Returns what another process needs besides the segment to build the same object."""
        return ()

    @classmethod
    def _of(cls: type[_T], segment: _native.Segment, *state: Any) -> _T:
        return cls(segment, *state)


def _from_spawn(cls: type[_T], duplicate: Any, *state: Any) -> _T:
    return cls._of(_native.Segment.adopt(duplicate.detach()), *state)


@contextlib.contextmanager
def attached_segment(where: Ticket | str | int) -> Iterator[_native.Segment]:
    """The segment of a ticket, or of a descriptor that was inherited. The descriptor is taken over when the block ends,
    and stays the caller's when the block raises."""
    if isinstance(where, int):
        yield _native.Segment.adopt(os.dup(where))
        os.close(where)
        return
    ticket = Ticket.parse(where) if isinstance(where, str) else where
    try:
        segment = _native.Segment.attach(*msgspec.structs.astuple(ticket))
    except TypeError:  # a number that no process, descriptor or segment can have
        raise LayoutMismatch(f"expected the ticket of a segment, got {ticket}") from None
    yield segment


class Segment(Shareable):
    """One shared mapping of plain bytes. For bytes that many lend and borrow: `Pool`. For records: a channel.

    Examples:
        >>> segment = Segment.create(5)
        >>> segment.view(writable=True)[:] = b"hello"
        >>> bytes(Segment.attach(segment.ticket).view())
        b'hello'
    """

    @classmethod
    def create(
        cls,
        nbytes: int,
        *,
        name: str = "",
        memory: MemoryOptions = MemoryOptions(),
    ) -> Segment:
        """Claims all pages now. Raises MemoryExhausted, with both numbers, if memory is short."""
        shape = {"kind": _native.SEGMENT, "raw_nbytes": fitting(nbytes, "a segment")}
        return cls(create_segment(name, shape, memory))

    @classmethod
    def attach(cls, where: Ticket | str | int) -> Segment:
        with attached_segment(where) as segment:
            if segment.kind != _native.SEGMENT:
                raise LayoutMismatch(
                    f"expected a plain segment, got '{segment.name}', which is a channel, pool or store"
                )
            return cls(segment)

    def view(self, *, writable: bool = False) -> memoryview:
        """The bytes. A view keeps the mapping alive; a read-only view lies in a read-only mapping."""
        return memoryview(self._segment.bytes(writable))  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        return len(self.view())

    @property
    def page_nbytes(self) -> int:
        return self._segment.page_nbytes

    @property
    def fallback(self) -> str:
        """Which wishes (huge pages, NUMA node) could not be met, and why; empty if all were."""
        return self._segment.fallback

    def close(self) -> None:
        """Closes this handle. Views keep the memory; without views, the memory is gone with the handle."""
        self._is_closed = True

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
