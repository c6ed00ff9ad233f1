"""How far each slot has come: the steps in flight, what they have sampled, and the blocks that are full since.

Leaves to the scheduler who has a slot and which blocks, and to `ending` when a sample ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from penstock.engine.ending import Endings
from penstock.engine.kvcache import KVCache
from penstock.engine.protocol import Ints, Step, StepDone
from penstock.engine.queue import Queue
from penstock.engine.request import Request, Sample
from penstock.engine.schedule import RUNNING, Index, Schedule
from penstock.errors import DecodeError

NEVER = np.iinfo(np.int64).max
NO_MOST = np.int32(np.iinfo(np.int32).max)  # of who is free, or has ended


class Flight(NamedTuple):
    """A step that has been sent and is not done."""

    number: int
    rows: Index
    sampled: Index
    computed: Ints  # after it


class Progress:
    """Arrays are by slot. Publishes blocks in the cache, and charges clients in the queue for what is generated."""

    def __init__(
        self,
        schedule: Schedule,
        cache: KVCache,
        queue: Queue[Request],
        max_model_len: int,
        eos_ids: Collection[int],
    ) -> None:
        slots, size = schedule.slots, schedule.block_size
        self._schedule = schedule
        self._cache = cache
        self._queue = queue
        self._size = size
        self._endings = Endings(slots, max_model_len, eos_ids)
        self._samples: list[Sample | None] = [None] * slots
        self._births = np.full(slots, NEVER)  # the step with which it joined; NEVER: it is free, or has ended
        self._since = np.full(slots, NEVER)  # the step with which it got its first blocks: it may have been preempted
        self._ids = np.zeros(slots, np.int32)  # how many we have: one less is known for each of its steps in flight
        self._tails = np.zeros((slots, size), np.int32)  # those ids of the last block
        self._blocks_of_ids = self._tails.view(f"V{self._tails.strides[0]}")[:, 0]  # the same; each row is one thing
        self._next_full = np.full(slots, size, np.int32)  # so many computed tokens fill a block that is not published
        self._most = np.full(slots, NO_MOST)  # so many tokens are known of it when its last one is being sampled
        self._flights: deque[Flight] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    def sample(self, slot: int) -> Sample:
        sample = self._samples[slot]
        assert sample is not None, "a row without a sample"
        return sample

    def born(self, slot: int, birth: int) -> Sample | None:
        """Who joined this slot with that step, and has not ended."""
        is_its = 0 <= slot < len(self._samples) and self._births[slot] == birth
        return self.sample(slot) if is_its else None

    def has_come(self, slot: int, flight: Flight, tokens: int) -> bool:
        """Whether so many tokens of who has the slot now are computed when this step is done."""
        return bool(self._births[slot] <= flight.number and flight.computed[slot] >= tokens)

    def ids(self, slot: int) -> int:
        """How many of the sample's tokens we have, those of the prompt included."""
        return int(self._ids[slot])

    def sampled_to_the_last(self) -> list[int]:
        """Slots of those who have not ended, and will when their results are in: none of their tokens is missing."""
        slots: list[int] = np.flatnonzero(self._schedule.known >= self._most).tolist()
        return slots

    # ── who has a slot ──
    def join(self, slot: int, sample: Sample) -> None:
        request, size = sample.request, self._size
        length = request.prompt.size
        self._samples[slot] = sample
        self._births[slot] = self._since[slot] = NEVER
        self._ids[slot] = length
        self._tails[slot, : length % size] = request.prompt[length - length % size :]
        self._endings.join(slot, request.params, length)
        self._most[slot] = length + self._endings.limits[slot]

    def begin(self, slot: int, found: int) -> None:
        """It has got blocks, so many of which had been published."""
        self._next_full[slot] = (found + 1) * self._size

    def end(self, slot: int) -> None:
        """What is sampled for it from now on is nobody's."""
        self._births[slot], self._most[slot] = NEVER, NO_MOST
        self._endings.end(slot)

    def leave(self, slot: int) -> None:
        self._endings.leave(slot)
        self._samples[slot] = None

    # ── steps ──
    def sent(self, step: Step, comers: list[int]) -> None:
        """The schedule has applied it. `comers` have got their first blocks with it."""
        now = self._schedule
        for slot in comers:
            self._since[slot] = step.number
            if self._births[slot] == NEVER:
                self._births[slot] = step.number
        self._flights.append(Flight(step.number, now.rows, now.sampled, now.computed.copy()))

    def land(self, done: StepDone) -> Flight:
        """The oldest step in flight is done. Raises DecodeError, and changes nothing, where it is told of another."""
        if not self._flights or done.number != self._flights[0].number:
            awaited = f"step {self._flights[0].number}" if self._flights else "no step"
            raise DecodeError(f"expected {awaited} to be done, got {done.number} at $.number")
        if done.slots is not None or done.counts is not None:
            raise DecodeError("expected the ids of all that sample in this step, one each, got others at $.slots")
        done.require_fit(self._flights[0].sampled.size)
        return self._flights.popleft()

    def failed(self, flight: Flight, done: StepDone) -> list[Sample]:
        slots = [] if done.failed is None else done.failed.tolist()
        return [
            self.sample(slot) for slot in slots if slot < len(self._samples) and self._births[slot] <= flight.number
        ]

    def publish(self, flight: Flight) -> None:
        """The device has computed this far: full blocks can be found from now on.

        Whose blocks it are not any more, as it was preempted, will look for their likes.
        """
        slots = np.flatnonzero(flight.computed >= self._next_full)
        if not slots.size:
            return
        slots = slots[self._births[slots] <= flight.number]
        full = flight.computed[slots] // self._size
        have_them = (self._since[slots] <= flight.number) & (self._schedule.status[slots] == RUNNING)
        begun = (self._next_full[slots] // self._size - 1).tolist()
        self._next_full[slots] = (full + 1) * self._size
        last = self._schedule.table[slots, full - 1].tolist()
        ids = self._blocks_of_ids[slots].tolist()
        samples, size, publish, charge = self._samples, self._size, self._cache.publish, self._queue.charge
        for slot, begin, end, block, its_ids, has_them in zip(
            slots.tolist(), begun, full.tolist(), last, ids, have_them.tolist(), strict=True
        ):
            sample = samples[slot]
            assert sample is not None
            if end > sample.full_blocks:  # before the next id takes the place of the first of these
                one = sample.extend(its_ids)
                charge(sample.request.client, sample.serve(end * size))
            else:
                one = sample.hash_of(end - 1)
            if has_them:
                for at in range(begin, end - 1):
                    publish(int(self._schedule.table[slot, at]), sample.hash_of(at))
                publish(block, one)

    def receive(self, flight: Flight, ids: Ints) -> list[Sample]:
        """What a step has sampled. Returns who has ended by it."""
        slots = flight.sampled
        are_theirs = self._births[slots] <= flight.number
        if not are_theirs.all():
            slots, ids = slots[are_theirs], ids[are_theirs]
        self._keep(slots, ids)
        return [self.sample(slot) for slot in slots[self._endings.check(slots, ids).rows].tolist()]

    def _keep(self, slots: Index, ids: Ints) -> None:
        counts = self._ids[slots]
        self._tails[slots, counts % self._size] = ids
        self._ids[slots] = counts + 1
