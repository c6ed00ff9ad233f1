"""The fields of a step that hardly ever change: a plain value (None, a number, a string, an empty container) is sent
when it differs from the last one, anything else whenever it occurs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

SCALARS = frozenset((type(None), bool, int, float, str))
EMPTY_KINDS: tuple[type, ...] = (list, dict, set)

PlainChanges = list[tuple[int, Any]]  # field and value; an empty container is [its index in EMPTY_KINDS]
Extras = dict[int, Any]  # field and value, of those that are not plain


class PlainFields(NamedTuple):
    """The last plain value of each field. Its containers are never handed out."""

    values: tuple[Any, ...]
    kinds: tuple[type, ...]
    containers: tuple[tuple[int, type], ...]  # the fields that are empty containers

    @classmethod
    def of(cls, values: list[Any]) -> PlainFields:
        kinds = tuple(map(type, values))
        containers = tuple((index, kind) for index, kind in enumerate(kinds) if kind in EMPTY_KINDS)
        return cls(tuple(values), kinds, containers)

    @classmethod
    def begin(cls, values: tuple[Any, ...]) -> PlainFields:
        """Returns what a whole step leaves behind."""
        return cls.of([_plain_copy(value) if _is_plain(value) else None for value in values])

    def encode(self, values: tuple[Any, ...]) -> tuple[PlainChanges, Extras, PlainFields]:
        """Returns the changes, the fields that are not plain, and what is then the last."""
        # Of the same types, an empty container compares by its length alone: no element is asked whether it is equal.
        if tuple(map(type, values)) == self.kinds and values == self.values:
            return [], {}, self
        changes: PlainChanges = []
        extras: Extras = {}
        for index, value in enumerate(values):
            if not _is_plain(value):
                extras[index] = value
            elif type(value) is not self.kinds[index] or value != self.values[index]:
                kind = type(value)
                changes.append((index, value if kind in SCALARS else [EMPTY_KINDS.index(kind)]))
        return changes, extras, self._with(changes)

    def decode(self, changes: PlainChanges, extras: Extras) -> tuple[list[Any], PlainFields]:
        """Returns the values, with containers of their own, and what is then the last."""
        state = self._with(changes)
        values = list(state.values)
        for index, kind in state.containers:
            values[index] = kind()
        for index, value in extras.items():
            values[index] = value
        return values, state

    def _with(self, changes: PlainChanges) -> PlainFields:
        if not changes:
            return self
        values = list(self.values)
        for index, value in changes:
            values[index] = EMPTY_KINDS[value[0]]() if isinstance(value, list) else value
        return self.of(values)


def _is_plain(value: Any) -> bool:
    kind = type(value)
    return kind in SCALARS or (kind in EMPTY_KINDS and not value)


def _plain_copy(value: Any) -> Any:
    return value if type(value) in SCALARS else type(value)()
