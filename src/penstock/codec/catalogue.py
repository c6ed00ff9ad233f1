"""The messages of a channel: a number for each class, and a description that two builds compare.

A message is a `msgspec.Struct` with `array_like=True`, and all fields have exact types. The frame turns messages into
bytes.
"""

from __future__ import annotations

import collections.abc
import enum
import functools
import hashlib
import inspect
import types
import typing
from collections.abc import Iterator
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
    """A class of messages or of structs inside, in words."""

    name: str
    fields: tuple[tuple[str, str], ...]


class Schema(msgspec.Struct, frozen=True):
    """Describes a channel's messages in the segment, for attaching processes and for observers."""

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
            raise LayoutMismatch(
                f"the segment has no description of its messages: it was created by another build ({error})"
            ) from None


class Catalogue:
    """The classes of a channel, checked once. `Catalogue(Step, Stop)`."""

    def __init__(self, *messages: type[msgspec.Struct]) -> None:
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise ValueError(f"expected 1 to {MAX_MESSAGES} classes of messages, got {len(messages)}")
        self.messages = messages
        self.structs: dict[type, Described] = {}
        self.special: dict[type, list[tuple[str, Any]]] = {}  # fields that msgspec would not look at: see _special
        for cls in messages:
            try:
                self._add(cls, "a message")
                msgspec.msgpack.Decoder(cls)  # what msgspec cannot tell apart is a TypeError here, and not later
            except RecursionError:
                raise TypeError(f"expected type aliases that do not contain themselves in {cls.__name__}") from None
        names = [cls.__name__ for cls in self.structs]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise TypeError(f"expected classes with different names, got two named {twice}: rename one")
        described = tuple(self.structs[cls] for cls in messages)
        others = tuple(struct for cls, struct in self.structs.items() if cls not in messages)
        self._described = described, others
        self.fingerprint = hashlib.sha256(msgspec.json.encode(self._described)).hexdigest()[:16]

    @functools.cached_property
    def schema(self) -> Schema:
        """The description for the segment. Only the process that creates a channel needs it, and the version in it."""
        from importlib.metadata import version  # 12 ms

        return Schema(version("penstock"), self.fingerprint, *self._described)

    @classmethod
    def of(cls, type: Any) -> Catalogue:
        """Returns the catalogue of a union (`Step | Stop`) or of a class. Raises TypeError for any other type."""
        type = expand_alias(type)
        is_union = typing.get_origin(type) in (typing.Union, types.UnionType)
        messages = typing.get_args(type) if is_union else (type,)
        for message in messages:
            if not (inspect.isclass(message) and issubclass(message, msgspec.Struct)):
                raise TypeError(
                    "expected bytes, Buffer, a subclass of msgspec.Struct or a union of subclasses (Step | Stop), got "
                    f"{type!r:.200}"
                )
        return cls(*messages)

    def __reduce__(self) -> tuple[Any, ...]:
        return Catalogue, self.messages  # the rest is derived again

    def foreign(self, cls: type) -> TypeError:
        return TypeError(f"{cls.__name__} is not a message of this channel, which carries {self.names()}")

    def names(self) -> str:
        return ", ".join(cls.__name__ for cls in self.messages)

    # ── what may be in a message ──
    def _add(self, cls: Any, what: str) -> None:
        if not (isinstance(cls, type) and issubclass(cls, msgspec.Struct)):
            raise TypeError(f"expected {what} to be a subclass of msgspec.Struct, got {cls!r}")
        if cls in self.structs:
            return
        config = cls.__struct_config__
        if not config.array_like:
            raise TypeError(
                f"expected a struct without field names for {cls.__name__}, {what}: define it with array_like=True"
            )
        self.structs[cls] = Described(cls.__name__, ())  # a struct may contain the same class
        hints = typing.get_type_hints(cls, include_extras=True)
        fields = []
        special = []
        for field in msgspec.structs.fields(cls):
            where = f"{cls.__name__}.{field.name}"
            fields.append((field.name, self._describe(hints[field.name], where)))
            targets = map(_special, _choices(hints[field.name]))
            special += [(field.name, target) for target in targets if target is not None]
        if config.tag is not None:
            fields.insert(0, ("", f"tag {config.tag!r}"))
        self.structs[cls] = Described(cls.__name__, tuple(fields))
        self.special[cls] = special

    def _describe(self, hint: Any, where: str) -> str:
        hint = expand_alias(hint)
        origin = typing.get_origin(hint)
        if origin is typing.Annotated:
            base, *notes = typing.get_args(hint)
            limits = "".join(f" {text}" for note in notes if (text := _limits(note)))
            return self._describe(base, where) + limits
        # By identity and type: hint may be something that is not hashable or not comparable.
        if hint in SCALARS:
            return SCALARS[hint]
        if origin in (typing.Union, types.UnionType):
            return " | ".join(sorted(self._describe(member, where) for member in typing.get_args(hint)))
        if origin is typing.Literal:
            return "one of " + ", ".join(sorted(repr(value) for value in typing.get_args(hint)))
        if origin is np.ndarray:
            return f"array[{array_dtype(hint, where)}]"
        if origin in SEQUENCES:
            items = ["…" if item is ... else self._describe(item, where) for item in typing.get_args(hint)]
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
            "expected numbers, text, bytes, arrays (NDArray[np.int32]), Buffer, enums, lists, tuples, sets, dicts or "
            f"structs of these at {where}, got {hint!r}"
        )

    # ── the handshake ──
    def require_same(self, other: Schema, name: str) -> None:
        """Raises LayoutMismatch with the differences."""
        if other.fingerprint == self.fingerprint:
            return
        own = self.schema
        lines = list(_differences(own, other)) or ["the same words, but not the same order of classes"]
        raise LayoutMismatch(
            f"'{name}' carries other messages: it was made by penstock {other.penstock} (fingerprint "
            f"{other.fingerprint}), and this is penstock {own.penstock} ({own.fingerprint}): " + "; ".join(lines)
        )

    def named_path(self, cls: type, text: str) -> str:
        """An error's `$[3][0]` with the names of fields instead of their numbers."""
        head, has_path, path = text.rpartition(" - at `$")
        if not has_path:
            return text
        return f"{head} at ${_named(cls, path.rstrip('`'))}"


def schema_differences(own: bytes, other: bytes) -> list[str]:
    """Returns the differences between the descriptions in two segments; empty: the messages are equal."""
    if own == other:
        return []
    if not own or not other:
        return [f"it carries {'messages' if own else 'bytes'} here, {'messages' if other else 'bytes'} there"]
    own_schema, other_schema = Schema.decode(own), Schema.decode(other)
    if own_schema.fingerprint == other_schema.fingerprint:
        return []
    return list(_differences(own_schema, other_schema)) or ["the same words, but not the same order of classes"]


def expand_alias(hint: Any) -> Any:
    """Returns the type behind a type alias (`type Ids = NDArray[np.int32]`), or the hint itself. NumPy 2.5 has made
    `NDArray` an alias of this kind."""
    alias = typing.get_origin(hint) or hint
    if not hasattr(alias, "__value__"):  # typing.TypeAliasType is new in Python 3.12
        return hint
    arguments = dict(zip(alias.__type_params__, typing.get_args(hint), strict=False))
    value = alias.__value__
    parameters = getattr(value, "__parameters__", ())
    if arguments and parameters:
        value = value[tuple(arguments.get(parameter, parameter) for parameter in parameters)]
    return expand_alias(value)


def _special(hint: Any) -> Any:
    """Returns the dtype of an array, or Buffer: in the struct, a number stands for these. None: another type."""
    if typing.get_origin(hint) is np.ndarray:
        return array_dtype(hint)
    return Buffer if hint is Buffer else None


def _choices(hint: Any) -> tuple[Any, ...]:
    """A type without notes and aliases; of a union, its members."""
    hint = expand_alias(hint)
    if typing.get_origin(hint) is typing.Annotated:
        return _choices(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(choice for member in typing.get_args(hint) for choice in _choices(member))
    return (hint,)


def array_dtype(hint: Any, where: str = "an array") -> np.dtype[Any]:
    """Returns int32 for `NDArray[np.int32]`. Raises TypeError for a hint without a supported dtype."""
    arguments = typing.get_args(hint)
    kind = typing.get_args(arguments[1])[0] if len(arguments) == 2 and typing.get_args(arguments[1]) else None
    try:
        dtype: np.dtype[Any] | None = np.dtype(kind) if kind is not None else None
    except TypeError:
        dtype = None
    if dtype is None or dtype not in CODES:
        raise TypeError(f"expected an array with its dtype at {where}, as NDArray[np.int32], got {hint!r}")
    return dtype


def _limits(note: Any) -> str:
    if not isinstance(note, msgspec.Meta):
        return ""
    names = ("gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length")
    return " ".join(f"{name}={value}" for name in names if (value := getattr(note, name)) is not None)


def _differences(own: Schema, other: Schema) -> Iterator[str]:
    here = {struct.name: struct for struct in own.messages + own.structs}
    there = {struct.name: struct for struct in other.messages + other.structs}
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
    order = [message.name for message in own.messages], [message.name for message in other.messages]
    for name in sorted(here.keys() & there.keys()):
        if name in order[0] and name not in order[1]:
            yield f"{name} is a message of its own here, and only part of one there"
        if name in order[1] and name not in order[0]:
            yield f"{name} is a message of its own there, and only part of one here"
    if sorted(order[0]) == sorted(order[1]) and order[0] != order[1]:
        yield f"the order is {', '.join(order[1])} there, {', '.join(order[0])} here"


def _named(cls: Any, path: str) -> str:
    """Returns `.requests[0]` for `[3][0]` of a struct of this class. Keeps the numbers that lead to no field."""
    out = ""
    hint: Any = cls
    rest = path
    while rest.startswith("["):
        inside, _, rest = rest[1:].partition("]")
        choices = [choice for choice in _choices(hint) if choice is not type(None)] if hint is not None else []
        hint = None
        chosen = choices[0] if len(choices) == 1 else None
        origin = typing.get_origin(chosen)
        if isinstance(chosen, type) and issubclass(chosen, msgspec.Struct) and inside.isdigit():
            index = int(inside) - (chosen.__struct_config__.tag is not None)
            fields = msgspec.structs.fields(chosen)
            if 0 <= index < len(fields):
                out += f".{fields[index].name}"
                hint = typing.get_type_hints(chosen, include_extras=True)[fields[index].name]
                continue
        elif origin in SEQUENCES:
            items = typing.get_args(chosen)
            if len(items) == 1 or ... in items:
                hint = items[0]
            elif inside.isdigit() and int(inside) < len(items):
                hint = items[int(inside)]
        elif origin in (dict, collections.abc.Mapping):
            hint = typing.get_args(chosen)[1]
        out += f"[{inside}]"
    return out + rest


def decode_error(catalogue: Catalogue, cls: type, error: Exception) -> DecodeError:
    text = catalogue.named_path(cls, str(error))
    return DecodeError(f"{cls.__name__}: {text[:1].lower()}{text[1:]}")
