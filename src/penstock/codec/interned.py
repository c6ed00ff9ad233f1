"""Values that repeat: written out once for each receiver, then named by a small number.

Leaves to the frame where definitions lie, and to the sender who lacks which.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Generic, TypeVar

import msgspec

from penstock.errors import DecodeError

INTERNED = 256  # numbers per sender: the largest takes two bytes; the value used longest ago loses its number

_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()


class Interned(Generic[_T]):
    """A value that many messages carry: `Interned(Settings(...))`, and a field `settings: Interned[Settings]`.

    It is as it was when it was wrapped: what is done to the value afterwards does not travel. Equal values are one.
    """

    __slots__ = ("_encoded", "_value")

    def __init__(self, value: _T) -> None:
        self._value = value
        self._encoded = _encoder.encode(value)

    @property
    def value(self) -> _T:
        return self._value

    @property
    def encoded(self) -> bytes:
        """The value as it travels."""
        return self._encoded

    def __deepcopy__(self, _: Any) -> Interned[_T]:
        return self  # what travels is as it was when it was wrapped

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Interned):
            return NotImplemented
        return type(self._value) is type(other._value) and self._encoded == other._encoded

    def __hash__(self) -> int:
        return hash(self._encoded)

    def __repr__(self) -> str:
        return f"Interned({self._value!r})"


def received(value: _T, encoded: bytes) -> Interned[_T]:
    """One whose bytes are at hand."""
    made: Interned[_T] = Interned.__new__(Interned)
    made._value, made._encoded = value, encoded
    return made


Key = tuple[type, bytes]


class Names:
    """The sender's side: which values have which number, and which numbers every receiver knows.

    A number counts as known once a frame that defines it has been sent; a frame that uses others defines them again.
    """

    def __init__(self, most: int = INTERNED) -> None:
        self._most = most
        self._numbers: OrderedDict[Key, int] = OrderedDict()  # in the order of their last use
        self._known: set[int] = set()
        self._used: dict[int, Key] = {}  # by the frame that is being made

    def begin(self) -> None:
        """A frame is being made."""
        if self._used:
            self._used = {}

    def number(self, interned: Interned[Any]) -> int:
        key = (type(interned._value), interned._encoded)
        number = self._numbers.get(key)
        if number is None:
            number = self._give(key)
        else:
            self._numbers.move_to_end(key)
        self._used[number] = key
        return number

    def _give(self, key: Key) -> int:
        number = len(self._numbers)
        if number == self._most:
            oldest = next((old for old, its in self._numbers.items() if its not in self._used), None)
            if oldest is None:
                raise ValueError(f"a message with more than {self._most} different interned values")
            number = self._numbers.pop(oldest)
            self._known.discard(number)
        self._numbers[key] = number
        return number

    def unknown(self) -> list[tuple[int, Key]]:
        """What the frame must define, for all or for one who lacks it."""
        return [one for one in self._used.items() if one[0] not in self._known] if self._used else []

    def sent(self) -> None:
        if self._used:
            self._known.update(self._used)

    def forget(self) -> None:
        """Somebody came who knows nothing yet."""
        self._known.clear()


class Values:
    """The receiver's side: what the numbers of one sender mean."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[type, Any]] = {}

    def define(self, number: int, cls: type, interned: Any) -> None:
        self._known[number] = (cls, interned)

    def forget(self, number: int) -> None:
        self._known.pop(number, None)

    def value(self, number: object, cls: type) -> Any:
        found = self._known.get(number) if type(number) is int else None
        if found is None:
            raise DecodeError(f"expected the number of an interned {cls.__name__}, got {number!r}")
        if found[0] is not cls:
            raise DecodeError(f"expected an interned {cls.__name__}, got one of {found[0].__name__}")
        return found[1]
