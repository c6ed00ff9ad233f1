"""The progress of each slot: the steps in flight, the ids they have sampled, and the blocks that these have filled.

The scheduler assigns slots and blocks; `stop_conditions` decides when a sample ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from penstock.engine._native import BlockCache, PrefixHasher
from penstock.engine.core.request import Sample
from penstock.engine.core.request_queue import RequestQueue
from penstock.engine.core.stop_conditions import StopConditions
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.columns import RUNNING, Index
from penstock.engine.protocol.messages import Ended, FinishReason, Ints, Step, StepDone
from penstock.errors import DecodeError

NO_MAX = np.int32(np.iinfo(np.int32).max)  # of a free slot, and of a sample that has ended


class InFlightStep(NamedTuple):
    """A step that has been sent and is not done."""

    number: int
    rows: Index
    sampled: Index
    computed: Ints  # by slot, after the step


class InFlight:
    """Publishes full blocks in the cache, and charges clients in the queue for generated tokens. Arrays are by slot."""

    def __init__(
        self,
        batch: BatchState,
        cache: BlockCache,
        queue: RequestQueue,
        max_model_len: int,
        eos_ids: Collection[int],
    ) -> None:
        slots = batch.slots
        self._batch = batch
        self._queue = queue
        self._size = batch.block_size
        self._hasher = PrefixHasher(cache, slots, self._size)
        self._stop_conditions = StopConditions(slots, max_model_len, eos_ids)
        self._samples: list[Sample | None] = [None] * slots
        self._max_known = np.full(slots, NO_MAX)  # known tokens once the last one is being sampled
        self._before_last = 0  # steps, at least, until any sample's last token is being sampled
        self._steps: deque[InFlightStep] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._steps)

    def sample(self, slot: int) -> Sample:
        sample = self._samples[slot]
        assert sample is not None, "a row without a sample"
        return sample

    def has_computed(self, slot: int, step: InFlightStep, tokens: int) -> bool:
        """Returns whether the slot's present sample has `tokens` tokens computed when this step is done."""
        return bool(self._hasher.first_step(slot) <= step.number and step.computed[slot] >= tokens)

    def ids(self, slot: int) -> int:
        """Returns how many ids of the sample the core has, those of the prompt included."""
        return self._hasher.num_tokens(slot)

    def hashes(self, slot: int) -> bytes:
        """Returns the hashes of the blocks that the sample has filled, those of the prompt included."""
        return self._hasher.hashes(slot)

    def fully_sampled_slots(self) -> list[int]:
        """Returns the slots of samples that have not ended and need no more steps: results in flight will end them."""
        if self._before_last > 0:
            return []
        left = self._max_known - self._batch.known
        self._before_last = int(np.minimum.reduce(left))
        slots: list[int] = np.flatnonzero(left <= 0).tolist() if self._before_last <= 0 else []
        return slots

    # ── slots ──
    def join(self, slot: int, sample: Sample) -> None:
        request, size, ids = sample.request, self._size, sample.ids
        full = ids.size // size
        self._samples[slot] = sample
        self._hasher.add_sequence(slot, sample.chain, ids[full * size :], request.items_of(full))
        self._stop_conditions.join(slot, request.params, request.prompt.size, sample.generated.size)
        limit = int(self._stop_conditions.limits[slot])
        self._max_known[slot] = request.prompt.size + limit
        self._before_last = min(self._before_last, limit - sample.generated.size)

    def begin(self, slot: int, published: int) -> None:
        """Records the blocks of an admitted sample; the first `published` blocks can be found by hash already."""
        self._hasher.allocate(slot, published)

    def end(self, slot: int) -> None:
        """Ends the slot's sample: ids sampled for it from now on are discarded."""
        self._hasher.finish(slot)
        self._max_known[slot] = NO_MAX
        self._stop_conditions.end(slot)

    def leave(self, slot: int) -> None:
        self._stop_conditions.leave(slot)
        self._samples[slot] = None

    # ── steps ──
    def sent(self, step: Step, new_slots: list[int]) -> None:
        """Adds a step that the batch state has applied. `new_slots` are the slots that got new blocks with it."""
        batch = self._batch
        for slot in new_slots:
            self._hasher.schedule(slot, step.number)
        self._before_last -= 1
        self._steps.append(InFlightStep(step.number, batch.rows, batch.sampled, batch.computed.copy()))

    def pop_oldest(self, done: StepDone) -> InFlightStep:
        """Pops and returns the oldest step in step. Raises DecodeError, and changes nothing, if `done` misfits it."""
        if not self._steps or done.number != self._steps[0].number:
            awaited = f"step {self._steps[0].number}" if self._steps else "no step"
            raise DecodeError(f"expected {awaited} to be done, got {done.number} at $.number")
        done.require_fit(self._steps[0].sampled.size)
        return self._steps.popleft()

    def failed(self, step: InFlightStep, failures: list[tuple[int, FinishReason]]) -> list[Ended]:
        """Returns the ends of those samples that have not ended before."""
        first_step, slots = self._hasher.first_step, len(self._samples)
        return [Ended(slot, reason) for slot, reason in failures if slot < slots and first_step(slot) <= step.number]

    def publish(self, step: InFlightStep) -> None:
        """Publishes the blocks that the device has filled by this step: the cache finds the blocks by hash now.

        A sequence preempted meanwhile no longer owns these blocks, and looks them up again.
        """
        batch = self._batch
        self._hasher.publish(step.number, step.computed, batch.status, RUNNING, batch.table)

    def charge(self) -> None:
        """Charges clients for the blocks filled since the last call. Must precede the choice of the next request."""
        for slot, tokens in self._hasher.filled():
            sample = self.sample(slot)
            self._queue.charge(sample.request.client, sample.serve(tokens))

    def receive(self, step: InFlightStep, ids: Ints) -> tuple[Index | None, list[Ended]]:
        """Appends the ids that a step has sampled. Returns the rows of samples that had not ended before (None: all),
        and the samples that end now."""
        slots = step.sampled
        open_rows: Index | None = self._hasher.append(step.number, slots, ids)
        if open_rows is not None:
            slots, ids = slots[open_rows], ids[open_rows]
        return open_rows, self._stop_conditions.check(slots, ids)
