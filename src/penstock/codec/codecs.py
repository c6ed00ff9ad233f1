"""Codecs: how a channel's messages become records, and records messages.

The ends of a channel in a process share a codec, also in several threads. The catalogue decides what a message may
hold, and the channel how records travel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from penstock import _native
from penstock.codec.buffer import Buffer
from penstock.codec.catalogue import Catalogue, Schema
from penstock.codec.frame import FrameDecoder, FrameEncoder
from penstock.errors import LayoutMismatch

if TYPE_CHECKING:
    from typing_extensions import Buffer as Exporter

Record = Literal["copy", "view", "frame"]  # frame: a short record is copied, a long record is leased where it lies


class BytesCodec:
    """Records are messages: bytes, copied."""

    record: Record = "copy"  # what `decode` takes

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

    record: Record = "view"

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


class MessageCodec:
    """Messages are objects of agreed classes, and records are their frames."""

    record: Record = "frame"

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        # A call takes an encoder out, or makes an encoder, and puts it back unless encoding fails. Threads do not wait
        # for each other, and a signal handler or an exception in the middle of a call spoils no other call.
        self._encoders: list[FrameEncoder] = []
        self._decoders: list[FrameDecoder] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return MessageCodec, (self.catalogue,)

    def schema(self) -> bytes:
        schema = self.catalogue.schema.encode()
        if len(schema) > _native.MAX_SCHEMA_NBYTES:
            raise ValueError(
                f"the description of these {len(self.catalogue.messages)} classes takes {len(schema):,} bytes; a "
                f"channel has room for {_native.MAX_SCHEMA_NBYTES:,}: give them fewer fields, or shorter names"
            )
        return schema

    def require_same(self, schema: bytes, channel: str) -> None:
        if not schema:
            raise LayoutMismatch(
                f"expected a channel of {self.catalogue.names()}, got '{channel}', which carries bytes"
            )
        self.catalogue.require_same(Schema.decode(schema), channel)

    def encode(self, message: Any) -> bytes | list[Exporter]:
        try:
            encoder = self._encoders.pop()
        except IndexError:
            encoder = FrameEncoder(self.catalogue)
        frame = encoder.encode(message)
        self._encoders.append(encoder)
        return frame

    def decode(self, record: Exporter) -> Any:
        try:
            decoder = self._decoders.pop()
        except IndexError:
            decoder = FrameDecoder(self.catalogue)
        message = decoder.decode(record)
        self._decoders.append(decoder)
        return message

    def __str__(self) -> str:
        return " | ".join(message.__name__ for message in self.catalogue.messages)


Codec = BytesCodec | MessageCodec


def codec_for(type: Any) -> Codec:
    """Returns the codec of `bytes`, `Buffer`, `Step` or `Step | Stop`. Raises TypeError for what no channel carries."""
    if type is bytes:
        return BytesCodec()
    return BufferCodec() if type is Buffer else MessageCodec(Catalogue.of(type))
