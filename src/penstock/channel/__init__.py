"""Channels: records from process to process, exactly once and in order, and errors that name the party at fault.

ring 1→1, broadcast 1→N, inbox N→1. Leaves to the codec what a record means.
"""

from penstock._native import EndGroup as EndGroup
from penstock._native import Receiver as ByteReceiver
from penstock._native import Reservation
from penstock._native import Sender as ByteSender
from penstock.channel.aio import AsyncReceiver, AsyncSender
from penstock.channel.channel import Channel, Latency, LongRecords, OnDeath
from penstock.channel.channels import Broadcast, Inbox, Ring
from penstock.channel.ends import Receiver, Sender
from penstock.channel.frame_ends import FrameReceiver, FrameSender

__all__ = [
    "AsyncReceiver",
    "AsyncSender",
    "Broadcast",
    "ByteReceiver",
    "ByteSender",
    "Channel",
    "EndGroup",
    "FrameReceiver",
    "FrameSender",
    "Inbox",
    "Latency",
    "LongRecords",
    "OnDeath",
    "Receiver",
    "Reservation",
    "Ring",
    "Sender",
]
