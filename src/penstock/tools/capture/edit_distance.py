"""The edit distance between two messages: bytes inserted, deleted or replaced, as public vLLM issue #6241 counts.

rapidfuzz has the algorithm; this module bounds its cost for long messages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.tools.capture.measure_error import required

CELLS = 1 << 24  # of the table that the exact answer needs: half a millisecond; 4 KiB against 4 KiB
NEAR = 256  # edits; up to here a long message costs milliseconds too, and beyond it is given up
FAR = 1 << 21  # bytes; longer ones are not even tried
LIKELY = 48  # edits to look for first: what a decode step of 2024 had


class Distance(NamedTuple):
    """An edit distance, or, unless `is_exact`, an upper bound of it."""

    edits: int
    is_exact: bool


def between(before: bytes, after: bytes, *, near: int = NEAR) -> Distance:
    """Returns the distance. `near`: long messages are compared exactly up to so many edits; the time grows with it."""
    levenshtein = required("rapidfuzz.distance", "the edit distance").Levenshtein
    if before == after:
        return Distance(0, True)
    if len(before) * len(after) > CELLS:
        before, after = without_common_ends(before, after)
    cells = len(before) * len(after)
    if cells <= CELLS:
        return Distance(levenshtein.distance(before, after, score_hint=LIKELY), True)
    if max(len(before), len(after)) <= FAR:
        edits = levenshtein.distance(before, after, score_cutoff=near, score_hint=LIKELY)
        if edits <= near:
            return Distance(edits, True)
    return Distance(most_between(before, after), False)


def without_common_ends(before: bytes, after: bytes) -> tuple[bytes, bytes]:
    """Returns both messages without their common prefix and suffix."""
    first, second = np.frombuffer(before, np.uint8), np.frombuffer(after, np.uint8)
    begin = same_bytes(first, second)
    first, second = first[begin:], second[begin:]
    end = same_bytes(first[::-1], second[::-1])
    return before[begin : len(before) - end], after[begin : len(after) - end]


def same_bytes(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> int:
    """Returns the length of the common prefix."""
    nbytes = min(len(first), len(second))
    differs = first[:nbytes] != second[:nbytes]
    position = int(np.argmax(differs)) if nbytes else 0
    return position if nbytes and differs[position] else nbytes


def most_between(before: bytes, after: bytes) -> int:
    """Returns an upper bound: bytes are replaced in place, and the rest inserted or deleted at the better end."""
    first, second = np.frombuffer(before, np.uint8), np.frombuffer(after, np.uint8)
    nbytes = min(len(first), len(second))
    if nbytes == 0:
        return max(len(first), len(second))
    aligned_left = int(np.count_nonzero(first[:nbytes] != second[:nbytes]))
    aligned_right = int(np.count_nonzero(first[-nbytes:] != second[-nbytes:]))
    return min(aligned_left, aligned_right) + abs(len(first) - len(second))
