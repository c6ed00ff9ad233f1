"""How far each slot has come: the steps in flight, what they have sampled, and the blocks that are full since.

Leaves to the scheduler who has a slot and which blocks, and to `stop_conditions` when a sample ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from penstock.engine._native import BlockCache, PrefixHasher
from penstock.engine.core.request import Request, Sample
from penstock.engine.core.request_queue import RequestQueue
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.columns import RUNNING, Index
from penstock.engine.protocol.messages import Ints, Step, StepDone
from penstock.engine.protocol.stop_conditions import NOBODY, StopConditions
from penstock.errors import DecodeError

NO_MOST = np.int32(np.iinfo(np.int32).max)  # of who is free, or has ended


class InFlightStep(NamedTuple):
    """A step that has been sent and is not done."""

    number: int
    rows: Index
    sampled: Index
    computed: Ints  # after it


class InFlight:
    """Arrays are by slot. Publishes blocks in the cache, and charges clients in the queue for what is generated."""

    def __init__(
        self,
        schedule: BatchState,
        cache: BlockCache,
        queue: RequestQueue[Request],
        max_model_len: int,
        eos_ids: Collection[int],
    ) -> None:
        slots = schedule.slots
        self._schedule = schedule
        self._queue = queue
        self._size = schedule.block_size
        self._hasher = PrefixHasher(cache, slots, self._size)
        self._endings = StopConditions(slots, max_model_len, eos_ids)
        self._samples: list[Sample | None] = [None] * slots
        self._most = np.full(slots, NO_MOST)  # so many tokens are known of it when its last one is being sampled
        self._before_last = 0  # in so many steps, at least, nobody's last token is sampled
        self._flights: deque[InFlightStep] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    def sample(self, slot: int) -> Sample:
        sample = self._samples[slot]
        assert sample is not None, "a row without a sample"
        return sample

    def sample_at(self, slot: int, birth: int) -> Sample | None:
        """Who joined this slot with that step, and has not ended."""
        is_its = 0 <= slot < len(self._samples) and self._hasher.first_step(slot) == birth
        return self.sample(slot) if is_its else None

    def has_computed(self, slot: int, flight: InFlightStep, tokens: int) -> bool:
        """Whether so many tokens of who has the slot now are computed when this step is done."""
        return bool(self._hasher.first_step(slot) <= flight.number and flight.computed[slot] >= tokens)

    def ids(self, slot: int) -> int:
        """How many of the sample's tokens we have, those of the prompt included."""
        return self._hasher.num_tokens(slot)

    def hashes(self, slot: int) -> bytes:
        """Of the blocks that it has filled, those of the prompt included."""
        return self._hasher.hashes(slot)

    def fully_sampled_slots(self) -> list[int]:
        """Slots of those who have not ended, and will when their results are in: none of their tokens is missing."""
        if self._before_last > 0:
            return []
        left = self._most - self._schedule.known
        self._before_last = int(np.minimum.reduce(left))
        slots: list[int] = np.flatnonzero(left <= 0).tolist() if self._before_last <= 0 else []
        return slots

    # ── who has a slot ──
    def join(self, slot: int, sample: Sample) -> None:
        request, size = sample.request, self._size
        length = request.prompt.size
        self._samples[slot] = sample
        self._hasher.add_sequence(
            slot, request.chain, request.prompt[length - length % size :], request.items_of(length // size)
        )
        self._endings.join(slot, request.params, length)
        limit = int(self._endings.limits[slot])
        self._most[slot] = length + limit
        self._before_last = min(self._before_last, limit)

    def begin(self, slot: int, found: int) -> None:
        """It has got blocks, so many of which had been published."""
        self._hasher.allocate(slot, found)

    def end(self, slot: int) -> None:
        """What is sampled for it from now on is nobody's."""
        self._hasher.finish(slot)
        self._most[slot] = NO_MOST
        self._endings.end(slot)

    def leave(self, slot: int) -> None:
        self._endings.leave(slot)
        self._samples[slot] = None

    # ── steps ──
    def sent(self, step: Step, comers: list[int]) -> None:
        """The schedule has applied it. `comers` have got their first blocks with it."""
        now = self._schedule
        for slot in comers:
            self._hasher.schedule(slot, step.number)
        self._before_last -= 1
        self._flights.append(InFlightStep(step.number, now.rows, now.sampled, now.computed.copy()))

    def pop_oldest(self, done: StepDone) -> InFlightStep:
        """The oldest step in flight is done. Raises DecodeError, and changes nothing, where it is told of another."""
        if not self._flights or done.number != self._flights[0].number:
            awaited = f"step {self._flights[0].number}" if self._flights else "no step"
            raise DecodeError(f"expected {awaited} to be done, got {done.number} at $.number")
        done.require_fit(self._flights[0].sampled.size)
        return self._flights.popleft()

    def failed(self, flight: InFlightStep, done: StepDone) -> list[Sample]:
        if done.failed is None:
            return []
        first_step, slots = self._hasher.first_step, len(self._samples)
        return [
            self.sample(slot) for slot in done.failed.tolist() if slot < slots and first_step(slot) <= flight.number
        ]

    def publish(self, flight: InFlightStep) -> None:
        """The device has computed this far: full blocks can be found from now on.

        Whose blocks it are not any more, as it was preempted, will look for their likes.
        """
        now = self._schedule
        self._hasher.publish(flight.number, flight.computed, now.status, RUNNING, now.table)

    def charge(self) -> None:
        """Clients are charged for the blocks that were filled since: before the queue is asked who is next."""
        for slot, tokens in self._hasher.filled():
            sample = self.sample(slot)
            self._queue.charge(sample.request.client, sample.serve(tokens))

    def receive(self, flight: InFlightStep, ids: Ints) -> list[Sample]:
        """What a step has sampled. Returns who has ended by it."""
        slots = flight.sampled
        theirs = self._hasher.append(flight.number, slots, ids)
        if theirs is not None:
            slots, ids = slots[theirs], ids[theirs]
        ended = self._endings.check(slots, ids)
        return [] if ended is NOBODY else [self.sample(slot) for slot in slots[ended.rows].tolist()]
