"""The fields of a step that hardly ever change: a plain value is sent only when changed, and all other values always.

Plain are None, a number, a string, an empty container, a short list of ints.
"""

from __future__ import annotations

from typing import Any, NamedTuple

SCALARS = frozenset((type(None), bool, int, float, str))
KINDS: tuple[type, ...] = (list, dict, set)
MAX_INTS = 16  # of a list that is plain

PlainChanges = list[tuple[int, Any]]  # field and value; a container is [index in KINDS, the ints of a list …]
Extras = dict[int, Any]  # field and value, of fields that are not plain


class Ints:
    """The last value of a list of ints. Equals a list of equal ints; elements of other types are not compared."""

    __slots__ = ("values",)

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        values = other.values if isinstance(other, Ints) else other
        return _is_plain(values) and values == self.values

    __hash__ = None  # type: ignore[assignment]


class PlainFields(NamedTuple):
    """The last plain value of each field. Its containers are never handed out."""

    values: tuple[Any, ...]
    kinds: tuple[type, ...]
    containers: tuple[tuple[int, type, list[int]], ...]  # the container fields, with the ints

    @classmethod
    def of(cls, values: list[Any]) -> PlainFields:
        kinds = tuple(list if type(value) is Ints else type(value) for value in values)
        containers = tuple(
            (index, kind, values[index].values if type(values[index]) is Ints else [])
            for index, kind in enumerate(kinds)
            if kind in KINDS
        )
        return cls(tuple(values), kinds, containers)

    @classmethod
    def begin(cls, values: tuple[Any, ...]) -> PlainFields:
        """Returns what a whole step leaves behind."""
        return cls.of([_plain_copy(value) if _is_plain(value) else None for value in values])

    def encode(self, values: tuple[Any, ...]) -> tuple[PlainChanges, Extras, PlainFields]:
        """Returns the changes, the fields that are not plain, and the new last values."""
        # With equal types, an empty container compares by length alone: no element is compared.
        if tuple(map(type, values)) == self.kinds and values == self.values:
            return [], {}, self
        changes: PlainChanges = []
        extras: Extras = {}
        for index, value in enumerate(values):
            if not _is_plain(value):
                extras[index] = value
            elif type(value) is not self.kinds[index] or value != self.values[index]:
                kind = type(value)
                changes.append((index, value if kind in SCALARS else [KINDS.index(kind), *value]))
        return changes, extras, self._with(changes)

    def decode(self, changes: PlainChanges, extras: Extras) -> tuple[list[Any], PlainFields]:
        """Returns the values, with new containers, and the new last values."""
        state = self._with(changes)
        values = list(state.values)
        for index, kind, ints in state.containers:
            values[index] = kind(ints)
        for index, value in extras.items():
            values[index] = value
        return values, state

    def _with(self, changes: PlainChanges) -> PlainFields:
        if not changes:
            return self
        values = list(self.values)
        for index, value in changes:
            if isinstance(value, list):
                kind, *ints = value
                value = Ints(ints) if ints else KINDS[kind]()
            values[index] = value
        return self.of(values)


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in SCALARS or (kind in KINDS and not value):
        return True
    return kind is list and len(value) <= MAX_INTS and set(map(type, value)) == {int}


def _plain_copy(value: Any) -> Any:
    if type(value) in SCALARS:
        return value
    return Ints(value.copy()) if value else type(value)()
