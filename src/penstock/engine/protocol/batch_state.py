"""The batch: its rows, their block tables and their progress; the same arrays in the core and in its workers.

A `Step` is applied here by the core that has built it and by all its receivers. A steady step costs two additions of
arrays, whatever the number of requests. The scheduler decides a step, `step_builder` builds it, and `codec.sequence`
checks that it is the next one.
"""

from __future__ import annotations

import numpy as np

from penstock.engine.protocol.columns import MAX_POSITIONS, NOTHING, Index, Input
from penstock.engine.protocol.messages import MAX_SLOTS, Ints, SamplingParams, Step
from penstock.engine.protocol.step_draft import StepDraft


class BatchState:
    """Arrays are by slot; their values for a free slot mean nothing, unless said.

    A row samples in a step if its computed tokens reach its known tokens: then one more token is known, or will be when
    its id is. So all processes that apply the step know which rows sampled, and none computes an unknown token.

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
        self.samples = np.zeros(slots, np.uint16)  # index among the request's `n` samples
        self.prompts: list[Ints] = [NOTHING] * slots
        self.params: list[SamplingParams | None] = [None] * slots
        self.inputs: list[tuple[Input, ...]] = [()] * slots
        self.computed = np.zeros(slots, np.int32)  # positions, those of the last step included; 0 for a free slot
        self.known = np.zeros(slots, np.int32)  # prompt and generated tokens, that being sampled included; 0 if free
        self.block_counts = np.zeros(slots, np.int32)  # 0 for a free slot
        self.table = np.zeros((slots, min(16, self.max_blocks_per_request)), np.int32)  # grows to the right
        self.rows: Index = np.zeros(0, np.intp)  # slots that run, ascending: the order of a step
        self.counts: Ints = np.zeros(slots, np.int32)  # tokens that the last step computes; 0 for slots that do not run
        self.sampled: Index = self.rows  # those of `rows` that sample in the last step, in the same order
        self._positions = blocks * block_size + 1  # less than this is computed of any slot, and by any step
        self._ones = self.counts  # 1 for slots that run
        self._room = 0  # for so many steady steps, at least, all rows have blocks, and sample

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
            np.add(self.computed, self._ones, self.computed)
            np.add(self.known, self._ones, self.known)
            self.counts = self._ones
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
