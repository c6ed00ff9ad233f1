"""Frames: the bytes of one message.

    short frame        number (1) │ struct
    frame with parts   number + 128 (1) │ is_long (1) │ 0 (2) │ struct_nbytes (4) │ struct │ part │ part …

The struct is a msgpack array of the message's fields. In it an array of numbers is an extension (its kind, its bytes)
if it is short, and else a number (nbytes * 32 + kind) that stands for the next part; one that has not exactly one
dimension is a list: that, then its shape. Parts lie in the order in which the struct names them, the first at the next
multiple of 8 from the start of the frame, of 64 if one of them is long; each at a multiple of 8 from the first, a long
one of 64. Little endian throughout. Leaves to the ends how frames travel.
"""

from __future__ import annotations

import array
import contextlib
import struct
import typing
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from penstock.codec.buffer import Buffer
from penstock.codec.catalogue import Catalogue, array_dtype, decode_error
from penstock.codec.dtypes import CODES, DTYPES, MAX_DIMENSIONS, PLAIN
from penstock.errors import DecodeError

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

WRONG = (msgspec.MsgspecError, ValueError, RecursionError)  # what decoding raises for bytes that are not what they say
PLAIN_FIELDS = (int, float, str, bytes)
_Ext = msgspec.msgpack.Ext
_Array = np.ndarray


class Split(typing.NamedTuple):
    """A frame taken apart, as far as its head tells."""

    number: int
    struct: memoryview
    parts: memoryview


def gap_before(end: int, nbytes: int) -> int:
    """Between what ends there, from the start of the first part, and a part of so many bytes."""
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
        self._parts: list[Exporter] = []  # with what lies between them
        self._end = 0  # of the last one, from the start of the first
        self._is_long = False

    def encode(self, message: msgspec.Struct) -> bytes | list[Exporter]:
        """The frame, whole or in pieces. The pieces are the caller's own arrays: they are read when it is sent.

        Raises TypeError where the message, or one of its arrays and parts, is not what its class says.
        """
        found = self._classes.get(type(message))
        if found is None:
            raise self.catalogue.foreign(type(message))
        number, byte, special = found
        for name, kind in special:
            value = getattr(message, name)
            its = type(value)
            if value is not None and its is not kind and (its is not _Array or value.dtype is not kind):
                _require(value, kind, f"{type(message).__name__}.{name}")
        interrupted = None
        if self._parts:  # a signal handler sends this message while another one is being encoded
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
        raise TypeError(f"a {type(value).__name__} cannot be sent")

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
    """Raises TypeError where a field that must hold an array of this dtype, or an object of this class, does not."""
    if isinstance(kind, type):
        if not isinstance(value, kind):
            raise TypeError(f"{where} is {kind.__name__}, not {type(value).__name__}")
    elif isinstance(value, _Array):
        if value.dtype != kind:
            raise TypeError(f"{where} is an array of {kind}, not of {value.dtype}")
    elif not isinstance(value, array.array):
        raise TypeError(f"{where} is an array of {kind}, not {type(value).__name__}")
    elif np.dtype(value.typecode) != kind:
        raise TypeError(f"{where} is an array of {kind}, not of {np.dtype(value.typecode)}")


def _plain(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of a class or byte order of its own, as one that can travel. Raises TypeError where that would lose something."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("a masked array cannot be sent: its mask would be lost")
    value = np.asarray(value)
    if value.dtype.kind in "biufc":
        value = value.astype(value.dtype.newbyteorder("="), copy=False)
    if value.dtype not in CODES:
        raise TypeError(f"an array of {value.dtype} cannot be sent")
    return value


class FrameDecoder:
    """Makes messages of frames. For one thread at a time.

    Arrays and parts of a message are views of its frame, read-only; they keep it.
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
            found = split(frame)
            error.kind = self.catalogue.messages[found.number - 1] if found.number else None
            error.fields = tuple(
                one if isinstance(one, PLAIN_FIELDS) else None for one in msgspec.msgpack.decode(found.struct)
            )

    # ── what msgspec does not know ──
    def _hook(self, hint: Any, found: Any) -> Any:
        known = self._hints.get(id(hint))
        if known is None:
            known = self._hints[id(hint)] = (_target(hint), hint)
        dtype, code, itemsize = known[0]
        shape = None
        if type(found) is list and found and dtype is not None:
            found, *shape = found
        # Where the bytes are:
        view: Any
        if type(found) is int and found >= 0:
            kind, nbytes, view = found & KIND_MASK, found >> KIND_BITS, self._frame
            start = self._end + gap_before(self._end, nbytes)
            self._end = start + nbytes
            if self._end > self._nbytes:
                raise DecodeError(f"expected a part of {nbytes} bytes, got {max(0, self._nbytes - start)}")
            start += self._first
        elif type(found) is _Ext:
            kind, view, start = found.code, found.data, 0
            nbytes = len(view)
        else:
            raise DecodeError(f"expected an array or part, got {type(found).__name__}")
        # What they are:
        if kind != code:
            wanted = "a part of plain bytes" if dtype is None else f"an array of {dtype}"
            raise DecodeError(f"expected {wanted}, got one of {DTYPES.get(kind, f'kind {kind}')}")
        if dtype is None:
            return _part_of(memoryview(view)[start : start + nbytes].toreadonly())
        if nbytes % itemsize:
            raise DecodeError(f"expected numbers of {itemsize} bytes each, got {nbytes} bytes")
        # frombuffer refuses to make an array of nothing
        made = np.frombuffer(view, dtype, nbytes // itemsize, start) if nbytes else _nothing(dtype)
        if code == BOOL and nbytes and made.view(np.uint8).max() > 1:
            raise DecodeError(f"expected 0 and 1, got {made.view(np.uint8).max()}")
        return made if shape is None else _reshaped(made, shape)


def _part_of(view: memoryview) -> Buffer:
    made = Buffer.__new__(Buffer)
    made._view = view
    return made


def _nothing(dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    made = np.empty(0, dtype)
    made.flags.writeable = False
    return made


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
    """What a field is made into: an array (dtype, code, size of one) or a part (no dtype). There are no others."""
    if typing.get_origin(hint) is np.ndarray:
        dtype = array_dtype(hint)
        return (dtype, CODES[dtype], dtype.itemsize)
    return (None, PLAIN, 1)
