"""Who runs in the next step, and with which blocks. No input, no output, no clock.

Every step computes one token for each sample that decodes, and with what is left of the token budget the next chunks of
prompts. A sample is given the blocks for all that is known of it when it is let in, and then one after the other. Its
full blocks are found by others, and by itself after it was preempted, as soon as the device has computed them.

Nobody is preempted but for somebody better: of a better priority, or of the same and here for longer. So the best one
always comes on, and with it in the end everybody; who is short of a block and has nobody worse beside it, waits. One of
`ELDER_EVERY` that are let in is whoever has been here longest, and it is not preempted for others; so no priority and
no client can starve another. Among those of one priority the `queue` is fair to clients.

Leaves to the plan how a step is written, to the cache which block is which, and to `ending` when a sample ends.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.engine.ending import Endings
from penstock.engine.kvcache import KVCache
from penstock.engine.plan import Plan
from penstock.engine.protocol import Inputs, Ints, Step, StepDone, Submit
from penstock.engine.queue import Queue
from penstock.engine.request import Key, Request, Sample
from penstock.engine.schedule import RUNNING, Index, Input, Schedule
from penstock.errors import DecodeError, PenstockError

ELDER_EVERY = 8
ELDER = -(1 << 40)  # a priority that no request has
MOST_PRIORITY = 1 << 31
SPARE = 100  # a newcomer leaves one block in so many to those who run; it would soon be preempted for them
NEVER = np.iinfo(np.int64).max


class Refused(PenstockError):
    """This request can never run. `status` is HTTP's."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`Scheduler` checks it against its schedule."""

    max_model_len: int  # tokens of prompt and answer together
    token_budget: int = 2048  # that one step computes at most
    vocabulary: int = 1 << 31  # ids of prompts are below that
    eos_ids: tuple[int, ...] = ()
    has_prefix_cache: bool = True  # False: blocks are shared only within a request
    has_overlap: bool = True  # a step is planned while the one before it runs


class Stats(NamedTuple):
    """What there is now; and since the beginning, what happened."""

    running: int
    preempted: int
    waiting: int
    free_blocks: int
    prompt_tokens: int  # of all samples that were let in, each time that they were
    cached_tokens: int  # those of them that the cache had
    preemptions: int


class _Flight(NamedTuple):
    """A step that has been sent and is not done."""

    number: int
    rows: Index
    sampled: Index
    computed: Ints  # after it


class Scheduler:
    """For each step: `plan`, send and apply it, `sent`; and when it is done, `done`. In between whatever else."""

    def __init__(self, schedule: Schedule, config: SchedulerConfig) -> None:
        """Raises ValueError where not even one request of the longest kind would fit."""
        slots, size = schedule.slots, schedule.block_size
        if not 2 <= config.max_model_len <= schedule.most_blocks * size:
            raise ValueError(
                f"max_model_len: expected 2 to {schedule.most_blocks * size}, as many as there is room for, "
                f"got {config.max_model_len}"
            )
        if config.token_budget < slots:
            raise ValueError(f"token_budget: expected a token for each of {slots} slots, got {config.token_budget}")
        self.cache = KVCache(schedule.blocks, size)
        self._schedule = schedule
        self._config = config
        self._size = size
        self._most_flights = 2 if config.has_overlap else 1
        self._endings = Endings(slots, config.max_model_len, config.eos_ids)
        self._requests: dict[tuple[int, int], Request] = {}  # those that are open
        self._arrivals = 0
        # ── who waits ──
        self._queue: Queue[Request] = Queue()
        self._aside: list[tuple[tuple[int, int, int], Sample]] = []  # a heap, by rank
        self._forking: dict[int, Request] = {}  # by slot of the first sample; the others wait for its prompt's blocks
        self._turns = 0  # how many were let in
        self._refused: tuple[Sample, int, bool] | None = None  # who did not fit, and into what
        # ── who has a slot: by slot ──
        self._samples: list[Sample | None] = [None] * slots
        self._priorities = np.zeros(slots, np.int64)
        self._births = np.full(slots, NEVER)  # the step with which it joined; NEVER: it is free, or has ended
        self._since = np.full(slots, NEVER)  # the step with which it got its first blocks: it may have been preempted
        self._ids = np.zeros(slots, np.int32)  # how many we have: one less is known for each of its steps in flight
        self._tails = np.zeros((slots, size), np.int32)  # those ids of the last block
        self._published = np.zeros(slots, np.int32)  # blocks
        self._prefilling: set[int] = set()
        self._leaving: list[Sample] = []
        # ── steps ──
        self._flights: deque[_Flight] = deque()
        self._comers: list[int] = []  # slots that join with the step that is being planned, or get blocks again
        self._gone: set[int] = set()  # rows that do not run in that step any more
        self._prompt_tokens = self._cached_tokens = self._preemptions = 0

    # ── from outside ──
    def submit(self, submit: Submit) -> None:
        """Raises Refused where it can never run."""
        number, length, most = (submit.server, submit.request), submit.prompt.size, self._config.max_model_len
        if not 1 <= length < most:
            raise Refused(400, f"expected a prompt of 1 to {most - 1} tokens, got {length}")
        if submit.prompt.ndim != 1 or submit.prompt.min() < 0 or submit.prompt.max() >= self._config.vocabulary:
            raise Refused(400, f"expected ids from 0 to {self._config.vocabulary - 1} in the prompt")
        if number in self._requests:
            raise Refused(409, f"request {number[1]} of server {number[0]} is open already")
        self._arrivals += 1
        inputs, keys = _inputs_of(submit.inputs, length, self._arrivals)
        salt = b"s" + submit.salt if self._config.has_prefix_cache else b"%d" % self._arrivals
        request = Request(
            *number,
            np.array(submit.prompt, np.int32),
            submit.params,
            self._size,
            arrival=self._arrivals,
            priority=max(-MOST_PRIORITY, min(submit.priority, MOST_PRIORITY)),
            client=submit.client,
            salt=salt,
            inputs=inputs,
            keys=keys,
        )
        self._requests[number] = request
        self._queue.push(request)

    def abort(self, server: int, request: int) -> None:
        """Wherever it is. One that has ended already, or never was, is no error: messages cross."""
        found = self._requests.get((server, request))
        if found is not None:
            for sample in found.samples:
                self._end(sample)

    def halt(self, slot: int, birth: int) -> None:
        """The sample that joined this slot with that step has ended. If another has the slot now, it is not meant."""
        if 0 <= slot < len(self._samples) and self._births[slot] == birth:
            self._end(self._sample(slot))

    def forget_server(self, server: int) -> list[int]:
        """Returns its requests that were open."""
        numbers = [number for its, number in self._requests if its == server]
        for number in numbers:
            self.abort(server, number)
        return numbers

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    @property
    def open_requests(self) -> int:
        return len(self._requests)

    @property
    def waiting(self) -> int:
        """Requests of which nothing runs yet."""
        return len(self._queue)

    @property
    def stats(self) -> Stats:
        status = self._schedule.status
        return Stats(
            running=self._schedule.rows.size,
            preempted=int(np.count_nonzero(status)) - self._schedule.rows.size,
            waiting=self.waiting,
            free_blocks=self.cache.free,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            preemptions=self._preemptions,
        )

    # ── the next step ──
    def plan(self, plan: Plan) -> bool:
        """Decides the next step. False, and nothing has been decided, where there is none now."""
        if len(self._flights) == self._most_flights:
            return False
        self._gone.clear()
        is_told = bool(self._leaving)
        if is_told:
            self._leave(plan)
        is_waited_for = bool(self._aside or self._queue)
        put_aside = self._make_way(plan) if is_waited_for else []
        made_way = len(put_aside)
        stalled = self._extend(plan, put_aside)
        rows = self._schedule.rows.size - len(self._gone)
        budget = self._config.token_budget - (rows - stalled - len(self._prefilling))
        if self._prefilling:
            budget = self._prefill(plan, budget)
        if is_waited_for and not stalled and len(put_aside) == made_way:  # else there is no room
            self._let_in(plan, budget, rows)
        for sample in put_aside:  # not before: their step is the next one at the earliest
            heapq.heappush(self._aside, (sample.rank, sample))
        assert stalled < rows or not rows, "nobody comes on"
        return is_told or rows > 0 or bool(self._comers)

    def _leave(self, plan: Plan) -> None:
        for sample in self._leaving:
            slot = sample.slot
            assert slot is not None
            if self._schedule.status[slot] == RUNNING:
                self._gone.add(slot)
            self.cache.release(self._schedule.blocks_of(slot).tolist())
            plan.leave(slot)
            self._endings.leave(slot)
            self._prefilling.discard(slot)
            self._samples[slot] = sample.slot = None
            sample.request.slots.discard(slot)
        self._leaving.clear()

    def _preempt(self, plan: Plan, sample: Sample) -> None:
        slot = sample.slot
        assert slot is not None
        self._preemptions += 1
        self._gone.add(slot)
        self.cache.release(self._schedule.blocks_of(slot).tolist())
        plan.preempt(slot)
        self._prefilling.discard(slot)
        sample.is_aside = True

    def _make_way(self, plan: Plan) -> list[Sample]:
        """Preempts those of worse priority for the one to be let in next, if that helps."""
        sample = self._next()
        if sample is None or self._is_elders_turn or (sample.slot is None and not plan.free_slots):
            return []
        wanted = self._blocks_for(sample) + self._spare - self.cache.free
        if wanted <= 0:
            return []
        rows = self._schedule.rows
        worse = rows[self._priorities[rows] > sample.request.priority].tolist()
        worse = [slot for slot in worse if slot not in self._gone]
        if int(self._schedule.block_counts[worse].sum()) < wanted:
            return []
        put_aside = []
        for one in sorted(map(self._sample, worse), key=_rank, reverse=True):
            if wanted <= 0:
                break
            free = self.cache.free
            self._preempt(plan, one)
            put_aside.append(one)
            wanted -= self.cache.free - free
        return put_aside

    def _extend(self, plan: Plan, put_aside: list[Sample]) -> int:
        """Gives a block to those who need one for their next token. How many there are that must wait for it."""
        short = self._schedule.short_of_blocks()  # nobody who prefills: it has blocks for all that is known
        if not short.size:
            return 0
        if self._gone:
            short = np.array([slot for slot in short.tolist() if slot not in self._gone], np.intp)
        blocks = self.cache.take(short.size)
        if blocks is not None:
            plan.append_each(short, blocks)
            return 0
        stalled = 0
        rows = [slot for slot in self._schedule.rows.tolist() if slot not in self._gone]
        victims = sorted(map(self._sample, rows), key=_rank)  # the last one is the next
        for sample in sorted(map(self._sample, short.tolist()), key=_rank):
            slot = sample.slot
            assert slot is not None
            if slot in self._gone:
                continue
            while not self.cache.free and victims[-1] is not sample:
                put_aside.append(victims.pop())
                self._preempt(plan, put_aside[-1])
            block = self.cache.take(1)
            if block is not None:
                plan.append(slot, block.tolist())
            else:
                stalled += 1
                plan.advance(slot, 0)
        return stalled

    def _prefill(self, plan: Plan, budget: int) -> int:
        """The next chunks of those who have begun. What is left of the budget."""
        for sample in sorted(map(self._sample, self._prefilling), key=_rank):
            slot = sample.slot
            assert slot is not None
            chunk = min(budget, int(self._schedule.known[slot] - self._schedule.computed[slot]))
            budget -= chunk
            if chunk != 1:
                plan.advance(slot, chunk)
        return budget

    # ── letting in ──
    @property
    def _is_elders_turn(self) -> bool:
        return self._turns % ELDER_EVERY == ELDER_EVERY - 1

    @property
    def _spare(self) -> int:
        return self.cache.blocks // SPARE

    def _next(self) -> Sample | None:
        """Who is to be let in next: nobody else is, before it fits."""
        while self._aside and not self._aside[0][1].is_aside:
            heapq.heappop(self._aside)
        again = self._aside[0][1] if self._aside else None
        if self._is_elders_turn:
            eldest = min((one for _, one in self._aside if one.is_aside), key=_age, default=None)
            oldest = self._queue.oldest()
            if oldest is None or (eldest is not None and eldest.request.arrival < oldest.arrival):
                return eldest
            return oldest.samples[0]
        first = self._queue.first()
        if first is None or (again is not None and again.request.priority <= first.priority):
            return again
        return first.samples[0]

    def _known(self, sample: Sample) -> int:
        return sample.request.prompt.size if sample.slot is None else int(self._ids[sample.slot])

    def _blocks_for(self, sample: Sample) -> int:
        return -(-self._known(sample) // self._size)

    def _let_in(self, plan: Plan, budget: int, rows: int) -> None:
        while budget > 0:
            sample = self._next()
            if sample is None or (sample.slot is None and not plan.free_slots):
                return
            before = sample, self.cache.free, rows > 0
            if before == self._refused:
                return  # nothing has changed
            found = self.cache.match(sample.hashes((self._known(sample) - 1) // self._size))
            wanted = self._blocks_for(sample) - len(found)
            if wanted + (self._spare if rows else 0) > self.cache.free:
                self.cache.release(found)
                self._refused = before
                return
            taken = self.cache.take(wanted)
            assert taken is not None
            computed = len(found) * self._size
            chunk = min(budget, self._known(sample) - computed)
            self._begin(plan, sample, [*found, *taken.tolist()], computed, chunk)
            budget -= chunk
            rows += 1

    def _begin(self, plan: Plan, sample: Sample, blocks: list[int], computed: int, chunk: int) -> None:
        """It gets a slot if it has none, and its blocks, `computed` tokens of which are found in them."""
        request = sample.request
        if request.is_waiting:
            self._queue.take(request)
        sample.is_aside = False
        if self._is_elders_turn:
            sample.rank = (ELDER, *sample.rank[1:])
        self._turns += 1
        self._prompt_tokens += self._known(sample)
        self._cached_tokens += computed
        slot = sample.slot
        if slot is not None:
            plan.resume(slot, blocks, computed=computed, chunk=chunk)
        else:
            slot = plan.join(
                request.number,
                request.prompt,
                request.interned,
                blocks,
                computed=computed,
                chunk=chunk,
                parent=min(request.slots, default=None),
                server=request.server,
                inputs=request.inputs,
                sample=sample.index,
            )
            self._queue.charge(request.client, request.prompt.size - computed)
            self._take_slot(sample, slot)
        self._priorities[slot] = sample.rank[0]
        self._published[slot] = computed // self._size
        self._prefilling.add(slot)
        self._comers.append(slot)

    def _take_slot(self, sample: Sample, slot: int) -> None:
        request, size = sample.request, self._size
        length = request.prompt.size
        sample.slot = slot
        self._samples[slot] = sample
        self._births[slot] = self._since[slot] = NEVER
        self._ids[slot] = length
        self._tails[slot, : length % size] = request.prompt[length - length % size :]
        self._endings.join(slot, request.params, length)
        request.slots.add(slot)
        if sample.index == 0 and len(request.samples) > 1:
            self._forking[slot] = request
            if length <= size:
                self._fork(slot)

    def _fork(self, slot: int) -> None:
        """The blocks of the prompt that the other samples can share are there, or will never be."""
        request = self._forking.pop(slot)
        for sample in request.samples[1:]:
            if not sample.is_ended:
                sample.is_aside = True
                heapq.heappush(self._aside, (sample.rank, sample))

    # ── what comes of it ──
    def sent(self, step: Step) -> None:
        """What was planned has been sent, and the schedule has applied it."""
        now = self._schedule
        for slot in self._comers:
            self._since[slot] = step.number
            if self._births[slot] == NEVER:
                self._births[slot] = step.number
        self._comers.clear()
        if self._prefilling:
            self._prefilling = {slot for slot in self._prefilling if now.known[slot] - now.computed[slot] > 1}
        self._flights.append(_Flight(step.number, now.rows, now.sampled, now.computed.copy()))

    def done(self, done: StepDone) -> None:
        """Raises DecodeError, and changes nothing, where it does not tell of the oldest step in flight."""
        if not self._flights or done.number != self._flights[0].number:
            awaited = f"step {self._flights[0].number}" if self._flights else "no step"
            raise DecodeError(f"expected {awaited} to be done, got {done.number} at $.number")
        if done.slots is not None or done.counts is not None:
            raise DecodeError("expected the ids of all that sample in this step, one each, got others at $.slots")
        flight = self._flights[0]
        done.require_fit(flight.sampled.size)
        self._flights.popleft()
        if done.failed is not None:
            for slot in done.failed.tolist():
                if slot < len(self._samples) and self._births[slot] <= flight.number:
                    self._end(self._sample(slot))  # before its blocks are published
        self._publish(flight)
        slots, ids = flight.sampled, done.ids
        are_theirs = self._births[slots] <= flight.number
        if not are_theirs.all():
            slots, ids = slots[are_theirs], ids[are_theirs]
        self._receive(slots, ids)
        for slot in slots[self._endings.check(slots, ids).rows].tolist():
            self._end(self._sample(slot))
        for slot, request in list(self._forking.items()):
            shared = (request.prompt.size - 1) // self._size * self._size
            if self._births[slot] <= flight.number and flight.computed[slot] >= shared:
                self._fork(slot)

    def _publish(self, flight: _Flight) -> None:
        """The device has computed this far: full blocks can be found from now on.

        Whose blocks it are not any more, as it was preempted, will look for their likes.
        """
        full = flight.computed[flight.rows] // self._size
        is_due = full > self._published[flight.rows]
        if not is_due.any():
            return
        slots, full = flight.rows[is_due], full[is_due]
        are_theirs = self._births[slots] <= flight.number
        if not are_theirs.all():
            slots, full = slots[are_theirs], full[are_theirs]
        have_them = (self._since[slots] <= flight.number) & (self._schedule.status[slots] == RUNNING)
        begun = self._published[slots].tolist()
        self._published[slots] = full
        last = self._schedule.table[slots, full - 1].tolist()
        tails, nbytes = self._tails[slots].tobytes(), self._size * self._tails.itemsize
        samples, publish = self._samples, self.cache.publish
        for row, (slot, begin, end, block, has_them) in enumerate(
            zip(slots.tolist(), begun, full.tolist(), last, have_them.tolist(), strict=True)
        ):
            sample = samples[slot]
            assert sample is not None
            if end > sample.full_blocks:  # before the next id takes the place of the first of these
                served = sample.extend(tails[row * nbytes : (row + 1) * nbytes])
                self._queue.charge(sample.request.client, served)
            if has_them:
                for at in range(begin, end - 1):
                    publish(int(self._schedule.table[slot, at]), sample.hash_of(at))
                publish(block, sample.hash_of(end - 1))

    def _receive(self, slots: Index, ids: Ints) -> None:
        counts = self._ids[slots]
        self._tails[slots, counts - counts // self._size * self._size] = ids
        self._ids[slots] = counts + 1

    def _end(self, sample: Sample) -> None:
        """Whatever it still computes is nobody's. It leaves with the next step."""
        if sample.is_ended:
            return
        sample.is_ended, sample.is_aside = True, False
        request, slot = sample.request, sample.slot
        if slot is not None:
            self._births[slot] = NEVER
            self._endings.end(slot)
            self._leaving.append(sample)
            self._queue.charge(request.client, int(self._ids[slot]) - sample.served)
            if slot in self._forking:
                self._fork(slot)
        request.open_samples -= 1
        if not request.open_samples:
            if request.is_waiting:
                self._queue.drop(request)
            self._queue.close(request.client)
            del self._requests[request.server, request.number]

    def _sample(self, slot: int) -> Sample:
        sample = self._samples[slot]
        assert sample is not None, "a row without a sample"
        return sample


def _rank(sample: Sample) -> tuple[int, int, int]:
    return sample.rank


def _age(sample: Sample) -> tuple[int, int]:
    return sample.request.arrival, sample.index


def _inputs_of(inputs: Inputs | None, length: int, arrival: int) -> tuple[tuple[Input, ...], tuple[Key, ...]]:
    """As the schedule and as the hashes want them. Raises Refused where they do not lie in the prompt."""
    if inputs is None:
        return (), ()
    positions, lengths = inputs.positions.tolist(), inputs.lengths.tolist()
    if not len(inputs.items) == len(positions) == len(lengths) or inputs.counts.tolist() != [len(positions)]:
        raise Refused(400, f"expected a place in the prompt for each of {len(inputs.items)} inputs")
    for position, count in zip(positions, lengths, strict=True):
        if position < 0 or count < 1 or position + count > length:
            raise Refused(400, f"expected an input within a prompt of {length} tokens, got {count} at {position}")
    # What has no key is like nothing else that comes; what has one is like all that have the same.
    keys = [b"%d.%d" % (arrival, at) if one.key is None else one.key for at, one in enumerate(inputs.items)]
    return tuple(zip(inputs.items, positions, lengths, strict=True)), tuple(zip(keys, positions, lengths, strict=True))
