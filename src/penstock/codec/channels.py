"""The three shapes of channel, by what they carry: bytes, buffers, or messages of agreed classes.

Leaves to the catalogue what a message may hold, and to the segment's channel everything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Generic

from penstock import _native
from penstock.channel import AsyncReceiver, AsyncSender, Latency, OnDeath, Receiver, SegmentChannel, Sender
from penstock.channel.channels import SPILL_BLOCKS, create_segment
from penstock.codec.payload import Payload
from penstock.errors import LayoutMismatch

if TYPE_CHECKING:
    from typing_extensions import TypeForm, TypeVar

    T = TypeVar("T", default=bytes)
else:
    from typing import TypeVar

    T = TypeVar("T")


class Channel(SegmentChannel, Generic[T]):
    """What the three shapes share: opening ends, and a look at their state."""

    STYLE: ClassVar[int]

    def __init__(self, segment: _native.Segment, payload: Payload) -> None:
        super().__init__(segment)
        self._payload = payload

    @classmethod
    def _of(cls, segment: _native.Segment, *state: Any) -> Channel[T]:
        made = cls.__new__(cls)
        Channel.__init__(made, segment, *state)
        made._payload.require_same(segment)
        return made

    def _state(self) -> tuple[Any, ...]:
        return (self._payload,)

    def open_sender(self, index: int | None = None, *, name: str = "") -> Sender[T]:
        """Makes this process a sender of the channel.

        Where the sender's process has died and its memory is being released, waits for that, for 2 seconds at most.

        Args:
            index: which of the channel's senders; None for the first that is free.
            name: of this process, in errors and in `penstock inspect`.

        Raises:
            ValueError: the channel has no such sender, or a living process has it. In a ring or broadcast, a sender
                that has closed cannot be opened again. In an inbox it can.
            MemoryExhausted: `max_peers` ends are open.

        Examples:
            >>> ring = Ring(name="steps")
            >>> with ring.open_sender(name="scheduler") as sender:
            ...     sender.send(b"step")
        """
        end: Sender[T] = self._payload.sender(self._sender(index, self._join(name)))
        return end

    def open_receiver(self, index: int | None = None, *, name: str = "") -> Receiver[T]:
        """Makes this process a receiver of the channel.

        The channel waits for its first receivers: what is sent before they are open is kept for them. A receiver that
        takes the place of one that closed or died gets what is sent from then on. Where that process has died and its
        memory is being released, waits for that, for 2 seconds at most.

        Args:
            index: which of the channel's receivers; None for the first that is free.
            name: of this process, in errors and in `penstock inspect`.

        Raises:
            ValueError: the channel has no such receiver, or a living process has it.
            MemoryExhausted: `max_peers` ends are open.

        Examples:
            >>> ring = Ring()
            >>> ring.open_sender().send(b"before the receiver")
            >>> ring.open_receiver(name="worker").receive()
            b'before the receiver'
        """
        end: Receiver[T] = self._payload.receiver(self._receiver(index, self._join(name)))
        return end

    def open_async_sender(self, index: int | None = None, *, name: str = "") -> AsyncSender[T]:
        """Makes this process a sender of the channel, for asyncio. Args and Raises are those of `open_sender`.

        Examples:
            >>> async def main(ring):
            ...     async with ring.open_async_sender() as sender:
            ...         await sender.send(b"step")
            >>> asyncio.run(main(Ring()))
        """
        end: AsyncSender[T] = self._payload.async_sender(self._async_sender(index, self._join(name)))
        return end

    def open_async_receiver(self, index: int | None = None, *, name: str = "") -> AsyncReceiver[T]:
        """Makes this process a receiver of the channel, for asyncio. Args and Raises are those of `open_receiver`.

        Examples:
            >>> async def main(ring):
            ...     ring.open_sender().send(b"step")
            ...     async with ring.open_async_receiver() as receiver:
            ...         return await receiver.receive()
            >>> asyncio.run(main(Ring()))
            b'step'
        """
        end: AsyncReceiver[T] = self._payload.async_receiver(self._async_receiver(index, self._join(name)))
        return end


class Ring(Channel[T]):
    """One sender, one receiver.

    Args:
        type: what the channel carries: bytes; `Buffer`, received where it lies; a subclass of `msgspec.Struct` with
            `array_like=True`; or a union of such subclasses.
        name: of the channel, in errors and in `penstock inspect`. Names (also of processes, pools and stores) are cut
            at 31 bytes.
        capacity: bytes of each sender's ring (a power of two); a sender waits when the slowest receiver is so far
            behind. At least 4096. Default: 1 MiB.
        latency: "auto" spins while that pays, "eco" never does, "spin" spins for 10 ms before it sleeps.
        on_receiver_death, on_sender_death: "raise" reports the death to the other side once, as PeerDied; "ignore" goes
            on with the ends that are left. The last death is always reported, by every call: a sender without
            receivers gets PeerDied, and so does the receiver of a ring or broadcast; that of an inbox EndOfChannel.
        max_peers: ends that may be open at a time, up to 128; each takes a place, also two of one process. Default:
            senders + receivers + 14, so that dead ends that are not yet reaped leave room for their successors.
        inline_limit: longer records lie in the channel's pool, copied once for all receivers; 64 bytes to a quarter of
            `capacity`. Default: 64 KiB, or a quarter of `capacity` if that is less.
        spill_nbytes: bytes that the pool may grow to, claimed as they are needed. Default: the machine's memory.
        spill_blocks: records that may lie in the pool at a time, up to 65,536. Default: 256.
        huge_pages, numa_node, numa_required, prefault: placement of the memory. A wish that cannot be met is reported
            by `penstock inspect`.

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
        inline_limit: int | None = None,
        spill_nbytes: int | None = None,
        spill_blocks: int = SPILL_BLOCKS,
        huge_pages: bool | str = False,
        numa_node: int | None = None,
        numa_required: bool = False,
        prefault: bool = True,
    ) -> None:
        payload = Payload.of(type)
        segment = create_segment(
            self.STYLE,
            schema=payload.described(),
            name=name,
            capacity=capacity,
            latency=latency,
            on_receiver_death=on_receiver_death,
            on_sender_death=on_sender_death,
            max_peers=max_peers,
            inline_limit=inline_limit,
            spill_nbytes=spill_nbytes,
            spill_blocks=spill_blocks,
            huge_pages=huge_pages,
            numa_node=numa_node,
            numa_required=numa_required,
            prefault=prefault,
        )
        super().__init__(segment, payload)


class Broadcast(Channel[T]):
    """One sender, several receivers; each receiver gets every message.

    Args:
        type: what the channel carries: bytes; `Buffer`, received where it lies; a subclass of `msgspec.Struct` with
            `array_like=True`; or a union of such subclasses.
        receivers: how many receivers the channel has.
        name: of the channel, in errors and in `penstock inspect`.
        capacity: bytes of each sender's ring (a power of two); a sender waits when the slowest receiver is so far
            behind. At least 4096. Default: 1 MiB.
        latency: "auto" spins while that pays, "eco" never does, "spin" spins for 10 ms before it sleeps.
        on_receiver_death, on_sender_death: "raise" reports the death to the other side once, as PeerDied; "ignore" goes
            on with the ends that are left. The last death is always reported, by every call: a sender without
            receivers gets PeerDied, and so does the receiver of a ring or broadcast; that of an inbox EndOfChannel.
        max_peers: ends that may be open at a time, up to 128; each takes a place, also two of one process. Default:
            senders + receivers + 14, so that dead ends that are not yet reaped leave room for their successors.
        inline_limit: longer records lie in the channel's pool, copied once for all receivers; 64 bytes to a quarter of
            `capacity`. Default: 64 KiB, or a quarter of `capacity` if that is less.
        spill_nbytes: bytes that the pool may grow to, claimed as they are needed. Default: the machine's memory.
        spill_blocks: records that may lie in the pool at a time, up to 65,536. Default: 256.
        huge_pages, numa_node, numa_required, prefault: placement of the memory. A wish that cannot be met is reported
            by `penstock inspect`.

    Raises:
        TypeError: no channel carries this type.
        ValueError: an option is out of its range.
        MemoryExhausted: the machine has not so much memory left; the text has both numbers.

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
        inline_limit: int | None = None,
        spill_nbytes: int | None = None,
        spill_blocks: int = SPILL_BLOCKS,
        huge_pages: bool | str = False,
        numa_node: int | None = None,
        numa_required: bool = False,
        prefault: bool = True,
    ) -> None:
        payload = Payload.of(type)
        segment = create_segment(
            self.STYLE,
            schema=payload.described(),
            receivers=receivers,
            name=name,
            capacity=capacity,
            latency=latency,
            on_receiver_death=on_receiver_death,
            on_sender_death=on_sender_death,
            max_peers=max_peers,
            inline_limit=inline_limit,
            spill_nbytes=spill_nbytes,
            spill_blocks=spill_blocks,
            huge_pages=huge_pages,
            numa_node=numa_node,
            numa_required=numa_required,
            prefault=prefault,
        )
        super().__init__(segment, payload)


class Inbox(Channel[T]):
    """Several senders, one receiver: in order for each sender, and in turn among them.

    Args:
        type: what the channel carries: bytes; `Buffer`, received where it lies; a subclass of `msgspec.Struct` with
            `array_like=True`; or a union of such subclasses.
        senders: how many senders the channel has room for at a time. Its receiver gets EndOfChannel only when each of
            them has been opened, and has closed or died.
        name: of the channel, in errors and in `penstock inspect`.
        capacity: bytes of each sender's ring (a power of two); a sender waits when the slowest receiver is so far
            behind. At least 4096. Default: 256 KiB.
        latency: "auto" spins while that pays, "eco" never does, "spin" spins for 10 ms before it sleeps.
        on_receiver_death, on_sender_death: "raise" reports the death to the other side once, as PeerDied; "ignore" goes
            on with the ends that are left. The last death is always reported, by every call: a sender without
            receivers gets PeerDied, and so does the receiver of a ring or broadcast; that of an inbox EndOfChannel.
        max_peers: ends that may be open at a time, up to 128; each takes a place, also two of one process. Default:
            senders + receivers + 14, so that dead ends that are not yet reaped leave room for their successors.
        inline_limit: longer records lie in the channel's pool, copied once for all receivers; 64 bytes to a quarter of
            `capacity`. Default: 64 KiB, or a quarter of `capacity` if that is less.
        spill_nbytes: bytes that the pool may grow to, claimed as they are needed. Default: the machine's memory.
        spill_blocks: records that may lie in the pool at a time, up to 65,536. Default: 256.
        huge_pages, numa_node, numa_required, prefault: placement of the memory. A wish that cannot be met is reported
            by `penstock inspect`.

    Raises:
        TypeError: no channel carries this type.
        ValueError: an option is out of its range.
        MemoryExhausted: the machine has not so much memory left; the text has both numbers.

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
        inline_limit: int | None = None,
        spill_nbytes: int | None = None,
        spill_blocks: int = SPILL_BLOCKS,
        huge_pages: bool | str = False,
        numa_node: int | None = None,
        numa_required: bool = False,
        prefault: bool = True,
    ) -> None:
        payload = Payload.of(type)
        segment = create_segment(
            self.STYLE,
            schema=payload.described(),
            senders=senders,
            name=name,
            capacity=capacity,
            latency=latency,
            on_receiver_death=on_receiver_death,
            on_sender_death=on_sender_death,
            max_peers=max_peers,
            inline_limit=inline_limit,
            spill_nbytes=spill_nbytes,
            spill_blocks=spill_blocks,
            huge_pages=huge_pages,
            numa_node=numa_node,
            numa_required=numa_required,
            prefault=prefault,
        )
        super().__init__(segment, payload)


def channel_of(segment: _native.Segment, type: Any) -> Channel[Any]:
    for cls in STYLES:
        if segment.style == cls.STYLE:
            return cls._of(segment, Payload.of(type))
    raise LayoutMismatch(f"'{segment.name}' is not a channel")


STYLES: tuple[type[Channel[Any]], ...] = (Ring, Broadcast, Inbox)
