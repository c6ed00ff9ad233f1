"""A list of rows as runs of an earlier list: what stayed is named by its place, what is new is said in full.

A run is (start, length) in the earlier list, or a new row itself. Rows that leave, arrive or change places cost a run
each; `apply_runs(old, find_runs(old, new)) == new` for any two lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Runs = list[tuple[int, int] | str]

CHUNK = 32  # rows compared by one comparison of slices
LOOKAHEAD = 8  # rows searched before an index of all rows is built


def find_runs(old: list[str], new: list[str]) -> Runs:
    """Returns `new` as runs of `old`."""
    runs: Runs = []
    index: dict[str, int] | None = None
    source = position = 0
    while position < len(new):
        length = _equal_length(old, source, new, position)
        if length:
            runs.append((source, length))
            source += length
            position += length
            continue
        row = new[position]
        try:
            source = old.index(row, source, source + LOOKAHEAD)
        except ValueError:
            if index is None:
                index = dict(zip(old, range(len(old)), strict=True))
            start = index.get(row)
            if start is None:
                runs.append(row)
                position += 1
            else:
                source = start
    return runs


def apply_runs(old: Sequence[Any], runs: Runs, filler: Any = None) -> list[Any]:
    """Returns the rows of `old` that the runs name; a new row is itself, or `filler` where one is given."""
    rows: list[Any] = []
    for run in runs:
        if isinstance(run, str):
            rows.append(run if filler is None else filler)
        else:
            start, length = run
            rows += old[start : start + length]
    return rows


def _equal_length(old: list[str], source: int, new: list[str], position: int) -> int:
    """Counts the rows that are equal from these places on."""
    limit = min(len(old) - source, len(new) - position)
    length = 0
    while length < limit:
        end = min(length + CHUNK, limit)
        if old[source + length : source + end] != new[position + length : position + end]:
            break
        length = end
    while length < limit and old[source + length] == new[position + length]:
        length += 1
    return length
