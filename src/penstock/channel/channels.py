"""The three shapes of channel: made in one process, handed to others, opened there as a Sender or a Receiver.

Leaves to the native core: everything that happens after an end is open.
"""

from __future__ import annotations

import os
import resource
from typing import Any, Literal

from penstock import _native
from penstock.channel.aio import AsyncReceiver, AsyncSender
from penstock.errors import ClosedError, LayoutMismatch
from penstock.memory.peers import Peer
from penstock.memory.segment import Shareable, Ticket, attached_segment, fitting, placement, short, within

Latency = Literal["eco", "auto", "spin"]
OnDeath = Literal["raise", "ignore"]

LANE_NBYTES = 1 << 20  # bench/channels: streaming gains nothing from more, and 2.6 KB records then wait 400 deep
INLINE_LIMIT = 64 << 10  # longer records go to the pool: from here on a view without a copy beats the ring
GRANULE_NBYTES = 1 << 20  # the pool claims pages in such pieces as it first needs them, and keeps them
GRANULES = 32768
SPILL_BLOCKS = 256  # records longer than INLINE_LIMIT that may be under way or held at once


class Channel(Shareable):
    """What is common to the three: a segment with lanes, cursors, and a pool for long records that grows on demand."""

    STYLE = 0

    @property
    def senders(self) -> int:
        return self._segment.lanes

    @property
    def receivers(self) -> int:
        return self._segment.receivers

    @property
    def schema(self) -> bytes:
        """What the messages of this channel are said to be; empty: it carries plain bytes."""
        return bytes(self._segment.schema)

    def _join(self, name: str) -> _native.Attachment:
        if self._is_closed:
            raise ClosedError(f"channel '{self.name}' is closed")
        return _native.Attachment(self._segment, short(name))

    def _sender(self, index: int | None, attachment: _native.Attachment) -> _native.Sender:
        if index is not None and not 0 <= index < self.senders:
            raise ValueError(f"'{self.name}' has {self.senders} senders: there is no sender {index}")
        return _native.Sender(attachment, -1 if index is None else index)

    def _receiver(self, index: int | None, attachment: _native.Attachment) -> _native.Receiver:
        if index is not None and not 0 <= index < self.receivers:
            raise ValueError(f"'{self.name}' has {self.receivers} receivers: there is no receiver {index}")
        return _native.Receiver(attachment, -1 if index is None else index)

    def sender(self, index: int | None = None, *, name: str = "") -> _native.Sender:
        """Becomes a sender of this channel, in this process: the one of this index, or the first that is free.

        `name` is what errors and `penstock inspect` call this process.
        """
        self._require_bytes()
        return self._sender(index, self._join(name))

    def receiver(self, index: int | None = None, *, name: str = "") -> _native.Receiver:
        """Becomes a receiver of this channel, in this process.

        Receivers are awaited from the start: what is sent before they come is kept for them. One that follows another
        that closed or died gets what is sent after it has come.
        """
        self._require_bytes()
        return self._receiver(index, self._join(name))

    def async_sender(self, index: int | None = None, *, name: str = "") -> AsyncSender:
        self._require_bytes()
        return self._async_sender(index, self._join(name))

    def async_receiver(self, index: int | None = None, *, name: str = "") -> AsyncReceiver:
        self._require_bytes()
        return self._async_receiver(index, self._join(name))

    def _async_sender(self, index: int | None, attachment: _native.Attachment) -> AsyncSender:
        return AsyncSender(self._sender(index, attachment), attachment)

    def _async_receiver(self, index: int | None, attachment: _native.Attachment) -> AsyncReceiver:
        return AsyncReceiver(self._receiver(index, attachment), attachment)

    def _require_bytes(self) -> None:
        if self.schema:
            raise LayoutMismatch(f"'{self.name}' carries messages: attach to it with messages=(…)")

    def snapshot(self) -> dict[str, Any]:
        """Everything the channel tells of itself, as `penstock inspect --json` prints it."""
        found: dict[str, Any] = _native.snapshot(os.dup(self._segment.fd))
        return found

    def trim(self, keep_nbytes: int = 0) -> int:
        """Gives the machine back what long records once needed and nothing lies in now, beyond `keep_nbytes`.

        Returns how many bytes that were.
        """
        return self._join("trim").trim(keep_nbytes)

    def peers(self) -> list[Peer]:
        return [Peer.of(native) for native in self.snapshot()["peers"]]

    def close(self) -> None:
        """Closes this handle. Ends that were opened stay open; they keep the segment alive."""
        self._is_closed = True

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Ring(Channel):
    """One sender, one receiver."""

    STYLE = 1


class Broadcast(Channel):
    """One sender, many receivers; each gets every record."""

    STYLE = 2


class Inbox(Channel):
    """Many senders, one receiver. In order for each sender; taken in turn among them."""

    STYLE = 3


def attach_channel(where: Ticket | str | int) -> Channel:
    """The channel of a ticket or of an inherited descriptor, as what it is."""
    with attached_segment(where) as segment:
        return channel_of(segment)


def channel_of(segment: _native.Segment) -> Channel:
    for cls in (Ring, Broadcast, Inbox):
        if segment.kind == 3 and segment.style == cls.STYLE:
            return cls(segment)
    raise LayoutMismatch(f"'{segment.name}' is not a channel")


def open_ring(name: str = "ring", **options: Any) -> Ring:
    """A channel from one process to one other. Options: see `open_broadcast`."""
    return Ring(_create(Ring.STYLE, name, 1, 1, **options))


def open_broadcast(receivers: int, name: str = "broadcast", **options: Any) -> Broadcast:
    """A channel from one process to `receivers` others, each of which gets every record.

    Options: see `penstock.open_broadcast`, which opens channels of messages too.
    """
    return Broadcast(_create(Broadcast.STYLE, name, 1, receivers, **options))


def open_inbox(senders: int, name: str = "inbox", **options: Any) -> Inbox:
    """A channel from up to `senders` processes at a time to one. Options: see `open_broadcast`."""
    return Inbox(_create(Inbox.STYLE, name, senders, 1, **options))


def _create(
    style: int,
    name: str,
    senders: int,
    receivers: int,
    *,
    capacity: int | None = None,
    inline_limit: int | None = None,
    spill_nbytes: int | None = None,
    spill_blocks: int = SPILL_BLOCKS,
    max_peers: int | None = None,
    latency: Latency = "auto",
    on_receiver_death: OnDeath = "raise",
    on_sender_death: OnDeath = "raise",
    huge_pages: bool | str = False,
    numa_node: int | None = None,
    numa_required: bool = False,
    prefault: bool = True,
    schema: bytes = b"",
) -> _native.Segment:
    if not 1 <= senders <= _native.MAX_SENDERS:
        raise ValueError(f"an inbox has 1 to {_native.MAX_SENDERS} senders, not {senders}")
    if not 1 <= receivers <= _native.MAX_RECEIVERS:
        raise ValueError(f"a broadcast has 1 to {_native.MAX_RECEIVERS} receivers, not {receivers}")
    within("spill_blocks", spill_blocks, 1, _native.MAX_BLOCKS)
    if max_peers is None:
        max_peers = min(senders + receivers + 14, _native.MAX_PEERS) // 2 * 2
    within("max_peers", max_peers, 1, _native.MAX_PEERS)
    if latency not in ("eco", "auto", "spin"):
        raise ValueError(f"latency is 'eco', 'auto' or 'spin', not {latency!r}")
    for word in (on_receiver_death, on_sender_death):
        if word not in ("raise", "ignore"):
            raise ValueError(f"on_…_death is 'raise' or 'ignore', not {word!r}")
    if capacity is None:
        capacity = LANE_NBYTES if style != Inbox.STYLE else LANE_NBYTES // 4
    within("capacity", capacity, 4096, 1 << 31)
    if capacity & (capacity - 1):
        raise ValueError(f"capacity is a power of two, not {capacity}")
    if inline_limit is None:
        inline_limit = min(INLINE_LIMIT, capacity // 4)
    within("inline_limit", inline_limit, 64, capacity // 4)
    if spill_nbytes is None:
        spill_nbytes = _spill_nbytes()
    fitting(spill_nbytes, "a channel's pool")
    granule = GRANULE_NBYTES
    while spill_nbytes > granule * GRANULES:
        granule *= 2
    shape = {
        "kind": 3,
        "style": style,
        "max_peers": max_peers,
        "max_blocks": spill_blocks,
        "lanes": senders,
        "receivers": receivers,
        "latency": ("eco", "auto", "spin").index(latency),
        "receiver_death": ("raise", "ignore").index(on_receiver_death),
        "sender_death": ("raise", "ignore").index(on_sender_death),
        "lane_nbytes": capacity,
        "inline_limit": inline_limit,
        "pool_nbytes": -(-spill_nbytes // 64) * 64,
        # Huge pages are claimed whole: such a pool does not grow.
        "granule_nbytes": granule if not huge_pages else 0,
    }
    return _native.Segment.create(
        short(name), shape, prefault=prefault, schema=schema, **placement(huge_pages, numa_node, numa_required)
    )


def _spill_nbytes() -> int:
    """As much as the machine has: addresses, not memory, are what this takes until a long record comes."""
    most = _native.total_memory()
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        most = min(most, max(soft // 16, 4 << 20))
    return most
