"""Columns of a step and of the batch: their types, and how rows of Python become arrays and come back checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.engine.protocol.messages import Inputs, Ints, Joined, Logprobs, SamplingParams, Slots
from penstock.errors import DecodeError
from penstock.tensor import Handle

FREE, RUNNING, PREEMPTED = 0, 1, 2
STATUS = ("free", "running", "preempted")

Index: TypeAlias = npt.NDArray[np.intp]
Column: TypeAlias = npt.NDArray[Any]
Input: TypeAlias = tuple[Handle, int, int]  # and its position and length in the prompt
EMBEDS = "prompt_embeds"  # name of the tensor in an item of prompt embeddings: [tokens, hidden size]

MAX_POSITIONS = 1 << 30  # so that two of them can be added
NOTHING: Ints = np.zeros(0, np.int32)
V = TypeVar("V")


def columns_of_params(params: list[SamplingParams]) -> tuple[tuple[SamplingParams, ...], Slots]:
    """Returns the distinct parameters in the order of their first use, and which of them each row has."""
    numbers: dict[SamplingParams, int] = {}
    row_numbers = np.array([numbers.setdefault(row_params, len(numbers)) for row_params in params], np.uint16)
    return tuple(numbers), row_numbers


def rows_of_params(joined: Joined, size: int) -> Sequence[SamplingParams]:
    known = joined.params
    if joined.params_of is None:
        if len(known) != size:
            raise DecodeError(f"expected {size}, got {len(known)} at $.joined.params")
        return known
    of = check_column(joined.params_of, size, "joined.params_of")
    if size and of.max() >= len(known):
        raise DecodeError(f"expected less than {len(known)}, got {of.max()} at $.joined.params_of")
    return [known[number] for number in of.tolist()]


def rows_of_generated(joined: Joined, slots: Index) -> list[tuple[int, Ints]]:
    """Returns the slots of rows that have generated ids before, with these ids."""
    if joined.generated_counts is None or joined.generated is None:
        if joined.generated_counts is not joined.generated:
            raise DecodeError("expected counts and ids, or none of them, at $.joined.generated")
        return []
    counts = check_column(joined.generated_counts, slots.size, "joined.generated_counts")
    ids = check_column(joined.generated, int(counts.sum(dtype=np.int64)), "joined.generated")
    ends = np.cumsum(counts, dtype=np.int64).tolist()
    rows = zip(slots.tolist(), ends, counts.tolist(), strict=True)
    return [(slot, ids[end - count : end].copy()) for slot, end, count in rows if count]


def columns_of_grammars(grammars: list[Handle | None]) -> tuple[tuple[Handle, ...], Slots | None]:
    """Returns the distinct grammars in the order of their first use, and the number of each row's grammar."""
    return _numbered(
        (row if grammar.key is None else grammar.key, grammar) if grammar is not None else None
        for row, grammar in enumerate(grammars)
    )


def columns_of_adapters(adapters: list[bytes]) -> tuple[tuple[bytes, ...], Slots | None]:
    """Returns the distinct adapters in the order of their first use, and the number of each row's adapter."""
    return _numbered((adapter, adapter) if adapter else None for adapter in adapters)


def _numbered(rows: Iterable[tuple[bytes | int, V] | None]) -> tuple[tuple[V, ...], Slots | None]:
    """Returns the values with distinct keys, and the number of each row's value, from 1; 0: the row has none."""
    order, values, numbers = dict[bytes | int, int](), list[V](), list[int]()
    for row in rows:
        if row is None:
            numbers.append(0)
            continue
        key, value = row
        if key not in order:
            values.append(value)
            order[key] = len(values)
        numbers.append(order[key])
    return tuple(values), np.array(numbers, np.uint16) if values else None


def rows_of_numbers(values: Sequence[V], numbers: Slots | None, slots: Index, place: str) -> list[tuple[int, V]]:
    """Returns the slots of rows with a value, and the values. `numbers`: of each row's value, from 1; 0: none."""
    if numbers is None:
        return []
    check_column(numbers, slots.size, f"joined.{place}", len(values) + 1)
    rows = zip(slots.tolist(), numbers.tolist(), strict=True)
    return [(slot, values[number - 1]) for slot, number in rows if number]


def columns_of_inputs(inputs: list[tuple[Input, ...]]) -> Inputs | None:
    if not any(inputs):
        return None
    return Inputs(
        counts=np.array([len(row) for row in inputs], np.int32),
        items=tuple(item for row in inputs for item, _, _ in row),
        positions=np.array([position for row in inputs for _, position, _ in row], np.int32),
        lengths=np.array([length for row in inputs for _, _, length in row], np.int32),
    )


def ragged(rows: Index, starts: Index | Ints, counts: Column) -> tuple[Index, Index]:
    """Returns row and column of `counts[i]` neighbours in row `rows[i]` from column `starts[i]`, for all i."""
    counts = counts.astype(np.intp)
    ends = np.cumsum(counts)
    return np.repeat(rows, counts), np.arange(ends[-1] if ends.size else 0) - np.repeat(ends - counts - starts, counts)


def check_column(column: Column, size: int, place: str, below: int | None = None) -> Column:
    """Returns the column. Raises DecodeError unless it has `size` numbers, none negative and all less than `below`."""
    if column.ndim != 1 or column.size != size:
        raise DecodeError(f"expected {size} numbers, got a shape of {column.shape} at $.{place}")
    if size:
        unsigned: Column = column.view(_UNSIGNED[column.dtype])  # a negative number is larger than any other
        limit = 1 << 31 if below is None else below
        if np.maximum.reduce(unsigned) >= limit:
            at = int((unsigned >= limit).argmax())
            allowed = "0 or more" if column[at] < 0 else f"less than {below}"
            raise DecodeError(f"expected {allowed}, got {column[at]} at $.{place}[{at}]")
    return column


def check_optional(column: Column | None, size: int, place: str, below: int | None = None) -> Column | None:
    """Returns the column, as `check_column` does; None: there is no such column."""
    return None if column is None else check_column(column, size, place, below)


_UNSIGNED: dict[np.dtype[Any], Any] = {
    np.dtype(np.int32): np.dtype(np.uint32),
    np.dtype(np.uint16): np.dtype(np.uint16),
}


def rows_of_inputs(inputs: Inputs | None, size: int) -> list[tuple[Input, ...]]:
    if inputs is None:
        return [()] * size
    counts = check_column(inputs.counts, size, "joined.inputs.counts")
    total = int(counts.sum(dtype=np.int64))
    if len(inputs.items) != total:
        raise DecodeError(f"expected {total} items, got {len(inputs.items)} at $.joined.inputs.items")
    positions = check_column(inputs.positions, total, "joined.inputs.positions").tolist()
    lengths = check_column(inputs.lengths, total, "joined.inputs.lengths").tolist()
    rows = list(zip(inputs.items, positions, lengths, strict=True))
    ends = np.cumsum(counts).tolist()
    return [tuple(rows[end - count : end]) for end, count in zip(ends, counts.tolist(), strict=True)]


class LogprobRows:
    """The log-probabilities of some of the rows of a result."""

    def __init__(self, logprobs: Logprobs, starts: Index, counts: Column, ranks: Ints) -> None:
        self._logprobs = logprobs
        self._starts = starts
        self.counts = counts
        self._ranks = ranks

    @classmethod
    def read(cls, logprobs: Logprobs, size: int) -> LogprobRows:
        """Raises DecodeError unless the columns have `size` rows."""
        counts = logprobs.counts
        if counts is None:
            counts = np.full(size, logprobs.ids.size // size if size else 0, np.int32)
        if counts.shape != (size,) or logprobs.ranks.shape != (size,):
            raise DecodeError(
                f"expected {size} counts and ranks, got {counts.size}, {logprobs.ranks.size} at $.logprobs"
            )
        if size and counts.min() < 0:
            raise DecodeError(f"expected 0 or more, got {counts.min()} at $.logprobs.counts")
        ends = np.cumsum(counts, dtype=np.intp)
        total = int(ends[-1]) if size else 0
        if logprobs.ids.shape != (total,) or logprobs.values.shape != (total,):
            raise DecodeError(
                f"expected {total} ids and values, got {logprobs.ids.size}, {logprobs.values.size} at $.logprobs"
            )
        return cls(logprobs, ends - counts, counts, logprobs.ranks)

    def of(self, rows: Index) -> LogprobRows:
        return LogprobRows(self._logprobs, self._starts[rows], self.counts[rows], self._ranks[rows])

    def columns(self, without: list[int]) -> Logprobs | None:
        """Returns the columns of a message, without entries for the rows in `without`. None: there are no entries."""
        counts = self.counts.astype(np.int32)
        counts[without] = 0
        total = int(counts.sum())
        if not total:
            return None
        ends = np.cumsum(counts)
        where = np.arange(total) + np.repeat(self._starts - (ends - counts), counts)
        return Logprobs(self._logprobs.ids[where], self._logprobs.values[where], self._ranks, counts)
