"""A connection in its handshake, on either side: messages to bytes and back."""

from __future__ import annotations

import contextlib
import select
import ssl
import struct
import time

import msgspec

from penstock.bridge.handshake import ONE_SIDED_TLS, WRONG_SECRET, Handshake
from penstock.bridge.handshake_pool import GONE, HANDSHAKE_S, READABLE
from penstock.bridge.link import Link
from penstock.bridge.link_errors import BridgeRefused
from penstock.bridge.resumption import Resumer
from penstock.bridge.wire import RECORD_TYPES, RECORD_VERSION, OneSidedTls, PlainWire, TlsWire

STRANGER = "CALLBACK_FAILED"  # of an ssl.SSLError: ClientHello has no knock
LENGTH = struct.Struct("<I")  # of a message of the handshake, before it


class HandshakeConnection:
    """A connection in its handshake: messages to bytes and back."""

    def __init__(self, wire: PlainWire | TlsWire, handshake: Handshake, address: tuple[str, int] | None) -> None:
        self.wire = wire
        self.handshake = handshake
        self.address = address
        self.deadline = time.monotonic() + HANDSHAKE_S  # of the whole handshake
        self._unsent = memoryview(b"")
        self._read = bytearray()
        self._message_nbytes = LENGTH.size
        self._has_length = False

    def advance(self) -> bool:
        """Goes on without waiting. Returns whether the handshake is done, and all of it sent.

        Raises BridgeRefused, EOFError where the remote side has gone, and OSError where the connection is lost.
        """
        try:
            while self._flush() and not self.handshake.is_done:
                message = self._receive()
                if message is None:
                    return False
                self.handshake.receive(message)
        except BridgeRefused:
            self._send_refusal()
            raise
        except ssl.SSLError as error:
            if error.reason == STRANGER:
                raise BridgeRefused.of("secret", WRONG_SECRET) from None
            raise
        except OneSidedTls:
            if isinstance(self.wire, TlsWire):
                self.wire = self.wire.plain  # the remote side reads no records
            refusal = self.handshake.refused("tls", ONE_SIDED_TLS)
            self._send_refusal()
            raise refusal from None
        return self.handshake.is_done and self._flush()

    def _send_refusal(self) -> None:
        with contextlib.suppress(OSError):  # the remote side has refused, and gone
            self._flush()

    def _receive(self) -> bytes | None:
        """Returns the next message; None: it is not there yet. Reads no byte beyond it: packets may follow."""
        while True:
            while len(self._read) < self._message_nbytes:
                part = bytearray(self._message_nbytes - len(self._read))
                count = self.wire.recv_into(memoryview(part))
                if count is None:
                    return None
                if count == 0:
                    raise EOFError(GONE)
                self._read += part[:count]
            taken, self._read = bytes(self._read), bytearray()
            self._has_length = not self._has_length
            if not self._has_length:
                self._message_nbytes = LENGTH.size
                return taken
            (self._message_nbytes,) = LENGTH.unpack(taken)
            if taken[0] in RECORD_TYPES and taken[1] == RECORD_VERSION:
                raise OneSidedTls
            if not 1 <= self._message_nbytes <= self.handshake.max_nbytes:
                raise BridgeRefused.of(
                    "foreign",
                    f"expected a message of up to {self.handshake.max_nbytes} bytes, got one of {self._message_nbytes}",
                )

    def _flush(self) -> bool:
        """Returns whether all messages have been sent."""
        outbox = self.handshake.outbox
        if outbox:
            framed = b"".join(LENGTH.pack(len(message)) + message for message in outbox)
            outbox.clear()
            self._unsent = memoryview(bytes(self._unsent) + framed)
        while self._unsent:
            count = self.wire.send([self._unsent])
            if not count:
                break
            self._unsent = self._unsent[count:]
        self.wire.flush()
        return not self._unsent and not self.wire.wants_write

    @property
    def has_knocked(self) -> bool:
        """Whether the first bytes of a connector came from a process that has the secret."""
        return self.wire.has_knocked or self.handshake.has_knocked

    @property
    def events(self) -> int:
        """For epoll."""
        is_writing = bool(self._unsent) or self.wire.wants_write
        return READABLE | (select.EPOLLOUT if is_writing else 0)

    def close(self) -> None:
        """The remote side may read first what it was told."""
        self.wire.shut_down_writing()
        self.wire.close()

    def link(self, resumer: Resumer | None = None) -> Link:
        handshake = self.handshake
        assert handshake.spec is not None and handshake.offer is not None and handshake.remote is not None
        remote = msgspec.structs.replace(handshake.remote, address=self.address)
        return Link(handshake.spec, remote, handshake.offer, self.wire, resumer)
