"""How many bytes differ between two messages: inserted, deleted or exchanged, as public vLLM issue #6241 counts.

Leaves to rapidfuzz: the algorithm. Here is what keeps it affordable for long messages.
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
    """At most `edits`; exactly as many if `is_exact`."""

    edits: int
    is_exact: bool


def between(before: bytes, after: bytes, *, near: int = NEAR) -> Distance:
    """`near`: up to how many edits are counted exactly in long messages; the time grows with it and with the length."""
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
    """What is left when the bytes that both begin with, and then those that both end with, are taken off."""
    first, second = np.frombuffer(before, np.uint8), np.frombuffer(after, np.uint8)
    begin = same_bytes(first, second)
    first, second = first[begin:], second[begin:]
    end = same_bytes(first[::-1], second[::-1])
    return before[begin : len(before) - end], after[begin : len(after) - end]


def same_bytes(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> int:
    """How many at the beginning."""
    nbytes = min(len(first), len(second))
    differs = first[:nbytes] != second[:nbytes]
    position = int(np.argmax(differs)) if nbytes else 0
    return position if nbytes and differs[position] else nbytes


def most_between(before: bytes, after: bytes) -> int:
    """An upper bound: bytes are exchanged where they stand, and the rest added or taken away at the better end."""
    first, second = np.frombuffer(before, np.uint8), np.frombuffer(after, np.uint8)
    nbytes = min(len(first), len(second))
    if nbytes == 0:
        return max(len(first), len(second))
    aligned_left = int(np.count_nonzero(first[:nbytes] != second[:nbytes]))
    aligned_right = int(np.count_nonzero(first[-nbytes:] != second[-nbytes:]))
    return min(aligned_left, aligned_right) + abs(len(first) - len(second))
