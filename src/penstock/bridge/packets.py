"""Packets: the bytes on a link after the handshake, in little endian.

    nbytes of the payload (4) │ kind (1) │ lane (1) │ source (2) │ CRC of the payload (4) │ CRC of these 12 bytes (4)
    payload

    FRAME        lane, source   a frame of a channel, as the channel carries it
    LONG         lane, source   nbytes (8) of a frame that follows in pieces
    FRAME_PART        lane, source   the next bytes of that frame
    CREDIT       lane           so many more bytes (8) of frames may be sent
    END          lane           the channel has ended: no more frames
    DEATH        lane           a ChannelDeath, in msgpack: of a sender, or (source 1) of a receiver
    WORDS        lane           pairs of place (8) and word (8)
    HEARTBEAT                   when it was sent (8), the last heartbeat that was received (8), ns held since (8)
    WANT                        a key (32)
    VALUE                       a key (32), nbytes (8) of its value
    TAKE                        the value that was announced has a place: it follows in pieces
    DECLINE                     it has none, or is there by now
    ACK                         bytes (8) of whole packets that have come since the link began
    VALUE_PART                 the next bytes of that value
    ABSENT                      a key (32), and why there is no value, as text
    BYE                         the sender is done, as it says in a text; it sends nothing more
    FATAL                       the link ends: a cause (1: index in CAUSES) and a text

Both CRCs are CRC-32C. The head has a CRC, because a reader would wait for the bytes of a damaged length. No part of a
damaged packet is passed on: the packet counts as received in part, and is sent again over the next connection. A piece
may lie in the destination by then; the repeated piece replaces the bytes.

A lane is the index of a channel among the outbound channels (of CREDIT: among the inbound channels), or of words among
the words of one direction. A payload has at most MAX_PAYLOAD bytes, and packets of all lanes pass between the pieces of
a long frame. A packet is kept until the remote side has acknowledged the bytes: after the loss of a connection, kept
packets are sent again over the next connection. Leaves to the link what a packet means, and to the wire how bytes
travel.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias

from penstock._native import crc32c
from penstock.bridge.link_errors import DamagedPacket, ProtocolError

if TYPE_CHECKING:
    from typing_extensions import Buffer

FatalCause: TypeAlias = Literal["unheard", "ended", "protocol", "damaged"]

FIELDS = struct.Struct("<IBBHI")
HEAD_CRC = struct.Struct("<I")
HEAD = struct.Struct("<IBBHII")
HEAD_NBYTES = HEAD.size
MAX_PAYLOAD = 256 << 10
LONG_NBYTES = struct.Struct("<Q")
CREDIT_NBYTES = struct.Struct("<Q")
ACK_NBYTES = struct.Struct("<Q")
BEAT = struct.Struct("<qqq")
WORD_PAIR = struct.Struct("<QQ")
KEY_NBYTES = 32
VALUE_HEAD = struct.Struct(f"<{KEY_NBYTES}sQ")

FRAME: Final = 1
LONG: Final = 2
FRAME_PART: Final = 3
CREDIT: Final = 4
END: Final = 5
DEATH: Final = 6
WORDS: Final = 7
HEARTBEAT: Final = 8
WANT: Final = 9
VALUE: Final = 10
VALUE_PART: Final = 11
ABSENT: Final = 12
BYE: Final = 13
FATAL: Final = 14
TAKE: Final = 15
DECLINE: Final = 16
ACK: Final = 17

FATAL_CAUSES: Final[tuple[FatalCause, ...]] = (
    "unheard",
    "ended",
    "protocol",
    "damaged",
)  # of the side that receives it
TEXT_NBYTES = 4096  # of a text in BYE, FATAL and ABSENT

# Of each kind: the least and the most bytes of its payload.
SIZES = {
    FRAME: (0, MAX_PAYLOAD),
    LONG: (LONG_NBYTES.size, LONG_NBYTES.size),
    FRAME_PART: (1, MAX_PAYLOAD),
    CREDIT: (CREDIT_NBYTES.size, CREDIT_NBYTES.size),
    END: (0, 0),
    DEATH: (1, TEXT_NBYTES),
    WORDS: (WORD_PAIR.size, MAX_PAYLOAD),
    HEARTBEAT: (BEAT.size, BEAT.size),
    WANT: (KEY_NBYTES, KEY_NBYTES),
    VALUE: (VALUE_HEAD.size, VALUE_HEAD.size),
    TAKE: (0, 0),
    DECLINE: (0, 0),
    VALUE_PART: (1, MAX_PAYLOAD),
    ABSENT: (KEY_NBYTES, KEY_NBYTES + TEXT_NBYTES),
    BYE: (0, TEXT_NBYTES),
    FATAL: (1, 1 + TEXT_NBYTES),
    ACK: (ACK_NBYTES.size, ACK_NBYTES.size),
}
_MIN_NBYTES = [SIZES.get(kind, (1, 0))[0] for kind in range(256)]
_MAX_NBYTES = [SIZES.get(kind, (1, 0))[1] for kind in range(256)]
IN_PLACE = (FRAME_PART, VALUE_PART)

BUFFER_NBYTES = 2 * (MAX_PAYLOAD + HEAD_NBYTES)
GATHERED = 64  # buffers in one call of the kernel
SMALL_NBYTES = 128 << 10  # payloads up to here are copied behind the head: no block of a channel waits for an ACK
ACK_AFTER_NBYTES = SMALL_NBYTES  # received; so a payload that was not copied is acknowledged when it has come
MAX_UNACKED_NBYTES = 16 << 20  # then frames stay in their channels, and values in their stores


def text_payload(text: str) -> bytes:
    return text.encode()[:TEXT_NBYTES]


def packet_head(kind: int, lane: int, source: int, payload: Buffer, nbytes: int) -> bytes:
    fields = FIELDS.pack(nbytes, kind, lane, source, crc32c(payload))
    return fields + HEAD_CRC.pack(crc32c(fields))


def _require_crc(crc: int, expected: int, what: str) -> None:
    if crc != expected:
        raise DamagedPacket(f"{what} with the CRC {crc:08x}, where {expected:08x} was sent")


class LinkWire(Protocol):
    """A connection that does not block."""

    def recv_into(self, room: memoryview) -> int | None:
        """Returns the number of bytes read; 0: the remote side has closed; None: there are none now."""

    def send(self, buffers: list[Buffer]) -> int:
        """Returns the number of bytes taken, which may be 0."""


class PacketQueue:
    """Packets that wait for the wire or for an acknowledgement, with the buffers."""

    def __init__(self) -> None:
        self._buffers: deque[bytes | memoryview] = deque()  # that wait for the wire
        self._taken = 0  # bytes of the first of them that the wire has taken
        self._unacked: deque[bytes | memoryview] = deque()
        self.nbytes = 0  # that wait for the wire
        self.nbytes_sent = 0  # since the link began, each packet once
        self.nbytes_acked = 0

    def put(self, kind: int, lane: int = 0, source: int = 0, payload: Buffer = b"") -> None:
        nbytes = len(payload) if type(payload) is bytes else memoryview(payload).nbytes
        head = packet_head(kind, lane, source, payload, nbytes)
        self.nbytes += len(head) + nbytes
        if nbytes <= SMALL_NBYTES:
            self._buffers.append(head + payload)
        else:
            self._buffers.append(head)
            self._buffers.append(memoryview(payload))

    @property
    def has_room(self) -> bool:
        """Whether frames and pieces may be put."""
        if self.nbytes >= MAX_PAYLOAD:
            return False
        return self.nbytes_sent + self.nbytes - self.nbytes_acked < MAX_UNACKED_NBYTES

    def flush(self, wire: LinkWire) -> None:
        """Sends as much as the wire takes."""
        buffers = self._buffers
        while buffers:
            batch: list[Buffer] = list(buffers) if len(buffers) <= GATHERED else [buffers[i] for i in range(GATHERED)]
            if self._taken:
                batch[0] = memoryview(batch[0])[self._taken :]
            taken = wire.send(batch)
            if not taken:
                return
            self.nbytes -= taken
            self.nbytes_sent += taken
            if not self.nbytes:
                self._unacked.extend(buffers)
                self._taken = 0
                return buffers.clear()
            taken += self._taken
            while taken >= len(buffers[0]):
                taken -= len(buffers[0])
                self._unacked.append(buffers.popleft())
            self._taken = taken

    def acknowledge(self, nbytes: int) -> None:
        """Drops the packets in the first `nbytes` of the link: the remote side has them. Raises ProtocolError."""
        if nbytes < self.nbytes_acked:  # an ACK that was sent again: the new connection has said more
            return
        unacked = self._unacked
        while self.nbytes_acked < nbytes and unacked:
            self.nbytes_acked += len(unacked.popleft())
        if self.nbytes_acked != nbytes:
            raise ProtocolError(f"it acknowledged {nbytes} bytes: {self.nbytes_acked} or {self.nbytes_sent} were sent")

    def rewind(self, nbytes: int) -> None:
        """What the remote side has not received waits for the wire again. Raises ProtocolError."""
        if nbytes < self.nbytes_acked:
            raise ProtocolError(f"it has received {nbytes} bytes, and had acknowledged {self.nbytes_acked}")
        self.acknowledge(nbytes)
        self._buffers.extendleft(reversed(self._unacked))
        self._unacked.clear()
        self._taken = 0
        self.nbytes += self.nbytes_sent - nbytes
        self.nbytes_sent = nbytes

    def clear(self) -> None:
        self._buffers.clear()
        self._unacked.clear()
        self.nbytes = self._taken = 0


class PacketHandler(Protocol):
    """What happens with packets."""

    def handle(self, kind: int, lane: int, source: int, payload: memoryview) -> None:
        """Takes a packet. The payload is gone when this returns."""

    def place(self, kind: int, lane: int, source: int, nbytes: int) -> memoryview | None:
        """Returns where the payload of a FRAME_PART or VALUE_PART belongs; None: `handle` receives the packet."""

    def placed(self, kind: int, lane: int, source: int, nbytes: int) -> None:
        """The payload lies in its place, and the view of that has been dropped."""


class PacketReader:
    """Takes what arrives apart into packets. Long payloads are read straight into their places."""

    def __init__(self, handler: PacketHandler) -> None:
        self._handler = handler
        self._view = memoryview(bytearray(BUFFER_NBYTES))
        self._begin = self._end = 0
        self._place: memoryview | None = None
        self._filled = 0
        self._placed_head = (0, 0, 0)
        self._placed_crc = 0
        self._wants_head = False  # the packet before went into its place: the next one may go there, too
        self.nbytes = 0  # received since the link began, each packet once

    @property
    def nbytes_whole(self) -> int:
        """Of the packets that have come whole."""
        part = self._end - self._begin if self._place is None else HEAD_NBYTES + self._filled
        return self.nbytes - part

    def restart(self) -> None:
        """Forgets the packet that has come in part: it comes again over the next connection."""
        self.nbytes = self.nbytes_whole
        self.drop_place()
        self._begin = self._end = 0
        self._wants_head = False

    def read(self, wire: LinkWire) -> bool | None:
        """Reads once, and handles the complete packets. Returns whether bytes came; None: the remote side has closed.
        Raises ProtocolError for a damaged packet, and for bytes that are no packet."""
        if self._place is not None:
            with self._place[self._filled :] as room:
                count = wire.recv_into(room)
            if count:
                self._fill(count)
        else:
            end = self._end
            if self._wants_head and end == self._begin:
                room = self._view[end : end + HEAD_NBYTES]
            else:
                room = self._view[end:] if end else self._view
            count = wire.recv_into(room)
            if count:
                self._end = end + count
                self.nbytes += count
                self._parse()
        return None if count == 0 else count is not None

    @property
    def is_within_packet(self) -> bool:
        return self._place is not None or self._end > self._begin

    def drop_place(self) -> None:
        """Drops the view of the place that is being filled."""
        if self._place is not None:
            self._place.release()
            self._place = None

    def _fill(self, count: int) -> None:
        assert self._place is not None, "only called while a place is filled"
        self.nbytes += count
        self._filled += count
        if self._filled < len(self._place):
            return
        nbytes = self._filled
        _require_crc(crc32c(self._place), self._placed_crc, f"a payload of {nbytes} bytes arrived")
        self.drop_place()
        self._wants_head = True
        self._handler.placed(*self._placed_head, nbytes)

    def _parse(self) -> None:
        view, handler = self._view, self._handler
        begin, end = self._begin, self._end
        while end - begin >= HEAD_NBYTES:
            nbytes, kind, lane, source, crc, head_crc = HEAD.unpack_from(view, begin)
            _require_crc(crc32c(view[begin : begin + FIELDS.size]), head_crc, "the head of a packet arrived")
            if not _MIN_NBYTES[kind] <= nbytes <= _MAX_NBYTES[kind]:
                raise ProtocolError(f"no packet begins with {bytes(view[begin : begin + HEAD_NBYTES]).hex()}")
            first = begin + HEAD_NBYTES
            if end - first < nbytes:
                if kind in IN_PLACE and self._begin_place(kind, lane, source, nbytes, view[first:end]):
                    self._placed_crc = crc
                    begin = end
                break
            begin = first + nbytes
            with view[first:begin] as payload:
                _require_crc(crc32c(payload), crc, f"a payload of {nbytes} bytes arrived")
                self._begin = begin  # before it is handled: a packet that raises has been taken
                self._wants_head = False
                handler.handle(kind, lane, source, payload)
        if begin == end:
            begin = end = 0
        elif BUFFER_NBYTES - begin < HEAD_NBYTES + MAX_PAYLOAD:
            rest = end - begin
            view[:rest] = bytes(view[begin:end])
            begin, end = 0, rest
        self._begin, self._end = begin, end

    def _begin_place(self, kind: int, lane: int, source: int, nbytes: int, part: memoryview) -> bool:
        place = self._handler.place(kind, lane, source, nbytes)
        if place is None:
            return False
        self._place, self._filled, self._placed_head = place, len(part), (kind, lane, source)
        place[: len(part)] = part
        return True
