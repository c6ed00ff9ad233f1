"""What is running, where its blocks are, and how far it has come: the same arrays in the core and in its workers.

A `Step` is applied here by the core that has made it and by all who receive it. A steady step costs two additions of
arrays, whatever the number of requests. Leaves to `step_builder` how a step is made, to the scheduler why, and to
`codec.sequence` whether it is the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.engine.protocol.messages import (
    MAX_SLOTS,
    Advances,
    Appended,
    Inputs,
    Ints,
    Joined,
    Resumed,
    SamplingParams,
    Slots,
    Step,
)
from penstock.errors import DecodeError
from penstock.tensor import Item

FREE, RUNNING, PREEMPTED = 0, 1, 2
STATUS = ("free", "running", "preempted")

Index: TypeAlias = npt.NDArray[np.intp]
Column: TypeAlias = npt.NDArray[Any]
Input: TypeAlias = tuple[Item, int, int]  # and its position and length in the prompt

MAX_POSITIONS = 1 << 30  # so that two of them can be added
NOTHING: Ints = np.zeros(0, np.int32)


class BatchState:
    """The state. Arrays are by slot; what they hold for a free slot means nothing, unless said.

    A row samples in a step if what is computed of it reaches what is known of it: then one more token is known, or will
    be when its number is. So all who apply the step know who sampled, and nobody computes a token that is not known.

    Only `apply` writes to it. It replaces `rows`, `counts`, `sampled` and what `prompts` holds, and does not change
    them: a reference to those of a step stays valid.
    """

    def __init__(
        self, slots: int, blocks: int, block_size: int = 16, max_blocks_per_request: int | None = None
    ) -> None:
        """`blocks` is how many there are; `max_blocks_per_request`, how many one request can have (default: all)."""
        if not 1 <= slots <= MAX_SLOTS:
            raise ValueError(f"slots: expected 1 to {MAX_SLOTS}, got {slots}")
        if blocks < 1 or block_size < 1 or blocks * block_size >= MAX_POSITIONS:
            raise ValueError(f"expected fewer than {MAX_POSITIONS} positions, got {blocks} blocks of {block_size}")
        self.slots = slots
        self.blocks = blocks
        self.block_size = block_size
        self.max_blocks_per_request = blocks if max_blocks_per_request is None else min(blocks, max_blocks_per_request)
        self.status = np.zeros(slots, np.uint8)
        self.requests = np.zeros(slots, np.int32)
        self.servers = np.zeros(slots, np.uint16)
        self.samples = np.zeros(slots, np.uint16)  # which of its request's n
        self.prompts: list[Ints] = [NOTHING] * slots
        self.params: list[SamplingParams | None] = [None] * slots
        self.inputs: list[tuple[Input, ...]] = [()] * slots
        self.computed = np.zeros(slots, np.int32)  # positions, those of the last step included; 0 for a free slot
        self.known = np.zeros(slots, np.int32)  # prompt and generated tokens, that being sampled included; 0 if free
        self.block_counts = np.zeros(slots, np.int32)  # 0 for a free slot
        self.table = np.zeros((slots, min(16, self.max_blocks_per_request)), np.int32)  # grows to the right
        self.rows: Index = np.zeros(0, np.intp)  # slots that run, ascending: the order of a step
        self.counts: Ints = np.zeros(slots, np.int32)  # how many tokens the last step computes; 0 for who does not run
        self.sampled: Index = self.rows  # those of `rows` that sample in the last step, in the same order
        self._positions = blocks * block_size + 1  # less than this is computed of anybody, and by any step
        self._ones = self.counts  # 1 for who runs
        self._room = 0  # for so many steady steps, at least, everybody has blocks, and samples

    # ── for the core and the workers ──
    def blocks_of(self, slot: int) -> Ints:
        return self.table[slot, : self.block_counts[slot]]

    def short_of_blocks(self, by: int = 1) -> Index:
        """Slots that need another block before they can advance by so many tokens."""
        rows = self.rows
        if by <= self._room:
            return rows[:0]
        short: Index = rows[self.computed[rows] + by > self.block_counts[rows] * self.block_size]
        return short

    # ── becoming the next state ──
    def apply(self, step: Step, /) -> None:
        """Raises DecodeError, and changes nothing, where the step does not fit."""
        if (
            step.advances is None
            and step.appended is None
            and step.joined is None
            and step.left is None
            and step.preempted is None
            and step.resumed is None
            and self._room > 0
        ):
            self._room -= 1
            np.add(self.computed, self._ones, self.computed)
            np.add(self.known, self._ones, self.known)
            self.counts = self._ones
            self.sampled = self.rows
            return
        draft = _Draft(self)
        if step.left is not None:
            draft.leave(step.left)
        if step.preempted is not None:
            draft.preempt(step.preempted)
        if step.joined is not None:
            draft.join(step.joined)
        if step.resumed is not None:
            draft.resume(step.resumed)
        if step.appended is not None:
            draft.append(step.appended)
        draft.advance(step.advances)
        draft.commit()


def columns_of_params(params: list[SamplingParams]) -> tuple[tuple[SamplingParams, ...], Slots]:
    """Each once, in the order of their first use, and which of them each row has."""
    numbers: dict[SamplingParams, int] = {}
    of = np.array([numbers.setdefault(one, len(numbers)) for one in params], np.uint16)
    return tuple(numbers), of


def columns_of_inputs(inputs: list[tuple[Input, ...]]) -> Inputs | None:
    if not any(inputs):
        return None
    return Inputs(
        counts=np.array([len(one) for one in inputs], np.int32),
        items=tuple(item for one in inputs for item, _, _ in one),
        positions=np.array([position for one in inputs for _, position, _ in one], np.int32),
        lengths=np.array([length for one in inputs for _, _, length in one], np.int32),
    )


def _ragged(rows: Index, starts: Index | Ints, counts: Column) -> tuple[Index, Index]:
    """Row and column of `counts[i]` neighbours in row `rows[i]` from column `starts[i]`, for all i."""
    counts = counts.astype(np.intp)
    ends = np.cumsum(counts)
    return np.repeat(rows, counts), np.arange(ends[-1] if ends.size else 0) - np.repeat(ends - counts - starts, counts)


class _Draft:
    """The next state, of which nobody knows until it is committed: so a step that does not fit has changed nothing."""

    def __init__(self, now: BatchState) -> None:
        self._now = now
        self._status = now.status
        self._computed = now.computed
        self._known = now.known
        self._block_counts = now.block_counts
        self._ones = now._ones
        self._counts = now._ones
        self._room = 0
        self._rows = now.rows
        self._sampled = now.sampled
        self._is_copied = self._has_other_rows = False
        self._left: list[int] = []
        self._joined: Joined | None = None
        self._newcomers: list[tuple[int, Ints, SamplingParams, tuple[Input, ...]]] = []
        self._writes: list[tuple[tuple[Index, Index], Ints]] = []  # blocks, and where in the table

    def _copy(self) -> None:
        if not self._is_copied:
            self._is_copied = True
            self._status = self._status.copy()
            self._block_counts = self._block_counts.copy()
            self._computed = self._computed.copy()
            self._known = self._known.copy()

    # ── one column after the other ──
    def leave(self, left: Slots) -> None:
        slots = self._slots(left, "left", RUNNING, PREEMPTED)
        self._clear(slots, FREE)
        self._known[slots] = 0
        self._left = slots.tolist()

    def preempt(self, preempted: Slots) -> None:
        self._clear(self._slots(preempted, "preempted", RUNNING), PREEMPTED)

    def _turn(self, slots: Index, status: int) -> None:
        self._copy()
        self._status[slots] = status
        self._has_other_rows = True

    def _clear(self, slots: Index, status: int) -> None:
        self._turn(slots, status)
        self._computed[slots] = 0
        self._block_counts[slots] = 0

    def join(self, joined: Joined) -> None:
        slots = self._slots(joined.slots, "joined.slots", FREE)
        size = slots.size
        _column(joined.requests, size, "joined.requests")
        if joined.servers is not None:
            _column(joined.servers, size, "joined.servers")
        lengths = _column(joined.lengths, size, "joined.lengths")
        ids = _column(joined.ids, int(lengths.sum(dtype=np.int64)), "joined.ids")
        computed = (
            None if joined.computed is None else _column(joined.computed, size, "joined.computed", self._now._positions)
        )
        parents = [] if joined.parents is None else _column(joined.parents, size, "joined.parents").tolist()
        params = self._params(joined, size)
        inputs = _inputs_of(joined.inputs, size)
        if joined.samples is not None:
            _column(joined.samples, size, "joined.samples")
        self._turn(slots, RUNNING)
        self._computed[slots] = 0 if computed is None else computed
        self._give(slots, joined.block_counts, joined.blocks, "joined")
        ends = np.cumsum(lengths, dtype=np.int64).tolist()
        own: dict[int, tuple[Ints, tuple[Input, ...]]] = {}
        begin = 0
        for row, (slot, end) in enumerate(zip(slots.tolist(), ends, strict=True)):
            if parents and parents[row] != slot:
                for what, count in (("lengths", end - begin), ("inputs.counts", len(inputs[row]))):
                    if count:
                        raise DecodeError(f"expected 0 for who has its parent's, got {count} at $.joined.{what}[{row}]")
                prompt, its = self._prompt_of(parents[row], own, row)
            else:
                prompt, its = ids[begin:end].copy(), inputs[row]  # not the frame's, which would be kept as long
                prompt.flags.writeable = False
            own[slot] = prompt, its
            begin = end
            self._newcomers.append((slot, prompt, params[row], its))
        self._known[slots] = [prompt.size for _, prompt, _, _ in self._newcomers]
        self._require_more_known(slots, "joined")
        self._joined = joined

    def _require_more_known(self, slots: Index, place: str) -> None:
        """There is something left to compute of each."""
        computed, known = self._computed[slots], self._known[slots]
        if (wrong := computed >= known).any():
            at = int(wrong.argmax())
            raise DecodeError(
                f"expected less than the {known[at]} tokens that are known, "
                f"got {computed[at]} at $.{place}.computed[{at}]"
            )

    def _prompt_of(
        self, parent: int, own: dict[int, tuple[Ints, tuple[Input, ...]]], row: int
    ) -> tuple[Ints, tuple[Input, ...]]:
        """With what stands in it."""
        if parent in own:
            return own[parent]
        if parent >= self._now.slots or self._now.status[parent] == FREE or parent in self._left:
            raise DecodeError(f"expected a slot with a prompt, got {parent} at $.joined.parents[{row}]")
        return self._now.prompts[parent], self._now.inputs[parent]

    def _params(self, joined: Joined, size: int) -> Sequence[SamplingParams]:
        known = joined.params
        if joined.params_of is None:
            if len(known) != size:
                raise DecodeError(f"expected {size}, got {len(known)} at $.joined.params")
            return known
        of = _column(joined.params_of, size, "joined.params_of")
        if size and of.max() >= len(known):
            raise DecodeError(f"expected less than {len(known)}, got {of.max()} at $.joined.params_of")
        return [known[one] for one in of.tolist()]

    def resume(self, resumed: Resumed) -> None:
        slots = self._slots(resumed.slots, "resumed.slots", PREEMPTED)
        computed = (
            None
            if resumed.computed is None
            else _column(resumed.computed, slots.size, "resumed.computed", self._now._positions)
        )
        self._turn(slots, RUNNING)
        self._computed[slots] = 0 if computed is None else computed
        self._require_more_known(slots, "resumed")
        self._give(slots, resumed.block_counts, resumed.blocks, "resumed")

    def append(self, appended: Appended) -> None:
        slots = self._slots(appended.slots, "appended.slots", RUNNING)
        self._copy()
        self._give(slots, appended.counts, appended.blocks, "appended", "counts")

    def _give(self, slots: Index, counts: Ints | None, blocks: Ints, place: str, name: str = "block_counts") -> None:
        """More blocks for these slots; None: one each."""
        now = self._now
        starts = self._block_counts[slots]
        if counts is None:
            where = slots, starts.astype(np.intp)
            total = slots.size
            after = starts + 1
        else:
            _column(counts, slots.size, f"{place}.{name}")
            total = int(counts.sum(dtype=np.int64))
            if total == blocks.size:
                where = _ragged(slots, starts, counts)
            after = starts + counts
        _column(blocks, total, f"{place}.blocks", now.blocks)
        if slots.size and after.max() > now.max_blocks_per_request:
            at = int(after.argmax())
            raise DecodeError(
                f"expected at most {now.max_blocks_per_request} blocks in all, got {after[at]} at $.{place}.slots[{at}]"
            )
        self._block_counts[slots] = after
        if total:
            self._writes.append((where, blocks))

    def advance(self, advances: Advances | None) -> None:
        now = self._now
        self._count_rows()
        counts = self._ones
        if advances is not None:
            slots = self._slots(advances.slots, "advances.slots", RUNNING)
            given = _column(advances.counts, slots.size, "advances.counts", now._positions)
            counts = counts.copy()
            counts[slots] = given
        self._settle(counts, advances)

    def _count_rows(self) -> None:
        if self._has_other_rows:
            self._ones = (self._status == RUNNING).astype(np.int32)
            self._rows = np.flatnonzero(self._ones)

    def _settle(self, counts: Ints, advances: Advances | None) -> None:
        """All advance by so much, if their blocks have room for it and the tokens are known."""
        now = self._now
        after = self._computed + counts
        room = (self._block_counts * np.int32(now.block_size) - after)[self._rows]
        self._room = int(np.minimum.reduce(room)) if room.size else 1 << 62
        if self._room < 0:
            slot = int(self._rows[room.argmin()])
            raise DecodeError(
                f"expected room for {after[slot]} tokens in slot {slot}, got {self._block_counts[slot]} blocks "
                f"of {now.block_size} at ${_place_of(slot, advances)}"
            )
        left = (self._known - after)[self._rows]
        if left.size and np.minimum.reduce(left) < 0:
            slot = int(self._rows[left.argmin()])
            raise DecodeError(
                f"expected at most the {self._known[slot]} tokens that are known of slot {slot}, got {after[slot]} "
                f"at ${_place_of(slot, advances)}"
            )
        self._sample(after, left)
        self._computed = after
        self._counts = counts

    def _sample(self, after: Ints, left: Ints) -> None:
        """`left` of the known tokens of each row remain to be computed. A row without any samples."""
        done = left == 0
        if done.all():
            self._sampled = self._rows
        else:
            self._sampled = self._rows[done]
            if np.maximum.reduce(left) > 1:  # somebody will not sample in a steady step
                self._room = 0
        if self._known is self._now.known:
            self._known = self._known.copy()
        self._known[self._sampled] = after[self._sampled] + 1

    # ── all of it has been checked ──
    def commit(self) -> None:
        now = self._now
        most = int(np.maximum.reduce(self._block_counts)) if self._writes else 0
        if most > now.table.shape[1]:
            table = np.zeros((now.slots, min(now.max_blocks_per_request, max(most, 2 * now.table.shape[1]))), np.int32)
            there = int(now.block_counts.max())
            table[:, :there] = now.table[:, :there]
            now.table = table
        for where, blocks in self._writes:
            now.table[where] = blocks
        now.status, now.computed, now.block_counts = self._status, self._computed, self._block_counts
        now.known, now.sampled = self._known, self._sampled
        for slot in self._left:
            now.prompts[slot], now.params[slot], now.inputs[slot] = NOTHING, None, ()
        if self._joined is not None:
            now.requests[self._joined.slots] = self._joined.requests
            now.servers[self._joined.slots] = 0 if self._joined.servers is None else self._joined.servers
            now.samples[self._joined.slots] = 0 if self._joined.samples is None else self._joined.samples
            for slot, prompt, params, inputs in self._newcomers:
                now.prompts[slot], now.params[slot], now.inputs[slot] = prompt, params, inputs
        now.rows, now.counts, now._ones, now._room = self._rows, self._counts, self._ones, self._room

    def _slots(self, slots: Slots, place: str, *wanted: int) -> Index:
        """The column as an index: each below the number of slots, none twice, all of the status that is wanted."""
        _column(slots, slots.size, place, self._now.slots)
        index = slots.astype(np.intp)
        status = self._status[index]
        fits = status == wanted[0]
        for other in wanted[1:]:
            fits |= status == other
        if not fits.all():
            at = int(fits.argmin())
            names = " or ".join(STATUS[one] for one in wanted)
            raise DecodeError(
                f"expected a slot that is {names}, got {slots[at]}, {STATUS[status[at]]}, at $.{place}[{at}]"
            )
        if index.size > 1:
            seen = np.zeros(self._now.slots, np.bool_)
            seen[index] = True
            if np.count_nonzero(seen) < index.size:
                twice = int(np.bincount(index).argmax())
                raise DecodeError(f"expected each slot once, got {twice} twice at $.{place}")
        return index


def _place_of(slot: int, advances: Advances | None) -> str:
    """Where a step says how many tokens of this slot it computes."""
    if advances is None or slot not in advances.slots:
        return ""
    return f".advances.counts[{int((advances.slots == slot).argmax())}]"


def _column(column: Column, size: int, place: str, below: int | None = None) -> Column:
    """The column, if it has this many numbers, none of them negative, and all of them less than `below`."""
    if column.ndim != 1 or column.size != size:
        raise DecodeError(f"expected {size} numbers, got a shape of {column.shape} at $.{place}")
    if size:
        unsigned: Column = column.view(_UNSIGNED[column.dtype])  # what is negative is larger than any other
        limit = 1 << 31 if below is None else below
        if np.maximum.reduce(unsigned) >= limit:
            at = int((unsigned >= limit).argmax())
            wanted = "0 or more" if column[at] < 0 else f"less than {below}"
            raise DecodeError(f"expected {wanted}, got {column[at]} at $.{place}[{at}]")
    return column


_UNSIGNED: dict[np.dtype[Any], Any] = {
    np.dtype(np.int32): np.dtype(np.uint32),
    np.dtype(np.uint16): np.dtype(np.uint16),
}


def _inputs_of(inputs: Inputs | None, size: int) -> list[tuple[Input, ...]]:
    if inputs is None:
        return [()] * size
    counts = _column(inputs.counts, size, "joined.inputs.counts")
    total = int(counts.sum(dtype=np.int64))
    if len(inputs.items) != total:
        raise DecodeError(f"expected {total} items, got {len(inputs.items)} at $.joined.inputs.items")
    positions = _column(inputs.positions, total, "joined.inputs.positions").tolist()
    lengths = _column(inputs.lengths, total, "joined.inputs.lengths").tolist()
    rows = list(zip(inputs.items, positions, lengths, strict=True))
    ends = np.cumsum(counts).tolist()
    return [tuple(rows[end - count : end]) for end, count in zip(ends, counts.tolist(), strict=True)]
