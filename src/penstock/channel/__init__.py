"""Channels: records from process to process, exactly once and in order, and errors that name the party at fault.

ring 1→1, broadcast 1→N, inbox N→1. Leaves to the codec what a record means.
"""

from penstock._native import Receiver, Reservation, Sender
from penstock.channel.aio import AsyncReceiver, AsyncSender
from penstock.channel.channels import (
    Broadcast,
    Channel,
    Inbox,
    Ring,
    open_broadcast,
    open_inbox,
    open_ring,
)

__all__ = [
    "AsyncReceiver",
    "AsyncSender",
    "Broadcast",
    "Channel",
    "Inbox",
    "Receiver",
    "Reservation",
    "Ring",
    "Sender",
    "open_broadcast",
    "open_inbox",
    "open_ring",
]
