"""Channels: records from process to process, exactly once and in order, and errors that name the party at fault.

ring 1→1, broadcast 1→N, inbox N→1. Leaves to the codec what a record means.
"""

from penstock._native import Receiver as ByteReceiver
from penstock._native import Reservation
from penstock._native import Sender as ByteSender
from penstock.channel import unhandled_exception as unhandled_exception
from penstock.channel.aio import AsyncByteReceiver, AsyncByteSender
from penstock.channel.channels import Latency, OnDeath, SegmentChannel, create_segment
from penstock.channel.ends import AsyncReceiver, AsyncSender, Receiver, Sender

__all__ = [
    "AsyncByteReceiver",
    "AsyncByteSender",
    "AsyncReceiver",
    "AsyncSender",
    "ByteReceiver",
    "ByteSender",
    "Latency",
    "OnDeath",
    "Receiver",
    "Reservation",
    "SegmentChannel",
    "Sender",
    "create_segment",
]
