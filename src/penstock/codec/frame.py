"""Frames: the bytes of one message, and the codec of a channel of messages.

    short frame        number (1) │ struct
    frame with parts   number + 128 (1) │ is_long (1) │ 0 (2) │ struct_nbytes (4) │ struct │ part │ part …

The struct is a msgpack array of the message's fields. A short array of numbers is an extension (kind, bytes). For a
long array, the struct has a number (nbytes * 32 + kind) that refers to the next part. An array with 0 or several
dimensions is a list: the extension or the number, then the shape. Parts lie in the order of their numbers in the
struct: the first at a multiple of 8 from the start of the frame, each other part at a multiple of 8 from the first.
Long parts, and the first part of a frame with long parts, lie at multiples of 64. All numbers are little endian. The
ends decide how frames travel.
"""

from __future__ import annotations

import array
import contextlib
import struct
import typing
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from penstock import _native
from penstock.codec.buffer import Buffer
from penstock.codec.catalogue import Catalogue, Schema, array_dtype, decode_error
from penstock.codec.dtypes import CODES, DTYPES, MAX_DIMENSIONS, PLAIN
from penstock.errors import DecodeError, LayoutMismatch

if TYPE_CHECKING:
    from typing_extensions import Buffer as Exporter

HEAD = struct.Struct("<BBHI")
HEAD_NBYTES = HEAD.size
WITH_PARTS = 0x80
KIND_BITS = 5
KIND_MASK = (1 << KIND_BITS) - 1
INLINE_NBYTES = (
    4096  # of an array: up to here copying it costs less than what a part costs (RESULTS.md: 1 us both ways)
)
LONG_NBYTES = 4096
PADDING = [bytes(gap) for gap in range(64)]
NOTHING = memoryview(b"")
BOOL = CODES[np.dtype(np.bool_)]

WRONG = (msgspec.MsgspecError, ValueError, RecursionError)  # what decoding raises for malformed bytes
PLAIN_FIELDS = (int, float, str, bytes)
_Ext = msgspec.msgpack.Ext
_Array = np.ndarray


class Split(typing.NamedTuple):
    """A frame taken apart, as far as its head tells."""

    number: int
    struct: memoryview
    parts: memoryview


def gap_before(end: int, nbytes: int) -> int:
    """Returns the padding between an end, counted from the first part, and a part of `nbytes` bytes."""
    return -end & (63 if nbytes >= LONG_NBYTES else 7)


def split(frame: Exporter) -> Split:
    """Takes a frame apart. Raises DecodeError where its lengths do not fit."""
    view = memoryview(frame)
    if not view:
        raise DecodeError("expected a frame, got no bytes")
    if view[0] < WITH_PARTS:
        return Split(view[0], view[1:], NOTHING)
    end, first = read_head(view)
    return Split(view[0] & ~WITH_PARTS, view[HEAD_NBYTES:end], view[first:])


def read_head(view: memoryview) -> tuple[int, int]:
    """Of a frame with parts: where its struct ends, and where its first part begins."""
    nbytes = len(view)
    if nbytes < HEAD_NBYTES:
        raise DecodeError(f"expected a frame with parts, got {nbytes} bytes")
    _, is_long, zero, struct_nbytes = HEAD.unpack_from(view)
    if zero or is_long > 1:
        raise DecodeError(f"expected the head of a frame, got {bytes(view[:4]).hex()}")
    end: int = HEAD_NBYTES + struct_nbytes
    if end > nbytes:
        raise DecodeError(f"expected a frame of at least {end} bytes, got {nbytes}")
    first = end + (-end & (63 if is_long else 7))
    return end, first if first < nbytes else nbytes


class FrameEncoder:
    """Makes frames of the messages of one catalogue. For one thread at a time."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self._classes = {
            cls: (number, bytes([number]), catalogue.special[cls]) for number, cls in enumerate(catalogue.messages, 1)
        }
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._hook)
        # Of the frame that is being made:
        self._parts: list[Exporter] = []  # with the padding between
        self._end = 0  # of the last one, from the start of the first
        self._is_long = False

    def encode(self, message: msgspec.Struct) -> bytes | list[Exporter]:
        """Returns the frame, whole or in pieces. Pieces are the caller's arrays, which are read when the frame is sent.

        Raises TypeError where the message, an array or a part has another type than the class declares.
        """
        known = self._classes.get(type(message))
        if known is None:
            raise self.catalogue.foreign(type(message))
        number, byte, special = known
        for name, kind in special:
            value = getattr(message, name)
            actual = type(value)
            if value is not None and actual is not kind and (actual is not _Array or value.dtype is not kind):
                _require(value, kind, f"$.{name} of {type(message).__name__}")
        interrupted = None
        if self._parts:  # a signal handler sends this message while the thread encodes
            interrupted = self._parts, self._end, self._is_long
            self._parts, self._end, self._is_long = [], 0, False
        try:
            encoded = self._encoder.encode(message)
            return self._with_parts(number, encoded) if self._end else byte + encoded
        finally:
            if self._parts or interrupted:
                self._parts, self._end, self._is_long = interrupted or ([], 0, False)

    def _with_parts(self, number: int, encoded: bytes) -> list[Exporter]:
        try:
            head = HEAD.pack(number | WITH_PARTS, self._is_long, 0, len(encoded))
        except struct.error:
            raise ValueError(
                f"a struct of {len(encoded)} bytes does not fit a frame: let it hold arrays or parts"
            ) from None
        gap = -(HEAD_NBYTES + len(encoded)) & (63 if self._is_long else 7)
        return [head + encoded + PADDING[gap], *self._parts]

    # ── what msgspec does not know ──
    def _hook(self, value: Any) -> Any:
        if isinstance(value, _Array):
            return self._array(value)
        if isinstance(value, Buffer):
            return self._part(PLAIN, value.nbytes, value.view) if value.nbytes else _Ext(PLAIN, b"")
        if isinstance(value, array.array):
            return self._array(np.frombuffer(value, value.typecode) if len(value) else np.empty(0, value.typecode))
        if isinstance(value, np.generic) and not isinstance(value, _LIKE_NO_OTHER):
            return value.item()
        raise TypeError(f"expected what msgspec encodes, an array or a Buffer, got a {type(value).__name__}")

    def _array(self, value: np.ndarray[Any, Any]) -> Any:
        code = CODES.get(value.dtype)
        if code is None or type(value) is not _Array:
            value = _plain(value)
            code = CODES[value.dtype]
        nbytes = value.nbytes
        if nbytes <= INLINE_NBYTES:
            flat: Any = _Ext(code, value.tobytes())
        else:
            flat = self._part(code, nbytes, value if value.flags.c_contiguous else np.ascontiguousarray(value))
        return flat if value.ndim == 1 else [flat, *value.shape]

    def _part(self, kind: int, nbytes: int, at: Any) -> int:
        gap = gap_before(self._end, nbytes)
        if gap:
            self._parts.append(PADDING[gap])
        self._parts.append(at)  # before _end: encode() in a signal handler finds a frame in the making
        self._end += gap + nbytes
        if nbytes >= LONG_NBYTES:
            self._is_long = True
        return nbytes << KIND_BITS | kind


_LIKE_NO_OTHER = (np.longdouble, np.clongdouble)  # no number of Python's is as wide


def _require(value: Any, kind: Any, where: str) -> None:
    """Raises TypeError for a field without an array of this dtype, or an object of this class."""
    if isinstance(kind, type):
        if not isinstance(value, kind):
            raise TypeError(f"expected {kind.__name__} at {where}, got {type(value).__name__}")
    elif isinstance(value, _Array):
        if value.dtype != kind:
            raise TypeError(f"expected an array of {kind} at {where}, got {value.dtype}")
    elif not isinstance(value, array.array):
        raise TypeError(f"expected an array of {kind} at {where}, got {type(value).__name__}")
    elif np.dtype(value.typecode) != kind:
        raise TypeError(f"expected an array of {kind} at {where}, got {np.dtype(value.typecode)}")


def _plain(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns a plain array in native byte order. Raises TypeError where the conversion would lose something."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("expected an array without a mask, got a masked array: send .data and .mask")
    value = np.asarray(value)
    if value.dtype.kind in "biufc":
        value = value.astype(value.dtype.newbyteorder("="), copy=False)
    if value.dtype not in CODES:
        raise TypeError(f"expected an array of numbers, got one of {value.dtype}: convert it by astype")
    return value


class FrameDecoder:
    """Makes messages of frames. For one thread at a time.

    Arrays and parts of a message are read-only views of the frame, and keep the frame.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self._decoders = [msgspec.msgpack.Decoder(cls, dec_hook=self._hook) for cls in catalogue.messages]
        self._hints: dict[int, tuple[Any, Any]] = {}  # by identity, which the second of the pair keeps alive
        self._frame: Exporter = NOTHING
        self._first = 0  # where the parts of this frame begin
        self._end = 0  # of the part that was read last, from there
        self._nbytes = 0  # of all of them

    def decode(self, frame: Exporter) -> Any:
        """The message. Raises DecodeError, with the path to what is wrong; the next frame is none the worse."""
        try:
            view = memoryview(frame)
            if not view:
                raise DecodeError("expected a frame, got no bytes")
            number = view[0]
            if number < WITH_PARTS:
                return self._decode(number, view[1:])
            end, first = read_head(view)
            self._frame = frame if view.readonly else view.toreadonly()
            self._first, self._end, self._nbytes = first, 0, len(view) - first
            try:
                message = self._decode(number & ~WITH_PARTS, view[HEAD_NBYTES:end])
                if self._end != self._nbytes:
                    raise DecodeError(f"expected parts of {self._end} bytes, got {self._nbytes}")
                return message
            finally:
                self._frame, self._end, self._nbytes = NOTHING, 0, 0
        except DecodeError as error:
            self._tell_what_was_meant(error, frame)
            raise

    def _decode(self, number: int, encoded: memoryview) -> Any:
        if not 1 <= number <= len(self._decoders):
            raise DecodeError(
                f"expected the number of a message, 1 to {len(self._decoders)} ({self.catalogue.names()}), got {number}"
            )
        try:
            return self._decoders[number - 1].decode(encoded)
        except WRONG as error:
            raise decode_error(self.catalogue, self.catalogue.messages[number - 1], error) from None

    def _tell_what_was_meant(self, error: DecodeError, frame: Exporter) -> None:
        with contextlib.suppress(*WRONG, IndexError, TypeError):
            parts = split(frame)
            error.kind = self.catalogue.messages[parts.number - 1] if parts.number else None
            error.fields = tuple(
                field if isinstance(field, PLAIN_FIELDS) else None for field in msgspec.msgpack.decode(parts.struct)
            )

    # ── what msgspec does not know ──
    def _hook(self, hint: Any, value: Any) -> Any:
        known = self._hints.get(id(hint))
        if known is None:
            known = self._hints[id(hint)] = (_target(hint), hint)
        dtype, code, itemsize = known[0]
        shape = None
        if type(value) is list and value and dtype is not None:
            value, *shape = value
        # Where the bytes are:
        view: Any
        if type(value) is int and value >= 0:
            kind, nbytes, view = value & KIND_MASK, value >> KIND_BITS, self._frame
            start = self._end + gap_before(self._end, nbytes)
            self._end = start + nbytes
            if self._end > self._nbytes:
                raise DecodeError(f"expected a part of {nbytes} bytes, got {max(0, self._nbytes - start)}")
            start += self._first
        elif type(value) is _Ext:
            kind, view, start = value.code, value.data, 0
            nbytes = len(view)
        else:
            raise DecodeError(f"expected an array or part, got {type(value).__name__}")
        # The array or part:
        if kind != code:
            expected = "a part of plain bytes" if dtype is None else f"an array of {dtype}"
            raise DecodeError(f"expected {expected}, got one of {DTYPES.get(kind, f'kind {kind}')}")
        if dtype is None:
            return _part_of(memoryview(view)[start : start + nbytes].toreadonly())
        if nbytes % itemsize:
            raise DecodeError(f"expected numbers of {itemsize} bytes each, got {nbytes} bytes")
        # frombuffer refuses to make an array of nothing
        array = np.frombuffer(view, dtype, nbytes // itemsize, start) if nbytes else _nothing(dtype)
        if code == BOOL and nbytes and array.view(np.uint8).max() > 1:
            raise DecodeError(f"expected 0 and 1, got {array.view(np.uint8).max()}")
        return array if shape is None else _reshaped(array, shape)


def _part_of(view: memoryview) -> Buffer:
    part = Buffer.__new__(Buffer)
    part._view = view
    return part


def _nothing(dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    array = np.empty(0, dtype)
    array.flags.writeable = False
    return array


def _reshaped(flat: np.ndarray[Any, Any], shape: list[Any]) -> np.ndarray[Any, Any]:
    product = 1
    for size in shape:
        if type(size) is not int or not 0 <= size <= 1 << 48:
            raise DecodeError(f"expected a shape, got {shape!r:.80}")
        product *= size
    if product != flat.size or len(shape) > MAX_DIMENSIONS:
        raise DecodeError(f"expected a shape of {flat.size} numbers, got {shape!r:.80}")
    return flat.reshape(shape)


def _target(hint: Any) -> tuple[np.dtype[Any] | None, int, int]:
    """Returns how a field is decoded: as an array (dtype, code, itemsize) or as a part (no dtype)."""
    if typing.get_origin(hint) is np.ndarray:
        dtype = array_dtype(hint)
        return (dtype, CODES[dtype], dtype.itemsize)
    return (None, PLAIN, 1)


class MessageCodec:
    """Messages are objects of agreed classes, and records are their frames."""

    record = "frame"  # what `decode` takes: a short record is copied, a long record is leased where it lies

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
