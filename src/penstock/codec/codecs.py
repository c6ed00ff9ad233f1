"""Codecs: how a channel's messages become records, and records messages.

The ends of a channel in a process share a codec, also in several threads. `frame` has the codec of messages of agreed
classes. The catalogue decides what a message may hold, and the channel how records travel.
"""

from __future__ import annotations

from typing import Any

from penstock.codec.buffer import Buffer
from penstock.codec.catalogue import Catalogue, Schema
from penstock.codec.frame import MessageCodec
from penstock.errors import LayoutMismatch


class BytesCodec:
    """Records are messages: bytes, copied."""

    record = "copy"  # what `decode` takes

    def schema(self) -> bytes:
        """Returns the description of the messages that lies in the channel's segment; empty for bytes."""
        return b""

    def require_same(self, schema: bytes, channel: str) -> None:
        """Raises LayoutMismatch with the differences if the channel carries different messages."""
        if schema:
            names = " | ".join(message.name for message in Schema.decode(schema).messages)
            raise LayoutMismatch(
                f"expected a channel of bytes, got '{channel}', which carries messages: attach with type={names}"
            )

    def encode(self, message: Any) -> Any:
        return message

    def decode(self, record: Any) -> Any:
        return record

    def __str__(self) -> str:
        return "bytes"


class BufferCodec(BytesCodec):
    """Messages are records where they lie."""

    record = "view"

    def encode(self, message: Any) -> Any:
        if type(message) is Buffer:
            return message.view
        if isinstance(message, (list, tuple)):
            return [part.view if type(part) is Buffer else part for part in message]
        return message

    def decode(self, record: Any) -> Buffer:
        return Buffer(record)

    def __str__(self) -> str:
        return "Buffer"


Codec = BytesCodec | MessageCodec


def codec_for(type: Any) -> Codec:
    """Returns the codec of `bytes`, `Buffer`, `Step` or `Step | Stop`. Raises TypeError for what no channel carries."""
    if type is bytes:
        return BytesCodec()
    return BufferCodec() if type is Buffer else MessageCodec(Catalogue.of(type))
