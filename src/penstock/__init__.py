"""Penstock: the data plane between the processes of an inference engine, through shared memory."""

from __future__ import annotations

from importlib.metadata import version as _version
from typing import TYPE_CHECKING, overload

from penstock._native import Lease, Receiver, Reservation, Sender
from penstock.channel import AsyncReceiver, AsyncSender, Broadcast, Channel, Inbox, Ring
from penstock.channel.channels import channel_of as _channel_of
from penstock.codec import (
    AsyncMessageReceiver,
    AsyncMessageSender,
    MessageChannel,
    MessageReceiver,
    MessageSender,
    Part,
    open_broadcast,
    open_inbox,
    open_ring,
)
from penstock.codec.channels import Messages as _Messages
from penstock.errors import (
    ChannelError,
    ClosedError,
    CorruptRecord,
    DecodeError,
    EndOfChannel,
    LayoutMismatch,
    MemoryExhausted,
    Missing,
    OutOfStep,
    PeerDied,
    PenstockError,
    StaleRef,
    Timeout,
    WouldBlock,
)
from penstock.memory import Holder, Peer, Pool, PoolStats, Ref, Segment, Ticket
from penstock.memory.segment import attached_segment as _attached_segment
from penstock.tensor import (
    Empty,
    Incoming,
    Item,
    Making,
    Outgoing,
    Scope,
    Store,
    Stored,
    TensorRef,
    Tensors,
    UnsupportedTensor,
    key_of,
)

if TYPE_CHECKING:
    from penstock.tensor.cuda import CudaPool

__version__ = _version("penstock")


@overload
def attach(where: Ticket | str | int) -> Channel | Pool | CudaPool | Segment: ...
@overload
def attach(where: Ticket | str | int, *, messages: _Messages) -> MessageChannel: ...
def attach(
    where: Ticket | str | int, *, messages: _Messages | None = None
) -> Channel | MessageChannel | Pool | CudaPool | Segment:
    """What a ticket, or an inherited descriptor (which is taken over, unless it is refused), leads to: a channel, a
    pool (perhaps of device memory) or a segment.

    messages: the classes that the channel carries. Raises LayoutMismatch, which says how they differ, if it carries
    others.
    """
    with _attached_segment(where) as segment:
        if messages is not None:
            return MessageChannel(_channel_of(segment), messages)
        if segment.kind == 1:
            return Segment(segment)
        if segment.kind == 2:
            if segment.is_elsewhere:
                # Imported here: a process without a device does not load its driver. The import does not call it.
                from penstock.tensor.cuda import CudaPool

                return CudaPool(segment)
            return Store(segment) if segment.keeps else Pool(segment)
        return _channel_of(segment)


__all__ = [
    "AsyncMessageReceiver",
    "AsyncMessageSender",
    "AsyncReceiver",
    "AsyncSender",
    "Broadcast",
    "Channel",
    "ChannelError",
    "ClosedError",
    "CorruptRecord",
    "DecodeError",
    "Empty",
    "EndOfChannel",
    "Holder",
    "Inbox",
    "Incoming",
    "Item",
    "LayoutMismatch",
    "Lease",
    "Making",
    "MemoryExhausted",
    "MessageChannel",
    "MessageReceiver",
    "MessageSender",
    "Missing",
    "OutOfStep",
    "Outgoing",
    "Part",
    "Peer",
    "PeerDied",
    "PenstockError",
    "Pool",
    "PoolStats",
    "Receiver",
    "Ref",
    "Reservation",
    "Ring",
    "Scope",
    "Segment",
    "Sender",
    "StaleRef",
    "Store",
    "Stored",
    "TensorRef",
    "Tensors",
    "Ticket",
    "Timeout",
    "UnsupportedTensor",
    "WouldBlock",
    "__version__",
    "attach",
    "key_of",
    "open_broadcast",
    "open_inbox",
    "open_ring",
]
