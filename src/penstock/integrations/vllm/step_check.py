"""Compares a message made of a change with the one that was pickled beside it: types, values, order of keys."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np

from penstock.errors import PenstockError


class StepMismatch(PenstockError):
    """A message made of a change is not the one that was sent: our error. The sentence names the field."""


def require_equal(actual: Any, expected: Any, name: str) -> None:
    """Raises StepMismatch unless the two are equal."""
    if difference := find_difference(actual, expected):
        raise StepMismatch(
            f"{name} made another message than was sent, at {difference}; leave steps out of PENSTOCK_VLLM"
        )


def find_difference(actual: Any, expected: Any, path: str = "$") -> str | None:
    """Returns the first place where the two differ, and how; None if they are equal."""
    if type(actual) is not type(expected):
        return f"{path}: {type(actual).__name__} in place of {type(expected).__name__}"
    if isinstance(expected, dict):
        if list(actual) != list(expected):
            return f"{path}: keys {list(actual)!r} in place of {list(expected)!r}"
        return _first((actual[key], value, f"{path}[{key!r}]") for key, value in expected.items())
    if isinstance(expected, list | tuple):
        if len(actual) != len(expected):
            return f"{path}: {len(actual)} items in place of {len(expected)}"
        return _first((actual[index], value, f"{path}[{index}]") for index, value in enumerate(expected))
    if dataclasses.is_dataclass(expected) or isinstance(expected, msgspec.Struct):
        names = _field_names(expected)
        if names != _field_names(actual):
            return f"{path}: fields {_field_names(actual)} in place of {names}"
        return _first((getattr(actual, name), getattr(expected, name), f"{path}.{name}") for name in names)
    if isinstance(expected, np.ndarray) or hasattr(expected, "__torch_function__"):
        is_equal = (
            actual.shape == expected.shape and actual.dtype == expected.dtype and bool((actual == expected).all())
        )
    else:
        is_equal = bool(actual == expected) or (actual != actual and expected != expected)
    return None if is_equal else f"{path}: {actual!r} in place of {expected!r}"


def _field_names(value: Any) -> list[str]:
    if isinstance(value, msgspec.Struct):
        return list(value.__struct_fields__)
    names = [field.name for field in dataclasses.fields(value)]
    return names + [name for name in getattr(value, "__dict__", ()) if name not in names]


def _first(pairs: Any) -> str | None:
    return next(
        (difference for actual, expected, path in pairs if (difference := find_difference(actual, expected, path))),
        None,
    )
