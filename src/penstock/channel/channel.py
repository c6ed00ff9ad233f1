"""What the three shapes of channel have in common: a segment with lanes, cursors, and a pool for long records.

Leaves to the native core: everything that happens after an end is open. Leaves to the codec what a record means.
"""

from __future__ import annotations

import atexit
import os
import resource
import sys
import time
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, cast

import msgspec

from penstock import _native
from penstock.channel.aio import AsyncReceiver, AsyncSender
from penstock.channel.ends import Receiver, Sender, format_repr
from penstock.codec.codecs import BytesCodec, Codec, codec_for
from penstock.errors import ClosedError, Timeout
from penstock.memory.peers import Peer
from penstock.memory.segment import (
    MemoryOptions,
    Shareable,
    create_segment,
    fitting,
    granule_nbytes,
    require_class,
    short,
    within,
)

if TYPE_CHECKING:
    from typing_extensions import Self, TypeVar

    T = TypeVar("T", default=bytes)
else:
    from typing import TypeVar

    T = TypeVar("T")

Latency = Literal["eco", "auto", "spin"]
OnDeath = Literal["raise", "ignore"]

LANE_NBYTES = 1 << 20  # bench/channels: streaming gains nothing from more, and 2.6 KB records then wait 400 deep
INLINE_LIMIT = 64 << 10  # longer records go to the pool: from here on a view without a copy beats the ring
MAX_POLL_S = 0.02  # between two looks at the receivers that are still missing


class Channel(Shareable, Generic[T]):
    """What the three shapes share: opening ends, and a look at their state."""

    STYLE: ClassVar[int]

    def __init__(self, segment: _native.Segment, codec: Codec) -> None:
        super().__init__(segment)
        self._codec = codec
        self._carries_bytes = type(codec) is BytesCodec

    @classmethod
    def _of(cls, segment: _native.Segment, *state: Any) -> Channel[T]:
        channel = cls.__new__(cls)
        Channel.__init__(channel, segment, *state)
        channel._codec.require_same(bytes(segment.schema), segment.name)
        return channel

    def _state(self) -> tuple[Any, ...]:
        return (self._codec,)

    def __repr__(self) -> str:
        return format_repr(self, f"'{self.name}'", self._codec, self._is_closed)

    @property
    def senders(self) -> int:
        """How many senders the channel has room for."""
        return self._segment.lanes

    @property
    def receivers(self) -> int:
        """How many receivers the channel has."""
        return self._segment.receivers

    @property
    def schema(self) -> bytes:
        """The description of the channel's messages, as it lies in its segment; empty: it carries bytes."""
        return bytes(self._segment.schema)

    def _join(self, name: str, group: _native.EndGroup | None = None) -> _native.Attachment:
        if self._is_closed:
            raise ClosedError(f"channel '{self.name}' is closed")
        # What is registered last runs first: before multiprocessing awaits the children, which may wait for this end.
        if "multiprocessing" in sys.modules:
            import multiprocessing.util  # noqa: F401, registers that
        atexit.unregister(_fail_open_ends)
        atexit.register(_fail_open_ends)
        return _native.Attachment(self._segment, short(name), group)

    def _sender(self, index: int | None, attachment: _native.Attachment) -> _native.Sender:
        if index is not None and not 0 <= index < self.senders:
            raise ValueError(f"expected a sender of '{self.name}' from 0 to {self.senders - 1}, got {index}")
        return _native.Sender(attachment, -1 if index is None else index)

    def _receiver(self, index: int | None, attachment: _native.Attachment) -> _native.Receiver:
        if index is not None and not 0 <= index < self.receivers:
            raise ValueError(f"expected a receiver of '{self.name}' from 0 to {self.receivers - 1}, got {index}")
        return _native.Receiver(attachment, -1 if index is None else index)

    def open_sender(
        self, index: int | None = None, *, name: str = "", group: _native.EndGroup | None = None
    ) -> Sender[T]:
        """Makes this process a sender of the channel.

        Waits up to 2 seconds while the memory of a dead predecessor is being released.

        Args:
            index: which of the channel's senders; None for the first that is free.
            name: of this process, in errors and in `penstock inspect`.
            group: a death in a channel of one of the group's ends ends the waits of all of them.

        Raises:
            ValueError: the channel has no such sender, or a living process has it. In a ring or broadcast, a sender
                that has closed cannot be opened again. In an inbox it can.
            MemoryExhausted: `max_peers` ends are open.

        Examples:
            >>> ring = Ring(name="steps")
            >>> with ring.open_sender(name="scheduler") as sender:
            ...     sender.send(b"step")
        """
        end = self._sender(index, self._join(name, group))
        return cast("Sender[T]", end) if self._carries_bytes else Sender(end, self._codec)

    def open_receiver(
        self, index: int | None = None, *, name: str = "", group: _native.EndGroup | None = None
    ) -> Receiver[T]:
        """Makes this process a receiver of the channel.

        The channel keeps messages for its first receivers until they open. A receiver in the place of a closed or
        dead receiver gets later messages only. Waits up to 2 seconds while the memory of a dead predecessor is being
        released.

        Args:
            index: which of the channel's receivers; None for the first that is free.
            name: of this process, in errors and in `penstock inspect`.
            group: a death in a channel of one of the group's ends ends the waits of all of them.

        Raises:
            ValueError: the channel has no such receiver, or a living process has it.
            MemoryExhausted: `max_peers` ends are open.

        Examples:
            >>> ring = Ring()
            >>> ring.open_sender().send(b"before the receiver")
            >>> ring.open_receiver(name="worker").receive()
            b'before the receiver'
        """
        end = self._receiver(index, self._join(name, group))
        return cast("Receiver[T]", end) if self._carries_bytes else Receiver(end, self._codec)

    def open_async_sender(
        self, index: int | None = None, *, name: str = "", group: _native.EndGroup | None = None
    ) -> AsyncSender[T]:
        """Makes this process a sender of the channel, for asyncio. Args and Raises are those of `open_sender`.

        Examples:
            >>> async def main(ring):
            ...     async with ring.open_async_sender() as sender:
            ...         await sender.send(b"step")
            >>> asyncio.run(main(Ring()))
        """
        attachment = self._join(name, group)
        attachment.bell_fd()  # before the end is claimed, which could not be opened a second time
        return AsyncSender(self._sender(index, attachment), self._codec, attachment)

    def open_async_receiver(
        self, index: int | None = None, *, name: str = "", group: _native.EndGroup | None = None
    ) -> AsyncReceiver[T]:
        """Makes this process a receiver of the channel, for asyncio. Args and Raises are those of `open_receiver`.

        Examples:
            >>> async def main(ring):
            ...     ring.open_sender().send(b"step")
            ...     async with ring.open_async_receiver() as receiver:
            ...         return await receiver.receive()
            >>> asyncio.run(main(Ring()))
            b'step'
        """
        attachment = self._join(name, group)
        attachment.bell_fd()  # before the end is claimed, which could not be opened a second time
        return AsyncReceiver(self._receiver(index, attachment), self._codec, attachment)

    def wait_for_receivers(self, timeout: float | None = None) -> None:
        """Waits until each of the channel's receivers has been opened. Nothing has to wait for them: what is sent
        before a receiver is open is kept for it.

        Args:
            timeout: seconds to wait; None for as long as it takes.

        Raises:
            Timeout: some receivers were not opened in time; the text has their indices.

        Examples:
            >>> ring = Ring()
            >>> receiver = ring.open_receiver()
            >>> ring.wait_for_receivers(timeout=1)
        """
        began = time.monotonic()
        pause = MAX_POLL_S / 64
        while missing := [end["index"] for end in self.snapshot()["receivers"] if end["state"] == "expected"]:
            if timeout is not None and time.monotonic() - began >= timeout:
                raise Timeout(
                    f"of the {self.receivers} receivers of '{self.name}', {missing} were not opened in {timeout:g} s"
                )
            time.sleep(pause)
            pause = min(2 * pause, MAX_POLL_S)

    def snapshot(self) -> dict[str, Any]:
        """Returns the state of the channel and of all its ends, as `penstock inspect --json` prints it."""
        state: dict[str, Any] = _native.snapshot(os.dup(self._segment.fd))
        return state

    def trim(self, keep_nbytes: int = 0) -> int:
        """Gives unused pages of the pool for long records back to the system. Returns how many bytes that were.

        Args:
            keep_nbytes: of the unused pages, to be kept.
        """
        return self._join("trim").trim(keep_nbytes)

    def peers(self) -> list[Peer]:
        """Returns the processes that have joined the channel."""
        return [Peer.of(native) for native in self.snapshot()["peers"]]

    def close(self) -> None:
        """Closes this handle. Ends that were opened stay open; they keep the segment alive."""
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _fail_open_ends() -> None:
    """Tells the other side of each open end which exception ends this process: the interpreter has noted an unhandled
    exception before. In an interactive session, any exception."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is not None and not hasattr(sys, "ps1"):
        _native.fail_open_ends(error)


class LongRecords(msgspec.Struct, frozen=True, kw_only=True):
    """The records of a channel that do not lie in its rings: they lie in its pool, copied once for all receivers.

    Args:
        inline_limit: records of more bytes lie in the pool; 64 bytes to a quarter of the channel's `capacity`. Default:
            64 KiB, or a quarter of `capacity` if that is less.
        pool_nbytes: bytes that the pool may grow to, claimed as they are needed. Default: the machine's memory.
        max_records: records that may lie in the pool at a time, up to 65,536. Default: 256.

    Raises:
        ValueError: an option is out of its range.

    Examples:
        >>> ring = Ring(long_records=LongRecords(inline_limit=1024, pool_nbytes=64 << 20))
    """

    inline_limit: int | None = None
    pool_nbytes: int | None = None
    max_records: int = 256

    def __post_init__(self) -> None:
        within("max_records", self.max_records, 1, _native.MAX_BLOCKS)


def create_channel(
    style: int,
    type: Any,
    *,
    name: str,
    senders: int = 1,
    receivers: int = 1,
    capacity: int | None,
    latency: Latency,
    on_receiver_death: OnDeath,
    on_sender_death: OnDeath,
    max_peers: int | None,
    memory: MemoryOptions,
    long_records: LongRecords,
) -> tuple[_native.Segment, Codec]:
    """Creates the segment and the codec of a channel. The classes of channel/channels.py document the options."""
    codec = codec_for(type)
    schema = codec.schema()
    within("senders", senders, 1, _native.MAX_SENDERS)
    within("receivers", receivers, 1, _native.MAX_RECEIVERS)
    if max_peers is None:
        max_peers = min(senders + receivers + 14, _native.MAX_PEERS) // 2 * 2
    within("max_peers", max_peers, 1, _native.MAX_PEERS)
    if latency not in ("eco", "auto", "spin"):
        raise ValueError(f"expected latency to be 'eco', 'auto' or 'spin', got {latency!r}")
    for option, value in (("on_receiver_death", on_receiver_death), ("on_sender_death", on_sender_death)):
        if value not in ("raise", "ignore"):
            raise ValueError(f"expected {option} to be 'raise' or 'ignore', got {value!r}")
    if capacity is None:
        capacity = LANE_NBYTES if style != _native.INBOX else LANE_NBYTES // 4
    within("capacity", capacity, 4096, 1 << 31)
    if capacity & (capacity - 1):
        raise ValueError(f"expected capacity to be a power of two, got {capacity}")
    require_class("memory", memory, MemoryOptions)
    require_class("long_records", long_records, LongRecords)
    inline_limit = long_records.inline_limit
    if inline_limit is None:
        inline_limit = min(INLINE_LIMIT, capacity // 4)
    within("inline_limit", inline_limit, 64, capacity // 4)
    pool_nbytes = machine_nbytes() if long_records.pool_nbytes is None else long_records.pool_nbytes
    fitting(pool_nbytes, "a channel's pool")
    fields = {
        "kind": _native.CHANNEL,
        "style": style,
        "max_peers": max_peers,
        "max_blocks": long_records.max_records,
        "lanes": senders,
        "receivers": receivers,
        "latency": ("eco", "auto", "spin").index(latency),
        "receiver_death": ("raise", "ignore").index(on_receiver_death),
        "sender_death": ("raise", "ignore").index(on_sender_death),
        "lane_nbytes": capacity,
        "inline_limit": inline_limit,
        "pool_nbytes": -(-pool_nbytes // 64) * 64,
        # Huge pages are claimed whole: such a pool does not grow.
        "granule_nbytes": 0 if memory.huge_pages else granule_nbytes(pool_nbytes),
    }
    return create_segment(name, fields, memory, schema=schema), codec


def machine_nbytes() -> int:
    """Returns as much as the machine has: a pool takes addresses, and memory only for the long records that come."""
    most = _native.total_memory()
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        most = min(most, max(soft // 16, 4 << 20))
    return most
