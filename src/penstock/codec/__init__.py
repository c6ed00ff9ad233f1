"""Messages: typed objects to frames and back, and changes in sequence.

Messages are msgspec structs, encoded as arrays; nothing that could be executed crosses a process boundary. Leaves to
the channel how frames travel, and to those above the line what messages there are.
"""

from penstock.codec.catalogue import Catalogue, Schema
from penstock.codec.channels import MessageChannel
from penstock.codec.ends import AsyncMessageReceiver, AsyncMessageSender, MessageReceiver, MessageSender
from penstock.codec.frame import FrameDecoder, FrameEncoder
from penstock.codec.opening import open_broadcast, open_inbox, open_ring
from penstock.codec.part import Part

__all__ = [
    "AsyncMessageReceiver",
    "AsyncMessageSender",
    "Catalogue",
    "FrameDecoder",
    "FrameEncoder",
    "MessageChannel",
    "MessageReceiver",
    "MessageSender",
    "Part",
    "Schema",
    "open_broadcast",
    "open_inbox",
    "open_ring",
]
