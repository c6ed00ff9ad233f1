"""What a channel carries: bytes, buffers, or messages of agreed classes; and the ends that take and give it.

Leaves to the catalogue what a message may hold.
"""

from __future__ import annotations

from typing import Any

from penstock import _native
from penstock.channel import AsyncByteReceiver, AsyncByteSender, ByteReceiver, ByteSender
from penstock.codec.buffer import Buffer
from penstock.codec.catalogue import Catalogue, Schema
from penstock.codec.ends import (
    AsyncBufferReceiver,
    AsyncBufferSender,
    AsyncMessageReceiver,
    AsyncMessageSender,
    BufferReceiver,
    BufferSender,
    MessageReceiver,
    MessageSender,
)
from penstock.errors import LayoutMismatch

MAX_DESCRIBED = 1 << 20  # layout.h: schema_nbytes


class Payload:
    """What a channel carries: `of(bytes)`, `of(Buffer)`, `of(Step)` or `of(Step | Stop)`."""

    def __init__(self, catalogue: Catalogue | None, *, is_viewed: bool = False) -> None:
        self.catalogue = catalogue  # None: records are not messages
        self.is_viewed = is_viewed  # receivers get a Buffer where the record lies, and not bytes

    @classmethod
    def of(cls, type: Any) -> Payload:
        """Raises TypeError for what no channel carries."""
        if type is bytes or type is Buffer:
            return cls(None, is_viewed=type is Buffer)
        return cls(Catalogue.of(type))

    def described(self) -> bytes:
        """Returns the description of the messages that lies in the channel's segment."""
        if self.catalogue is None:
            return b""
        described = self.catalogue.schema.encode()
        if len(described) > MAX_DESCRIBED:
            raise ValueError(
                f"the description of these {len(self.catalogue.messages)} classes takes {len(described):,} bytes; a "
                f"channel has room for {MAX_DESCRIBED:,}: give them fewer fields, or shorter names"
            )
        return described

    def require_same(self, segment: _native.Segment) -> None:
        """Raises LayoutMismatch, which says how they differ, where the channel carries something else."""
        described = bytes(segment.schema)
        if not described:
            if self.catalogue is not None:
                raise LayoutMismatch(f"'{segment.name}' carries bytes, not {self.catalogue.names()}")
            return
        schema = Schema.decode(described)
        if self.catalogue is None:
            names = " | ".join(message.name for message in schema.messages)
            raise LayoutMismatch(f"'{segment.name}' carries messages: attach to it as a channel of {names}")
        self.catalogue.require_same(schema, segment.name)

    # ── the ends that take or give it, made of those of bytes ──
    def sender(self, end: ByteSender) -> Any:
        if self.catalogue is not None:
            return MessageSender(end, self.catalogue)
        return BufferSender(end) if self.is_viewed else end

    def receiver(self, end: ByteReceiver) -> Any:
        if self.catalogue is not None:
            return MessageReceiver(end, self.catalogue)
        return BufferReceiver(end) if self.is_viewed else end

    def async_sender(self, end: AsyncByteSender) -> Any:
        if self.catalogue is not None:
            return AsyncMessageSender(end, self.catalogue)
        return AsyncBufferSender(end) if self.is_viewed else end

    def async_receiver(self, end: AsyncByteReceiver) -> Any:
        if self.catalogue is not None:
            return AsyncMessageReceiver(end, self.catalogue)
        return AsyncBufferReceiver(end) if self.is_viewed else end
