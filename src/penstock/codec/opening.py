"""Opening channels, of bytes or of messages: what `penstock` itself hands out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

from penstock.channel import Broadcast, Channel, Inbox, Ring
from penstock.channel import open_broadcast as _open_broadcast
from penstock.channel import open_inbox as _open_inbox
from penstock.channel import open_ring as _open_ring
from penstock.codec.catalogue import Catalogue
from penstock.codec.channels import MessageChannel, Messages, classes_of

MAX_DESCRIBED = 1 << 20  # layout.h: schema_nbytes


@overload
def open_ring(name: str = ..., *, messages: None = ..., **options: Any) -> Ring: ...
@overload
def open_ring(name: str = ..., *, messages: Messages, **options: Any) -> MessageChannel: ...
def open_ring(name: str = "ring", *, messages: Messages | None = None, **options: Any) -> Ring | MessageChannel:
    """A channel from one process to one other. Options: see `open_broadcast`."""
    if messages is None:
        return _open_ring(name, **options)
    return _carrying(messages, _open_ring, name, **options)


@overload
def open_broadcast(receivers: int, name: str = ..., *, messages: None = ..., **options: Any) -> Broadcast: ...
@overload
def open_broadcast(receivers: int, name: str = ..., *, messages: Messages, **options: Any) -> MessageChannel: ...
def open_broadcast(
    receivers: int, name: str = "broadcast", *, messages: Messages | None = None, **options: Any
) -> Broadcast | MessageChannel:
    """A channel from one process to `receivers` others, each of which gets every record, or message.

    Options:

        messages      classes of messages (`msgspec.Struct`, array_like=True): the ends take and give these
                      instead of bytes
        capacity      bytes of the ring (a power of two); the sender waits when the slowest receiver is that
                      far behind
        inline_limit  records longer than this go to the pool by themselves, one copy for all receivers
        spill_nbytes  most that may lie in the pool at once; claimed as it is needed (default: the machine's
                      memory)
        latency       "auto" spins while that pays, "eco" never does, "spin" does for 10 ms before it sleeps
        on_receiver_death, on_sender_death
                      "raise": each end of the other side gets PeerDied, once; "ignore": these go on with
                      the ends that are left (an error is raised if none is left)
        huge_pages, numa_node, numa_required
                      wishes about the memory; `fallback` of the segment says if they could not be met
    """
    if messages is None:
        return _open_broadcast(receivers, name, **options)
    return _carrying(messages, _open_broadcast, receivers, name, **options)


@overload
def open_inbox(senders: int, name: str = ..., *, messages: None = ..., **options: Any) -> Inbox: ...
@overload
def open_inbox(senders: int, name: str = ..., *, messages: Messages, **options: Any) -> MessageChannel: ...
def open_inbox(
    senders: int, name: str = "inbox", *, messages: Messages | None = None, **options: Any
) -> Inbox | MessageChannel:
    """A channel from up to `senders` processes at a time to one. Options: see `open_broadcast`."""
    if messages is None:
        return _open_inbox(senders, name, **options)
    return _carrying(messages, _open_inbox, senders, name, **options)


def _carrying(messages: Messages, open_channel: Callable[..., Channel], *place: Any, **options: Any) -> MessageChannel:
    messages = classes_of(messages)
    described = Catalogue(*messages).schema.encode()
    if len(described) > MAX_DESCRIBED:
        raise ValueError(
            f"the description of these {len(messages)} classes takes {len(described):,} bytes; a channel has room for "
            f"{MAX_DESCRIBED:,}: give them fewer fields, or shorter names"
        )
    return MessageChannel(open_channel(*place, schema=described, **options), messages)
