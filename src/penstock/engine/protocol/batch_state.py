"""The batch: rows, block tables and progress; the same arrays in the core and in the workers.

The core and all workers apply each `Step`. A steady step costs two additions of arrays, for any number of requests;
every other step is checked as a `StepDraft` first. The scheduler decides a step, `step_builder` builds the step, and
`codec.sequence` checks the order of steps.
"""

from __future__ import annotations

import numpy as np

from penstock.engine.protocol.columns import (
    FREE,
    MAX_POSITIONS,
    NOTHING,
    PREEMPTED,
    RUNNING,
    STATUS,
    Index,
    Input,
    check_column,
    check_optional,
    ragged,
    rows_of_generated,
    rows_of_inputs,
    rows_of_numbers,
    rows_of_params,
)
from penstock.engine.protocol.messages import (
    MAX_SLOTS,
    Advances,
    Appended,
    Ints,
    Joined,
    Resumed,
    SamplingParams,
    Slots,
    Step,
)
from penstock.errors import DecodeError
from penstock.tensor import Handle


class BatchState:
    """Arrays are by slot; values of a free slot are undefined, unless the comment defines them.

    A row samples in a step if computed tokens reach known tokens: then the count of known tokens grows by 1, and the id
    arrives later. All processes that apply the step know which rows sampled, and no process computes an unknown token.

    Only `apply` writes to a batch. `apply` replaces `rows`, `counts`, `sampled` and the content of `prompts` without
    changing the old arrays: a reference to the arrays of a step stays valid.
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
        self.samples = np.zeros(slots, np.uint16)  # index among the request's `n` samples
        self.seeds = np.zeros(slots, np.uint64)
        self.prompts: list[Ints] = [NOTHING] * slots
        self.generated: list[Ints] = [NOTHING] * slots  # ids before the sample was resumed; NOTHING for a free slot
        self.params: list[SamplingParams | None] = [None] * slots
        self.inputs: list[tuple[Input, ...]] = [()] * slots
        self.grammars: dict[int, Handle] = {}  # of the slots with one
        self.adapters: dict[int, bytes] = {}  # of the slots with one
        self.computed = np.zeros(slots, np.int32)  # positions, those of the last step included; 0 for a free slot
        self.known = np.zeros(slots, np.int32)  # prompt and generated tokens, that being sampled included; 0 if free
        self.block_counts = np.zeros(slots, np.int32)  # 0 for a free slot
        self.table = np.zeros((slots, min(16, self.max_blocks_per_request)), np.int32)  # grows to the right
        self.rows: Index = np.zeros(0, np.intp)  # slots that run, ascending: the order of a step
        self.counts: Ints = np.zeros(slots, np.int32)  # tokens that the last step computes; 0 for slots that do not run
        self.sampled: Index = self.rows  # the `rows` that sample in the last step, in order
        self._positions = blocks * block_size + 1  # less than this is computed of any slot, and by any step
        self._running = self.counts  # 1 for slots that run
        self._room = 0  # for so many steady steps, at least, all rows have blocks, and sample

    # ── for the core and the workers ──
    def blocks_of(self, slot: int) -> Ints:
        return self.table[slot, : self.block_counts[slot]]

    def short_of_blocks(self, by: int = 1) -> Index:
        """Returns the slots that need another block before they can advance by so many tokens."""
        rows = self.rows
        if by <= self._room:
            return rows[:0]
        short: Index = rows[self.computed[rows] + by > self.block_counts[rows] * self.block_size]
        return short

    # ── the next state ──
    def apply(self, step: Step, /) -> None:
        """Applies a step. Raises DecodeError, and changes nothing, if it does not fit."""
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
            np.add(self.computed, self._running, self.computed)
            np.add(self.known, self._running, self.known)
            self.counts = self._running
            self.sampled = self.rows
            return
        draft = StepDraft(self)
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


class StepDraft:
    """The next state, made of the present one and a step. A step that does not fit changes nothing."""

    def __init__(self, now: BatchState) -> None:
        self._now = now
        self._status = now.status
        self._computed = now.computed
        self._known = now.known
        self._block_counts = now.block_counts
        self._running = now._running
        self._counts = now._running
        self._room = 0
        self._rows = now.rows
        self._sampled = now.sampled
        self._is_copied = self._has_other_rows = False
        self._left: list[int] = []
        self._joined: Joined | None = None
        self._new_rows: list[tuple[int, Ints, SamplingParams, tuple[Input, ...]]] = []
        self._generated: list[tuple[int, Ints]] = []  # of joined rows that have generated ids before
        self._grammars: list[tuple[int, Handle]] = []  # of joined rows
        self._adapters: list[tuple[int, bytes]] = []
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
        check_column(joined.requests, size, "joined.requests")
        check_optional(joined.servers, size, "joined.servers")
        lengths = check_column(joined.lengths, size, "joined.lengths")
        ids = check_column(joined.ids, int(lengths.sum(dtype=np.int64)), "joined.ids")
        computed = check_optional(joined.computed, size, "joined.computed", self._now._positions)
        parents = [] if joined.parents is None else check_column(joined.parents, size, "joined.parents").tolist()
        params = rows_of_params(joined, size)
        self._generated = rows_of_generated(joined, slots)
        self._grammars = rows_of_numbers(joined.grammars, joined.grammars_of, slots, "grammars_of")
        self._adapters = rows_of_numbers(joined.adapters, joined.adapters_of, slots, "adapters_of")
        inputs = rows_of_inputs(joined.inputs, size)
        if joined.seeds is not None and joined.seeds.shape != (size,):
            raise DecodeError(f"expected {size} numbers, got a shape of {joined.seeds.shape} at $.joined.seeds")
        check_optional(joined.samples, size, "joined.samples")
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
                        raise DecodeError(
                            f"expected 0 for a row with the prompt of its parent, got {count} at $.joined.{what}[{row}]"
                        )
                prompt, row_inputs = self._prompt_of(parents[row], own, row)
            else:
                prompt, row_inputs = ids[begin:end].copy(), inputs[row]  # a copy: a view would keep the frame as long
                prompt.flags.writeable = False
            own[slot] = prompt, row_inputs
            begin = end
            self._new_rows.append((slot, prompt, params[row], row_inputs))
        self._known[slots] = [prompt.size for _, prompt, _, _ in self._new_rows]
        for slot, ids in self._generated:
            self._known[slot] += ids.size
        self._require_more_known(slots, "joined")
        self._joined = joined

    def _require_more_known(self, slots: Index, place: str) -> None:
        """Raises DecodeError unless each slot has tokens left to compute."""
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
        """Returns the parent's prompt and its inputs."""
        if parent in own:
            return own[parent]
        if parent >= self._now.slots or self._now.status[parent] == FREE or parent in self._left:
            raise DecodeError(f"expected a slot with a prompt, got {parent} at $.joined.parents[{row}]")
        return self._now.prompts[parent], self._now.inputs[parent]

    def resume(self, resumed: Resumed) -> None:
        slots = self._slots(resumed.slots, "resumed.slots", PREEMPTED)
        computed = check_optional(resumed.computed, slots.size, "resumed.computed", self._now._positions)
        self._turn(slots, RUNNING)
        self._computed[slots] = 0 if computed is None else computed
        self._require_more_known(slots, "resumed")
        self._give(slots, resumed.block_counts, resumed.blocks, "resumed")

    def append(self, appended: Appended) -> None:
        slots = self._slots(appended.slots, "appended.slots", RUNNING)
        self._copy()
        self._give(slots, appended.counts, appended.blocks, "appended", "counts")

    def _give(self, slots: Index, counts: Ints | None, blocks: Ints, place: str, name: str = "block_counts") -> None:
        """Appends blocks to these slots; `counts` None: one each."""
        now = self._now
        starts = self._block_counts[slots]
        if counts is None:
            where = slots, starts.astype(np.intp)
            total = slots.size
            after = starts + 1
        else:
            check_column(counts, slots.size, f"{place}.{name}")
            total = int(counts.sum(dtype=np.int64))
            if total == blocks.size:
                where = ragged(slots, starts, counts)
            after = starts + counts
        check_column(blocks, total, f"{place}.blocks", now.blocks)
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
        counts = self._running
        if advances is not None:
            slots = self._slots(advances.slots, "advances.slots", RUNNING)
            tokens = check_column(advances.counts, slots.size, "advances.counts", now._positions)
            counts = counts.copy()
            counts[slots] = tokens
        self._settle(counts, advances)

    def _count_rows(self) -> None:
        if self._has_other_rows:
            self._running = (self._status == RUNNING).astype(np.int32)
            self._rows = np.flatnonzero(self._running)

    def _settle(self, counts: Ints, advances: Advances | None) -> None:
        """Advances all rows by `counts`. Raises DecodeError if blocks have no room for it, or tokens are not known."""
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
        """Sets the sampling rows: rows without known tokens `left` to compute."""
        done = left == 0
        if done.all():
            self._sampled = self._rows
        else:
            self._sampled = self._rows[done]
            if np.maximum.reduce(left) > 1:  # a row will not sample in a steady step
                self._room = 0
        if self._known is self._now.known:
            self._known = self._known.copy()
        self._known[self._sampled] = after[self._sampled] + 1

    # ── all of it has been checked ──
    def commit(self) -> None:
        now = self._now
        max_blocks = int(np.maximum.reduce(self._block_counts)) if self._writes else 0
        if max_blocks > now.table.shape[1]:
            table = np.zeros(
                (now.slots, min(now.max_blocks_per_request, max(max_blocks, 2 * now.table.shape[1]))), np.int32
            )
            used = int(now.block_counts.max())
            table[:, :used] = now.table[:, :used]
            now.table = table
        for where, blocks in self._writes:
            now.table[where] = blocks
        now.status, now.computed, now.block_counts = self._status, self._computed, self._block_counts
        now.known, now.sampled = self._known, self._sampled
        for slot in self._left:
            now.prompts[slot], now.generated[slot], now.params[slot], now.inputs[slot] = NOTHING, NOTHING, None, ()
            now.grammars.pop(slot, None)
            now.adapters.pop(slot, None)
        if self._joined is not None:
            now.requests[self._joined.slots] = self._joined.requests
            now.servers[self._joined.slots] = 0 if self._joined.servers is None else self._joined.servers
            now.samples[self._joined.slots] = 0 if self._joined.samples is None else self._joined.samples
            now.seeds[self._joined.slots] = 0 if self._joined.seeds is None else self._joined.seeds
            for slot, prompt, params, inputs in self._new_rows:
                now.prompts[slot], now.params[slot], now.inputs[slot] = prompt, params, inputs
            for slot, generated in self._generated:
                now.generated[slot] = generated
            now.grammars.update(self._grammars)
            now.adapters.update(self._adapters)
        now.rows, now.counts, now._running, now._room = self._rows, self._counts, self._running, self._room

    def _slots(self, slots: Slots, place: str, *expected: int) -> Index:
        """Returns the column as an index. Raises DecodeError unless slots exist, once each, with a `wanted` status."""
        check_column(slots, slots.size, place, self._now.slots)
        index = slots.astype(np.intp)
        status = self._status[index]
        fits = status == expected[0]
        for other in expected[1:]:
            fits |= status == other
        if not fits.all():
            at = int(fits.argmin())
            names = " or ".join(STATUS[number] for number in expected)
            raise DecodeError(
                f"expected a slot that is {names}, got {slots[at]}, {STATUS[status[at]]}, at $.{place}[{at}]"
            )
        if index.size > 1:
            is_named = np.zeros(self._now.slots, np.bool_)
            is_named[index] = True
            if np.count_nonzero(is_named) < index.size:
                twice = int(np.bincount(index).argmax())
                raise DecodeError(f"expected each slot once, got {twice} twice at $.{place}")
        return index


def _place_of(slot: int, advances: Advances | None) -> str:
    """Returns the path in a step of the token count of a slot."""
    if advances is None or slot not in advances.slots:
        return ""
    return f".advances.counts[{int((advances.slots == slot).argmax())}]"
