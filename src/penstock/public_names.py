"""The public names of the package `penstock`, which imports them at their first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

from penstock import _native
from penstock._native import Lease
from penstock.channel import AsyncReceiver, AsyncSender, Broadcast, EndGroup, Inbox, LongRecords, Receiver, Ring, Sender
from penstock.channel import Channel as _Channel
from penstock.channel.channels import channel_of as _channel_of
from penstock.codec import Buffer
from penstock.errors import (
    ChannelError,
    ClosedError,
    CorruptRecord,
    DeathCause,
    DecodeError,
    EndOfChannel,
    LayoutMismatch,
    MemoryExhausted,
    Missing,
    PeerDied,
    PenstockError,
    Timeout,
    UnsupportedTensor,
    WouldBlock,
)
from penstock.memory import MemoryOptions, Ticket
from penstock.memory import Pool as _Pool
from penstock.memory import Segment as _Segment
from penstock.memory.segment import attached_segment as _attached_segment
from penstock.tensor import Empty, Handle, Loan, Scope, Store, content_key

if TYPE_CHECKING:
    from typing_extensions import TypeForm

    from penstock.tensor.cuda import CudaPool

_T = TypeVar("_T")


@overload
def attach(where: Ticket | str | int) -> Any: ...
@overload
def attach(where: Ticket | str | int, type: TypeForm[_T]) -> _Channel[_T]: ...
def attach(where: Ticket | str | int, type: Any = bytes) -> _Channel[Any] | Store | _Pool | CudaPool | _Segment:
    """Attaches to a channel or a store of another process.

    Args:
        where: the ticket (`str(channel.ticket)`), for any process of the same user; or an inherited descriptor
            (`channel.fd`), which is taken over unless this raises.
        type: what the channel carries, as for `Ring`.

    Returns:
        A Ring, Broadcast, Inbox or Store; for tickets of `penstock.lowlevel`, a Pool, CudaPool or Segment.

    Raises:
        LayoutMismatch: the channel carries something else (the text says how they differ), or it is of another build,
            gone, or no channel.
        TypeError: no channel carries this type.

    Examples:
        >>> ring = Ring()
        >>> attach(str(ring.ticket)).open_sender().send(b"from another process")
        >>> ring.open_receiver().receive()
        b'from another process'
    """
    with _attached_segment(where) as segment:
        if segment.kind == _native.SEGMENT and type is bytes:
            return _Segment(segment)
        if segment.kind == _native.POOL and type is bytes:
            if segment.is_elsewhere:
                # Imported here: a process without a device does not load its driver. The import does not call it.
                from penstock.tensor.cuda import CudaPool

                return CudaPool(segment)
            return Store._of(segment) if segment.keeps else _Pool(segment)
        return _channel_of(segment, type)


__all__ = [
    "AsyncReceiver",
    "AsyncSender",
    "Broadcast",
    "Buffer",
    "ChannelError",
    "ClosedError",
    "CorruptRecord",
    "DeathCause",
    "DecodeError",
    "Empty",
    "EndGroup",
    "EndOfChannel",
    "Handle",
    "Inbox",
    "LayoutMismatch",
    "Lease",
    "Loan",
    "LongRecords",
    "MemoryExhausted",
    "MemoryOptions",
    "Missing",
    "PeerDied",
    "PenstockError",
    "Receiver",
    "Ring",
    "Scope",
    "Sender",
    "Store",
    "Ticket",
    "Timeout",
    "UnsupportedTensor",
    "WouldBlock",
    "attach",
    "content_key",
]
