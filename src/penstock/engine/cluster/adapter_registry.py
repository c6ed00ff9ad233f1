"""The LoRA adapters of a server, in memory that all processes share and that outlives each process.

A server process writes the next version before engines load an adapter, when all engines have loaded the adapter, and
before engines unload an adapter. Engines load the adapters of the registry at their start.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from penstock.engine.cluster.kept_memory import MemoryFile
from penstock.engine.protocol.lora import Adapter

HEADER = struct.Struct("<QQ")  # version, and bytes of the content
CONTENT_AT, MAX_NBYTES = 4096, 1 << 21  # two versions are there: readers of a version are done before the next but one
MAX_UNLOADED = 64  # of which names are known, for requests that still have them


class AdapterList(msgspec.Struct, frozen=True):
    adapters: tuple[Adapter, ...]
    unloaded: tuple[Adapter, ...] = ()  # the last ones
    unsettled: tuple[Adapter, ...] = ()  # a change has not ended: some engines may have these adapters, others not

    def with_unsettled(self, *adapters: Adapter) -> AdapterList:
        """Returns the list with adapters that engines begin to load, or to unload."""
        digests = {adapter.digest for adapter in adapters}
        others = (other for other in self.unsettled if other.digest not in digests)
        return replace(self, unsettled=(*others, *adapters))

    def with_named(self, adapter: Adapter) -> AdapterList:
        """Returns the list with an adapter, in place of the one with the same name."""
        others = tuple(other for other in self.adapters if other.name != adapter.name)
        former = tuple(other for other in self.adapters if other.name == adapter.name)
        adapters = AdapterList((*others, adapter), self._with_unloaded(former, adapter.digest), self.unsettled)
        return adapters.with_unsettled(adapter, *former)

    def without(self, adapter: Adapter) -> AdapterList:
        others = tuple(other for other in self.adapters if other.name != adapter.name)
        return AdapterList(others, self._with_unloaded((adapter,), b""), self.unsettled).with_unsettled(adapter)

    def _with_unloaded(self, adapters: Sequence[Adapter], loaded: bytes) -> tuple[Adapter, ...]:
        unloaded = (*self.unloaded, *adapters)
        return tuple(adapter for adapter in unloaded if adapter.digest != loaded)[-MAX_UNLOADED:]


class AdapterRegistry(MemoryFile):
    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._header = b""
        self._list = AdapterList(())

    @classmethod
    def of(cls, adapters: Sequence[Adapter]) -> AdapterRegistry:
        """Creates a registry. Raises OSError."""
        registry = cls.create("adapters", "server")
        registry.write(AdapterList(tuple(adapters)))
        return registry

    def read(self) -> AdapterList:
        while (header := os.pread(self._fd, HEADER.size, 0)) != self._header:
            version, nbytes = HEADER.unpack(header)
            content = os.pread(self._fd, nbytes, _begin_of(version))
            if os.pread(self._fd, HEADER.size, 0) == header:
                self._list = msgspec.msgpack.decode(content, type=AdapterList)
                self._header = header
        return self._list

    def require_room(self, adapters: AdapterList, former: Adapter | None) -> None:
        """Raises ValueError unless there is room for a list, also if `former` comes back later."""
        _encoded(adapters if former is None else replace(adapters, adapters=(*adapters.adapters, former)))

    def write(self, adapters: AdapterList) -> None:
        """Writes the next version, with fewer `unloaded` if room is short. The caller has the lock. Raises ValueError
        and OSError."""
        content = _encoded(adapters)
        version, _ = HEADER.unpack(os.pread(self._fd, HEADER.size, 0).ljust(HEADER.size, b"\0"))
        os.pwrite(self._fd, content, _begin_of(version + 1))
        os.pwrite(self._fd, HEADER.pack(version + 1, len(content)), 0)  # a reader sees all of it, or nothing


def _encoded(adapters: AdapterList) -> bytes:
    """Raises ValueError."""
    content = msgspec.msgpack.encode(adapters)
    while len(content) > MAX_NBYTES and adapters.unloaded:
        adapters = replace(adapters, unloaded=adapters.unloaded[1:])
        content = msgspec.msgpack.encode(adapters)
    if len(content) > MAX_NBYTES:
        raise ValueError(f"expected names and paths of adapters of at most {MAX_NBYTES} bytes, got {len(content)}")
    return content


def _begin_of(version: int) -> int:
    return CONTENT_AT + version % 2 * MAX_NBYTES
