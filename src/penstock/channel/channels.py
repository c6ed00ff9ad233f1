"""The three shapes of channel: ring 1→1, broadcast 1→N, inbox N→1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.channel.channel import Channel, Latency, LongRecords, OnDeath, T, create_channel
from penstock.codec.codecs import codec_for
from penstock.errors import LayoutMismatch
from penstock.memory import MemoryOptions

if TYPE_CHECKING:
    from typing_extensions import TypeForm


class Ring(Channel[T]):
    """One sender, one receiver.

    Args:
        type: what the channel carries: bytes; `Buffer`, received where it lies; a subclass of `msgspec.Struct` with
            `array_like=True`; or a union of such subclasses.
        name: of the channel, in errors and in `penstock inspect`. Names (also of processes, pools and stores) are cut
            at 31 bytes.
        capacity: bytes of each sender's ring (a power of two); a sender waits when the slowest receiver is a whole
            ring behind. At least 4096. Default: 1 MiB.
        latency: "auto" spins while that pays, "eco" never does, "spin" spins for 10 ms before it sleeps.
        on_receiver_death, on_sender_death: "raise" reports the death to the other side once, as PeerDied; "ignore" goes
            on with the remaining ends. Every call reports the last death: a sender without receivers gets PeerDied, and
            so does the receiver of a ring or broadcast; the receiver of an inbox gets EndOfChannel.
        max_peers: ends that may be open at a time, up to 128; each takes a place, also two of one process. Default:
            senders + receivers + 14, so that dead ends that are not yet reaped leave room for their successors.
        memory: where the memory lies, and when its pages are claimed.
        long_records: which records lie in the channel's pool, and how much memory that may take.

    Raises:
        TypeError: no channel carries this type.
        ValueError: an option is out of its range.
        MemoryExhausted: the machine has not so much memory left; the text has both numbers.

    Examples:
        >>> class Step(msgspec.Struct, array_like=True):
        ...     tokens: list[int]
        >>> ring = Ring(Step)
        >>> ring.open_sender().send(Step([1, 2, 3]))
        >>> ring.open_receiver().receive()
        Step(tokens=[1, 2, 3])
    """

    STYLE = _native.RING

    def __init__(
        self,
        type: TypeForm[T] = bytes,  # type: ignore[assignment]
        *,
        name: str = "ring",
        capacity: int | None = None,
        latency: Latency = "auto",
        on_receiver_death: OnDeath = "raise",
        on_sender_death: OnDeath = "raise",
        max_peers: int | None = None,
        memory: MemoryOptions = MemoryOptions(),
        long_records: LongRecords = LongRecords(),
    ) -> None:
        created = create_channel(
            self.STYLE,
            type,
            name=name,
            capacity=capacity,
            latency=latency,
            on_receiver_death=on_receiver_death,
            on_sender_death=on_sender_death,
            max_peers=max_peers,
            memory=memory,
            long_records=long_records,
        )
        super().__init__(*created)


class Broadcast(Channel[T]):
    """One sender, several receivers; each receiver gets every message.

    Args:
        receivers: how many receivers the channel has.

    The other Args and Raises are those of `Ring`.

    Examples:
        >>> steps = Broadcast(receivers=2)
        >>> steps.open_sender().send(b"step")
        >>> [steps.open_receiver(rank).receive() for rank in range(2)]
        [b'step', b'step']
    """

    STYLE = _native.BROADCAST

    def __init__(
        self,
        type: TypeForm[T] = bytes,  # type: ignore[assignment]
        *,
        receivers: int,
        name: str = "broadcast",
        capacity: int | None = None,
        latency: Latency = "auto",
        on_receiver_death: OnDeath = "raise",
        on_sender_death: OnDeath = "raise",
        max_peers: int | None = None,
        memory: MemoryOptions = MemoryOptions(),
        long_records: LongRecords = LongRecords(),
    ) -> None:
        created = create_channel(
            self.STYLE,
            type,
            receivers=receivers,
            name=name,
            capacity=capacity,
            latency=latency,
            on_receiver_death=on_receiver_death,
            on_sender_death=on_sender_death,
            max_peers=max_peers,
            memory=memory,
            long_records=long_records,
        )
        super().__init__(*created)


class Inbox(Channel[T]):
    """Several senders, one receiver: in order for each sender, and in turn among them.

    Args:
        senders: how many senders the channel has room for at a time. Its receiver gets EndOfChannel only when each of
            them has been opened, and has closed or died.
        capacity: as of `Ring`. Default: 256 KiB.

    The other Args and Raises are those of `Ring`.

    Examples:
        >>> inbox = Inbox(senders=2)
        >>> for index in range(2):
        ...     inbox.open_sender(index).send(b"from %d" % index)
        >>> receiver = inbox.open_receiver()
        >>> sorted(receiver.receive() for _ in range(2))
        [b'from 0', b'from 1']
    """

    STYLE = _native.INBOX

    def __init__(
        self,
        type: TypeForm[T] = bytes,  # type: ignore[assignment]
        *,
        senders: int,
        name: str = "inbox",
        capacity: int | None = None,
        latency: Latency = "auto",
        on_receiver_death: OnDeath = "raise",
        on_sender_death: OnDeath = "raise",
        max_peers: int | None = None,
        memory: MemoryOptions = MemoryOptions(),
        long_records: LongRecords = LongRecords(),
    ) -> None:
        created = create_channel(
            self.STYLE,
            type,
            senders=senders,
            name=name,
            capacity=capacity,
            latency=latency,
            on_receiver_death=on_receiver_death,
            on_sender_death=on_sender_death,
            max_peers=max_peers,
            memory=memory,
            long_records=long_records,
        )
        super().__init__(*created)


def channel_of(segment: _native.Segment, type: Any) -> Channel[Any]:
    for cls in STYLES:
        if segment.style == cls.STYLE:
            return cls._of(segment, codec_for(type))
    raise LayoutMismatch(f"expected a channel, got segment '{segment.name}', which is none")


STYLES: tuple[type[Channel[Any]], ...] = (Ring, Broadcast, Inbox)
