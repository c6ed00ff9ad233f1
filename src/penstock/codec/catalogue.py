"""Which messages a channel carries: a number for each class, and a description by which two builds compare theirs.

A message is a `msgspec.Struct` with `array_like=True`; everything in it has a type that says what it is. Leaves to the
frame how they become bytes.
"""

from __future__ import annotations

import collections.abc
import enum
import hashlib
import inspect
import types
import typing
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import msgspec
import numpy as np

from penstock.codec.buffer import Buffer
from penstock.codec.dtypes import CODES
from penstock.errors import DecodeError, LayoutMismatch

MAX_MESSAGES = 127  # the first byte of a frame has seven bits for the number
SCALARS: dict[Any, str] = {
    None: "None",
    type(None): "None",
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    bytes: "bytes",
    bytearray: "bytearray",
    memoryview: "memoryview",
    Buffer: "buffer",
}
SEQUENCES: dict[Any, str] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    collections.abc.Sequence: "list",
}


class Described(msgspec.Struct, frozen=True, array_like=True):
    """A class of messages, or one that stands inside of one, in words."""

    name: str
    fields: tuple[tuple[str, str], ...]


class Schema(msgspec.Struct, frozen=True):
    """Describes a channel's messages in its segment: attaching processes compare it, and observers read by it."""

    penstock: str
    fingerprint: str
    messages: tuple[Described, ...]  # the first has number 1
    structs: tuple[Described, ...]

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, encoded: bytes) -> Schema:
        try:
            return msgspec.json.decode(encoded, type=cls)
        except (msgspec.DecodeError, RecursionError) as error:
            raise LayoutMismatch(f"what lies where the messages are described is no description: {error}") from None


class Catalogue:
    """The classes of a channel, checked once. `Catalogue(Step, Stop)`."""

    def __init__(self, *messages: type[msgspec.Struct]) -> None:
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise ValueError(f"a channel has 1 to {MAX_MESSAGES} classes of messages, not {len(messages)}")
        self.messages = messages
        self.structs: dict[type, Described] = {}
        self.special: dict[type, list[tuple[str, Any]]] = {}  # fields that msgspec would not look at: see _special
        for cls in messages:
            self._add(cls, "a message")
            msgspec.msgpack.Decoder(cls)  # what msgspec cannot tell apart is a TypeError here, and not later
        names = [cls.__name__ for cls in self.structs]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise TypeError(f"two classes are called {twice}: those of a channel have names of their own")
        described = tuple(self.structs[cls] for cls in messages)
        others = tuple(one for cls, one in self.structs.items() if cls not in messages)
        self.fingerprint = hashlib.sha256(msgspec.json.encode((described, others))).hexdigest()[:16]
        self.schema = Schema(version("penstock"), self.fingerprint, described, others)

    @classmethod
    def of(cls, type: Any) -> Catalogue:
        """The classes of a union (`Step | Stop`), or one class. Raises TypeError for what no channel carries."""
        is_union = typing.get_origin(type) in (typing.Union, types.UnionType)
        messages = typing.get_args(type) if is_union else (type,)
        for message in messages:
            if not (inspect.isclass(message) and issubclass(message, msgspec.Struct)):
                raise TypeError(
                    "a channel carries bytes, Buffer, a subclass of msgspec.Struct or a union of such (Step | Stop), "
                    f"not {type!r:.200}"
                )
        return cls(*messages)

    def __reduce__(self) -> tuple[Any, ...]:
        return Catalogue, self.messages  # what it found out of them is found out again

    def foreign(self, cls: type) -> TypeError:
        return TypeError(f"{cls.__name__} is not a message of this channel, which carries {self.names()}")

    def names(self) -> str:
        return ", ".join(cls.__name__ for cls in self.messages)

    # ── what may be in a message ──
    def _add(self, cls: Any, what: str) -> None:
        if not (isinstance(cls, type) and issubclass(cls, msgspec.Struct)):
            raise TypeError(f"{what} is a msgspec.Struct, not {cls!r}")
        if cls in self.structs:
            return
        config = cls.__struct_config__
        if not config.array_like:
            raise TypeError(f"{cls.__name__}, {what}, is encoded with the names of its fields: say array_like=True")
        self.structs[cls] = Described(cls.__name__, ())  # it may hold itself
        hints = typing.get_type_hints(cls, include_extras=True)
        fields = []
        special = []
        for field in msgspec.structs.fields(cls):
            where = f"{cls.__name__}.{field.name}"
            fields.append((field.name, self._describe(hints[field.name], where)))
            special += [(field.name, one) for one in map(_special, _choices(hints[field.name])) if one is not None]
        if config.tag is not None:
            fields.insert(0, ("", f"tag {config.tag!r}"))
        self.structs[cls] = Described(cls.__name__, tuple(fields))
        self.special[cls] = special

    def _describe(self, hint: Any, where: str) -> str:
        origin = typing.get_origin(hint)
        if origin is typing.Annotated:
            base, *notes = typing.get_args(hint)
            limits = "".join(f" {text}" for note in notes if (text := _limits(note)))
            return self._describe(base, where) + limits
        # By identity and type: hint may be something that is not hashable or not comparable.
        if hint in SCALARS:
            return SCALARS[hint]
        if origin in (typing.Union, types.UnionType):
            return " | ".join(sorted(self._describe(one, where) for one in typing.get_args(hint)))
        if origin is typing.Literal:
            return "one of " + ", ".join(sorted(repr(value) for value in typing.get_args(hint)))
        if origin is np.ndarray:
            return f"array[{array_dtype(hint, where)}]"
        if origin in SEQUENCES:
            items = ["…" if one is ... else self._describe(one, where) for one in typing.get_args(hint)]
            return f"{SEQUENCES[origin]}[{', '.join(items)}]"
        if origin in (dict, collections.abc.Mapping):
            key, value = typing.get_args(hint)
            return f"dict[{self._describe(key, where)}, {self._describe(value, where)}]"
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return "one of " + ", ".join(sorted(repr(member.value) for member in hint))
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            self._add(hint, f"in {where}")
            return hint.__name__
        raise TypeError(
            f"{where} is {hint!r}: a message is made of numbers, text, bytes, arrays (NDArray[np.int32]), parts, "
            "enums, lists, tuples, sets, dicts and other such structs, and says which"
        )

    # ── the handshake ──
    def require_same(self, other: Schema, name: str) -> None:
        """Raises LayoutMismatch, which says how they differ."""
        if other.fingerprint == self.fingerprint:
            return
        ours, theirs = self.schema, other
        lines = list(_differences(ours, theirs)) or ["the same words, but not the same order of classes"]
        raise LayoutMismatch(
            f"'{name}' carries other messages: it was made by penstock {theirs.penstock} (fingerprint "
            f"{theirs.fingerprint}), and this is penstock {ours.penstock} ({ours.fingerprint}): " + "; ".join(lines)
        )

    def named_path(self, cls: type, text: str) -> str:
        """An error's `$[3][0]` with the names of fields instead of their numbers."""
        head, found, path = text.rpartition(" - at `$")
        if not found:
            return text
        return f"{head} at ${_named(cls, path.rstrip('`'))}"


def schema_differences(ours: bytes, theirs: bytes) -> list[str]:
    """Returns how the messages of two channels differ, as their segments describe them; empty: they do not."""
    if ours == theirs:
        return []
    if not ours or not theirs:
        return [f"it carries {'messages' if ours else 'bytes'} here, {'messages' if theirs else 'bytes'} there"]
    here, there = Schema.decode(ours), Schema.decode(theirs)
    if here.fingerprint == there.fingerprint:
        return []
    return list(_differences(here, there)) or ["the same words, but not the same order of classes"]


def _special(hint: Any) -> Any:
    """What travels as a number that stands for something else: an array (its dtype) or Buffer; or None."""
    if typing.get_origin(hint) is np.ndarray:
        return array_dtype(hint)
    return Buffer if hint is Buffer else None


def _choices(hint: Any) -> tuple[Any, ...]:
    """A field's type without notes; of a union, its members."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def array_dtype(hint: Any, where: str = "an array") -> np.dtype[Any]:
    """Of `NDArray[np.int32]`: int32. Raises TypeError where it does not say one that can travel."""
    arguments = typing.get_args(hint)
    kind = typing.get_args(arguments[1])[0] if len(arguments) == 2 and typing.get_args(arguments[1]) else None
    try:
        found = np.dtype(kind) if kind is not None else None
    except TypeError:
        found = None
    if found is None or found not in CODES:
        raise TypeError(f"{where} is {hint!r}: say of which numbers, as NDArray[np.int32]")
    made: np.dtype[Any] = found
    return made


def _limits(note: Any) -> str:
    if not isinstance(note, msgspec.Meta):
        return ""
    names = ("gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length")
    return " ".join(f"{name}={value}" for name in names if (value := getattr(note, name)) is not None)


def _differences(ours: Schema, theirs: Schema) -> Iterator[str]:
    here = {one.name: one for one in ours.messages + ours.structs}
    there = {one.name: one for one in theirs.messages + theirs.structs}
    for name in sorted(here.keys() - there.keys()):
        yield f"{name} is not known there"
    for name in sorted(there.keys() - here.keys()):
        yield f"{name} is not known here"
    for name in sorted(here.keys() & there.keys()):
        a, b = here[name].fields, there[name].fields
        for (field_a, type_a), (field_b, type_b) in zip(a, b, strict=False):
            if (field_a, type_a) != (field_b, type_b):
                yield f"{name} has '{field_b}: {type_b}' there, '{field_a}: {type_a}' here"
        for field, what in a[len(b) :]:
            yield f"{name} has no '{field}: {what}' there"
        for field, what in b[len(a) :]:
            yield f"{name} has no '{field}: {what}' here"
    order = [one.name for one in ours.messages], [one.name for one in theirs.messages]
    for name in sorted(here.keys() & there.keys()):
        if name in order[0] and name not in order[1]:
            yield f"{name} is a message of its own here, and only part of one there"
        if name in order[1] and name not in order[0]:
            yield f"{name} is a message of its own there, and only part of one here"
    if sorted(order[0]) == sorted(order[1]) and order[0] != order[1]:
        yield f"the order is {', '.join(order[1])} there, {', '.join(order[0])} here"


def _named(cls: Any, path: str) -> str:
    """`[3][0]` seen from a struct of this class: `.requests[0]`. What cannot be followed is left as it is."""
    out = ""
    hint: Any = cls
    rest = path
    while rest.startswith("["):
        inside, _, rest = rest[1:].partition("]")
        choices = [one for one in _choices(hint) if one is not type(None)] if hint is not None else []
        hint = None
        found = choices[0] if len(choices) == 1 else None
        origin = typing.get_origin(found)
        if isinstance(found, type) and issubclass(found, msgspec.Struct) and inside.isdigit():
            index = int(inside) - (found.__struct_config__.tag is not None)
            fields = msgspec.structs.fields(found)
            if 0 <= index < len(fields):
                out += f".{fields[index].name}"
                hint = typing.get_type_hints(found, include_extras=True)[fields[index].name]
                continue
        elif origin in SEQUENCES:
            items = typing.get_args(found)
            if len(items) == 1 or ... in items:
                hint = items[0]
            elif inside.isdigit() and int(inside) < len(items):
                hint = items[int(inside)]
        elif origin in (dict, collections.abc.Mapping):
            hint = typing.get_args(found)[1]
        out += f"[{inside}]"
    return out + rest


def decode_error(catalogue: Catalogue, cls: type, error: Exception) -> DecodeError:
    text = catalogue.named_path(cls, str(error))
    return DecodeError(f"{cls.__name__}: {text[:1].lower()}{text[1:]}")
