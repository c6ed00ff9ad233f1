"""The verdict board: why each group was lost the last time, and which requests were in its steps in flight.

The launcher writes the cause, the core the requests, servers read both: a request that was in the steps in flight of a
group that failed by itself may be the reason for it.

A group has two parts, for even and for odd incarnations, so a group that is started again writes over nothing that a
server has yet to read. Each fact is one aligned word with one writer. A list has a header and an entry for each
request, and the entries carry the tag of their header: a reader that finds another tag reads again, so the order in
which words become visible is of no importance. The core writes lists into two places in turn.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock import lowlevel

WORD_NBYTES = 8
PARTS = 2  # of a group: for even and for odd incarnations
PLACES = 2  # of a part: for lists
GROUPS, CAPACITY, HEAD_WORDS = 0, 1, 2
CAUSE, LIST, PART_WORDS = 0, 1, 2  # before the places of a part
# A cause: incarnation << CAUSE_BITS | cause. An entry: tag << TAG_SHIFT | server << 32 | request.
CAUSE_BITS = 8
TAG_SHIFT = 40
# The header of a list, from its lowest bit: is_trial (1), count (20), tag (19), incarnation (24).
COUNT_SHIFT, TAG_AT, INCARNATION_SHIFT = 1, 21, 40
MAX_COUNT, MAX_TAG, MAX_INCARNATION = (1 << 20) - 1, (1 << 19) - 1, (1 << 24) - 1

RequestWords: TypeAlias = npt.NDArray[np.uint64]  # server << 32 | request


class Cause(enum.IntEnum):
    """Why a group was lost."""

    OUTSIDE = 1  # a process was killed or stopped from outside
    ITSELF = 2  # a process failed: an error, a signal such as SIGSEGV, no memory, or no result of a step in time
    PLANNED = 3  # the launcher has restarted the group, as a migration asked for
    UNKNOWN = 4  # the group has been lost twice more since: the server was stopped for too long to read the verdict


class Verdict(NamedTuple):
    """Why an incarnation of a group was lost, and which requests may be the reason."""

    cause: Cause
    in_flight: frozenset[tuple[int, int]]  # server and request of the steps in flight
    is_trial: bool  # the core ran nothing but the one request in flight, as it was suspected


class VerdictBoard:
    """Reads and, if `writable`, writes the verdicts of all groups."""

    def __init__(self, segment: lowlevel.Segment, *, writable: bool = False) -> None:
        view = segment.view(writable=writable)
        self._words: memoryview[int] = view.cast("Q")
        self._entries: RequestWords = np.frombuffer(view, np.uint64)
        self._capacity = self._words[CAPACITY]

    @staticmethod
    def create(groups: int, capacity: int) -> lowlevel.Segment:
        """`capacity`: entries of a list at most."""
        if capacity > MAX_COUNT:
            raise ValueError(f"capacity of a list is at most {MAX_COUNT}, not {capacity}")
        part = PART_WORDS + PLACES * capacity
        page = lowlevel.Segment.create((HEAD_WORDS + groups * PARTS * part) * WORD_NBYTES, name="verdicts")
        words = page.view(writable=True).cast("Q")
        words[GROUPS], words[CAPACITY] = groups, capacity
        return page

    def _part(self, group: int, incarnation: int) -> int:
        """Returns the first word of the part of an incarnation."""
        part = group * PARTS + incarnation % PARTS
        return HEAD_WORDS + part * (PART_WORDS + PLACES * self._capacity)

    def _entries_of(self, part: int, tag: int, count: int) -> RequestWords:
        begin = part + PART_WORDS + tag % PLACES * self._capacity
        return self._entries[begin : begin + count]

    # ── the launcher ──
    def write_cause(self, group: int, incarnation: int, cause: Cause) -> None:
        """Publishes why an incarnation of a group was lost."""
        self._words[self._part(group, incarnation) + CAUSE] = incarnation << CAUSE_BITS | cause

    # ── the core ──
    def write_requests(
        self, group: int, incarnation: int, tag: int, lists: Sequence[RequestWords], is_trial: bool
    ) -> None:
        """Publishes the requests of the steps in flight, from all `lists`; one may stand there more than once. `tag`:
        one more than that of the list before."""
        part, tag = self._part(group, incarnation), tag & MAX_TAG
        count = 0
        for requests in lists:
            entries = self._entries_of(part, tag, count + requests.size)[count:]
            np.bitwise_or(requests, np.uint64(tag << TAG_SHIFT), out=entries)  # by words: no reader finds half of one
            count += requests.size
        self._words[part + LIST] = (
            (incarnation & MAX_INCARNATION) << INCARNATION_SHIFT | tag << TAG_AT | count << COUNT_SHIFT | is_trial
        )

    # ── servers ──
    def verdict(self, group: int, incarnation: int) -> Verdict | None:
        """Returns the verdict about a lost incarnation; None: not yet, ask again."""
        part = self._part(group, incarnation)
        lost, cause = divmod(self._words[part + CAUSE], 1 << CAUSE_BITS)
        if lost < incarnation:
            return None
        listed, header = divmod(self._words[part + LIST], 1 << INCARNATION_SHIFT)
        if lost > incarnation or listed > incarnation & MAX_INCARNATION:
            return Verdict(Cause.UNKNOWN, frozenset(), False)
        if listed < incarnation & MAX_INCARNATION:  # it has sent no step
            return Verdict(Cause(cause), frozenset(), False)
        tag, count = header >> TAG_AT, header >> COUNT_SHIFT & MAX_COUNT
        entries = self._entries_of(part, tag, count).copy()
        if (entries >> np.uint64(TAG_SHIFT) != tag).any():  # the core, which is ending, writes a list here
            return None
        requests = (entries & np.uint64((1 << TAG_SHIFT) - 1)).tolist()
        in_flight = frozenset(divmod(request, 1 << 32) for request in requests)
        return Verdict(Cause(cause), in_flight, bool(header & 1))

    def close(self) -> None:
        self._words.release()


def request_words(servers: npt.ArrayLike, requests: npt.ArrayLike) -> RequestWords:
    """Returns the words of requests, without a tag."""
    return np.asarray(servers, np.uint64) << np.uint64(32) | np.asarray(requests, np.uint64)
