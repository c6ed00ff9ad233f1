"""Channels of messages: the three shapes of channel, and the handshake about what they carry.

Leaves to the channel everything but what its records mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from penstock.channel import Channel
from penstock.codec.catalogue import Catalogue, Schema
from penstock.codec.ends import AsyncMessageReceiver, AsyncMessageSender, MessageReceiver, MessageSender
from penstock.errors import LayoutMismatch
from penstock.memory.peers import Peer
from penstock.memory.segment import Ticket

Messages = tuple[type[msgspec.Struct], ...]


def classes_of(messages: Any) -> Messages:
    """What was given as `messages=`, as a tuple. Raises TypeError."""
    if isinstance(messages, type):
        raise TypeError(f"messages is a tuple of classes: messages=({messages.__name__},)")
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Iterable):
        raise TypeError(f"messages is a tuple of classes, not {messages!r}")
    return tuple(messages)


class MessageChannel:
    """A ring, broadcast or inbox that carries messages of the agreed classes."""

    def __init__(self, channel: Channel, messages: Messages) -> None:
        """Raises LayoutMismatch, which says how they differ, where the channel carries something else."""
        messages = classes_of(messages)
        self.catalogue = Catalogue(*messages)
        described = channel.schema
        if not described:
            raise LayoutMismatch(f"'{channel.name}' carries plain bytes: attach to it without messages")
        self.catalogue.require_same(Schema.decode(described), channel.name)
        self._channel = channel
        self._messages = messages

    def sender(self, index: int | None = None, *, name: str = "") -> MessageSender:
        """Becomes a sender of this channel, as `Channel.sender` does."""
        return MessageSender(self._channel._sender(index, self._channel._join(name)), self.catalogue)

    def receiver(self, index: int | None = None, *, name: str = "") -> MessageReceiver:
        """Becomes a receiver of this channel, as `Channel.receiver` does."""
        return MessageReceiver(self._channel._receiver(index, self._channel._join(name)), self.catalogue)

    def async_sender(self, index: int | None = None, *, name: str = "") -> AsyncMessageSender:
        return AsyncMessageSender(self._channel._async_sender(index, self._channel._join(name)), self.catalogue)

    def async_receiver(self, index: int | None = None, *, name: str = "") -> AsyncMessageReceiver:
        return AsyncMessageReceiver(self._channel._async_receiver(index, self._channel._join(name)), self.catalogue)

    # ── what it shares with every channel ──
    @property
    def name(self) -> str:
        return self._channel.name

    @property
    def senders(self) -> int:
        return self._channel.senders

    @property
    def receivers(self) -> int:
        return self._channel.receivers

    @property
    def fd(self) -> int:
        return self._channel.fd

    @property
    def ticket(self) -> Ticket:
        return self._channel.ticket

    @property
    def segment_nbytes(self) -> int:
        return self._channel.segment_nbytes

    def snapshot(self) -> dict[str, Any]:
        return self._channel.snapshot()

    def peers(self) -> list[Peer]:
        return self._channel.peers()

    def trim(self, keep_nbytes: int = 0) -> int:
        return self._channel.trim(keep_nbytes)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> MessageChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        # Only while a process is being spawned, as every channel; it imports the classes as any program does.
        return MessageChannel, (self._channel, self._messages)
