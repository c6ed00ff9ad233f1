"""Packets: what crosses a link once both sides have agreed. Little endian throughout.

    nbytes of the payload (4) │ kind (1) │ lane (1) │ source (2) │ CRC of the payload (4) │ CRC of these 12 bytes (4)
    payload

    FRAME        lane, source   a frame of a channel, as the channel carries it
    LONG         lane, source   nbytes (8) of a frame that follows in pieces
    PIECE        lane, source   the next bytes of that frame
    CREDIT       lane           so many more bytes (8) of frames may be sent
    END          lane           the channel has ended: no more frames
    DEATH        lane           a ChannelDeath, in msgpack: of a sender, or (source 1) of a receiver
    WORDS        lane           pairs of place (8) and word (8)
    HEARTBEAT                   when it was sent (8), the last heartbeat that was received (8), ns held since (8)
    WANT                        a key (32)
    VALUE                       a key (32), nbytes (8) of its value
    TAKE                        the value that was announced has a place: it follows in pieces
    DECLINE                     it has none, or is there by now
    VALUE_PIECE                 the next bytes of that value
    ABSENT                      a key (32), and why there is no value, as text
    BYE                         the sender is done, as it says in a text; it sends nothing more
    FATAL                       the link ends: a cause (1: index in CAUSES) and a text

Both CRCs are CRC-32C. The head has its own, as a damaged length would have a reader wait for bytes that do not come.
Nothing of a damaged packet is passed on: a piece may lie in its place by then, but the frame or value is given up.

A lane is the number of a channel among the outbound channels (of CREDIT: the inbound ones), or of words among those
that go the same way. A payload has at most MAX_PAYLOAD bytes, so packets of other lanes pass between the pieces of a
long frame. Leaves to the link what a packet means, and to the wire how bytes travel.
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
BEAT = struct.Struct("<qqq")
WORD_PAIR = struct.Struct("<QQ")
KEY_NBYTES = 32
VALUE_HEAD = struct.Struct(f"<{KEY_NBYTES}sQ")

FRAME: Final = 1
LONG: Final = 2
PIECE: Final = 3
CREDIT: Final = 4
END: Final = 5
DEATH: Final = 6
WORDS: Final = 7
HEARTBEAT: Final = 8
WANT: Final = 9
VALUE: Final = 10
VALUE_PIECE: Final = 11
ABSENT: Final = 12
BYE: Final = 13
FATAL: Final = 14
TAKE: Final = 15
DECLINE: Final = 16

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
    PIECE: (1, MAX_PAYLOAD),
    CREDIT: (CREDIT_NBYTES.size, CREDIT_NBYTES.size),
    END: (0, 0),
    DEATH: (1, TEXT_NBYTES),
    WORDS: (WORD_PAIR.size, MAX_PAYLOAD),
    HEARTBEAT: (BEAT.size, BEAT.size),
    WANT: (KEY_NBYTES, KEY_NBYTES),
    VALUE: (VALUE_HEAD.size, VALUE_HEAD.size),
    TAKE: (0, 0),
    DECLINE: (0, 0),
    VALUE_PIECE: (1, MAX_PAYLOAD),
    ABSENT: (KEY_NBYTES, KEY_NBYTES + TEXT_NBYTES),
    BYE: (0, TEXT_NBYTES),
    FATAL: (1, 1 + TEXT_NBYTES),
}
_MIN_NBYTES = [SIZES.get(kind, (1, 0))[0] for kind in range(256)]
_MAX_NBYTES = [SIZES.get(kind, (1, 0))[1] for kind in range(256)]
IN_PLACE = (PIECE, VALUE_PIECE)

BUFFER_NBYTES = 2 * (MAX_PAYLOAD + HEAD_NBYTES)
GATHERED = 64  # buffers in one call of the kernel
SMALL_NBYTES = 16 << 10  # payloads up to here are copied behind their head: a call with one buffer is the quickest


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
        """Returns the number of bytes read; 0: the other side has closed; None: there are none now."""

    def send(self, buffers: list[Buffer]) -> int:
        """Returns the number of bytes taken, which may be 0."""


class PacketQueue:
    """Packets that wait for the wire. Buffers that were put are held until they have been sent."""

    def __init__(self) -> None:
        self._buffers: deque[bytes | memoryview] = deque()
        self.nbytes = 0  # that wait
        self.nbytes_sent = 0

    def put(self, kind: int, lane: int = 0, source: int = 0, payload: Buffer = b"") -> None:
        nbytes = len(payload) if type(payload) is bytes else memoryview(payload).nbytes
        head = packet_head(kind, lane, source, payload, nbytes)
        self.nbytes += len(head) + nbytes
        if nbytes <= SMALL_NBYTES:
            self._buffers.append(head + payload)
        else:
            self._buffers.append(head)
            self._buffers.append(memoryview(payload))

    def flush(self, wire: LinkWire) -> None:
        """Sends as much as the wire takes."""
        buffers = self._buffers
        while buffers:
            batch: list[Buffer] = list(buffers) if len(buffers) <= GATHERED else [buffers[i] for i in range(GATHERED)]
            taken = wire.send(batch)
            if not taken:
                return
            self.nbytes -= taken
            self.nbytes_sent += taken
            if not self.nbytes:
                return buffers.clear()
            while taken:
                first = buffers[0]
                if taken < len(first):
                    buffers[0] = memoryview(first)[taken:]
                    break
                taken -= len(first)
                buffers.popleft()

    def clear(self) -> None:
        self._buffers.clear()
        self.nbytes = 0


class PacketHandler(Protocol):
    """What happens with packets."""

    def handle(self, kind: int, lane: int, source: int, payload: memoryview) -> None:
        """Takes a packet. The payload is gone when this returns."""

    def place(self, kind: int, lane: int, source: int, nbytes: int) -> memoryview | None:
        """Returns where the payload of a PIECE or VALUE_PIECE is to lie; None: it comes to `handle` as any other."""

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
        self.nbytes = 0  # received

    def read(self, wire: LinkWire) -> bool | None:
        """Reads once, and handles the packets that are complete. Returns whether there were bytes; None: the other side
        has closed. Raises ProtocolError for what is no packet, and for a damaged one."""
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
        crc = crc32c(self._place)
        self.drop_place()
        _require_crc(crc, self._placed_crc, f"a payload of {nbytes} bytes arrived")
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
            self._begin = begin  # before it is handled: a packet that raises has been taken
            self._wants_head = False
            with view[first:begin] as payload:
                _require_crc(crc32c(payload), crc, f"a payload of {nbytes} bytes arrived")
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
