"""Splits a frame into the bytes of its fields. The pieces together are the whole frame, to the byte.

The classes of messages are not needed, only the description that a channel carries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from penstock.codec.catalogue import Described, Schema
from penstock.codec.frame import HEAD_NBYTES, KIND_BITS, WITH_PARTS, WRONG, gap_before, split
from penstock.errors import DecodeError

PLAIN = "bytes"  # the name of a message of a channel without classes
HEAD = "(head)"  # number of the message, lengths, and how many fields there are
PADDING = "(padding)"
UNKNOWN = "(more than described)"
MAX_DEPTH = 8  # structs within structs

RAW_LIST = msgspec.msgpack.Decoder(list[msgspec.Raw])
ANYTHING = msgspec.msgpack.Decoder()


class FieldBytes(NamedTuple):
    """The bytes of one field, in the struct and in parts."""

    name: str
    content: bytes


class FrameFields(NamedTuple):
    name: str
    pieces: list[FieldBytes]


class EncodedField(NamedTuple):
    name: str
    raw: bytes
    hint: str


class FrameLayout:
    """The layout of the frames of one channel."""

    def __init__(self, schema: bytes) -> None:
        self.schema = Schema.decode(schema) if schema else None
        self._structs: dict[str, Described] = {}
        if self.schema is not None:
            self._structs = {described.name: described for described in (*self.schema.messages, *self.schema.structs)}

    def take_apart(self, frame: bytes) -> FrameFields:
        """Splits a frame into fields. Raises DecodeError if the frame does not have this layout."""
        if self.schema is None:
            return FrameFields(PLAIN, [FieldBytes("", frame)])
        number, encoded, parts = split(frame)
        if not 1 <= number <= len(self.schema.messages):
            raise DecodeError(f"expected a message of 1 to {len(self.schema.messages)}, got {number}")
        described = self.schema.messages[number - 1]
        try:
            fields = list(self._fields(bytes(encoded), described, "", 0))
            pieces = [FieldBytes(encoded_field.name, encoded_field.raw) for encoded_field in fields]
            pieces += self._parts(fields, bytes(parts))
        except WRONG as error:
            raise DecodeError(f"{described.name}: {error}") from None
        pieces.append(FieldBytes(HEAD, frame[: 1 if frame[0] < WITH_PARTS else HEAD_NBYTES]))
        pieces.append(FieldBytes(PADDING, bytes(len(frame) - sum(len(piece.content) for piece in pieces))))
        return FrameFields(described.name, merged(pieces))

    def _fields(self, encoded: bytes, described: Described, prefix: str, depth: int) -> Iterator[EncodedField]:
        """Yields a struct's fields in order, with those of inner structs; then the bytes around them."""
        raws = [bytes(raw) for raw in RAW_LIST.decode(encoded)]
        for index, raw in enumerate(raws):
            known = index < len(described.fields)
            name, hint = described.fields[index] if known else (UNKNOWN, "")
            name = prefix + (name or "(tag)")
            inner = self._struct_of(hint)
            if inner is not None and is_array(raw) and depth < MAX_DEPTH:
                yield from self._fields(raw, inner, name + ".", depth + 1)
            else:
                yield EncodedField(name, raw, hint)
        around = len(encoded) - sum(map(len, raws))
        yield EncodedField(prefix[:-1] or HEAD, encoded[:around], "")

    def _struct_of(self, hint: str) -> Described | None:
        """Returns the struct type of a field, or None if it has another type."""
        choices = [choice for choice in parted(hint, " | ") if choice != "None"]
        return self._structs.get(choices[0]) if len(choices) == 1 else None

    def _parts(self, fields: Iterable[EncodedField], parts: bytes) -> Iterator[FieldBytes]:
        """Yields the parts behind the struct, which are in the order in which the fields name them."""
        at = 0
        for field in fields:
            for number in self._named(ANYTHING.decode(field.raw), field.hint) if field.hint else ():
                nbytes = number >> KIND_BITS
                at += gap_before(at, nbytes)
                if nbytes < 0 or at + nbytes > len(parts):
                    raise ValueError(f"{field.name}: expected a part of {nbytes} bytes, got {max(len(parts) - at, 0)}")
                yield FieldBytes(field.name, parts[at : at + nbytes])
                at += nbytes
        yield FieldBytes(UNKNOWN, parts[at:])

    def _named(self, value: Any, hint: str) -> Iterator[int]:
        """Yields the numbers in a value that name parts. `hint`: the described type of the value."""
        choices = [choice for choice in parted(hint, " | ") if choice != "None"]
        if value is None or len(choices) != 1:
            return
        name, _, inside = choices[0].partition("[")
        inside = inside.rpartition("]")[0]
        if name == "array" and type(value) is list and value:
            value = value[0]  # the others are its shape
        if name in ("array", "buffer"):
            if type(value) is int:
                yield value
        elif name == "tuple" and not inside.endswith("…") and type(value) is list:
            for element, element_hint in zip(value, parted(inside, ", ")):
                yield from self._named(element, element_hint)
        elif name in ("list", "tuple", "set", "frozenset") and type(value) is list:
            for element in value:
                yield from self._named(element, parted(inside, ", ")[0])
        elif name == "dict" and type(value) is dict:
            for element in value.values():
                yield from self._named(element, parted(inside, ", ")[-1])
        elif name in self._structs and type(value) is list:
            for element, (_, element_hint) in zip(value, self._structs[name].fields):
                yield from self._named(element, element_hint)


def is_array(raw: bytes) -> bool:
    return 0x90 <= raw[0] <= 0x9F or raw[0] in (0xDC, 0xDD)


def parted(hint: str, separator: str) -> list[str]:
    """Splits a type hint at separators that are not within brackets."""
    parts, depth, begin = [], 0, 0
    for at, letter in enumerate(hint):
        depth += (letter == "[") - (letter == "]")
        if depth == 0 and hint.startswith(separator, at):
            parts.append(hint[begin:at])
            begin = at + len(separator)
    return [*parts, hint[begin:]]


def merged(pieces: Iterable[FieldBytes]) -> list[FieldBytes]:
    """Joins the pieces of each name, and drops empty ones."""
    contents: dict[str, bytes] = {}
    for name, content in pieces:
        if content:
            contents[name] = contents.get(name, b"") + content
    return [FieldBytes(name, content) for name, content in contents.items()]


def decode(frame: bytes) -> Any:
    """Decodes the struct without its classes: into numbers, texts, lists."""
    return ANYTHING.decode(split(frame).struct)


def encode(value: Any) -> bytes:
    """Encodes the struct again."""
    return msgspec.msgpack.encode(value)
