"""Decides which samples run in the next step, and with which blocks. No input, no output, no clock.

Every step computes one token for each sample that decodes, and with what is left of the token budget the next chunks of
prompts. A sample gets blocks for all of its known tokens when it is admitted, and then one at a time. Its full blocks
are found by others, and by itself after a preemption, as soon as the device has computed them.

A sample that reaches its maximum length in a step in flight computes nothing more, and waits for the result.

A sample is preempted only for a better one: of a better priority, or of the same priority and here for longer. So the
best sample always advances, and in the end all do; a sample that is short of a block waits if no worse one runs. One of
`ELDER_EVERY` admissions is that of the sample that has been here longest, and it is not preempted for others; so no
priority and no client can starve another. Within one priority the `request_queue` is fair to clients by tokens.

Slots are shared as well, as samples keep them for the whole of long answers: a large client, one that has 1/SLOT_SHARE
of them, lets the samples of smaller clients go first and leaves the last 1/SLOT_SHARE to them. In this a request
without a client counts as a client of its own, so that many small ones may have all slots.

`step_builder` writes the step, the cache assigns blocks, and `in_flight` keeps what steps have sampled.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.engine._native import BlockCache
from penstock.engine.core.in_flight import InFlight
from penstock.engine.core.request import HASH_NBYTES, Request, RequestRefused, Sample, check_inputs
from penstock.engine.core.request_queue import RequestQueue
from penstock.engine.core.step_builder import StepBuilder
from penstock.engine.core.tokens_builder import TokensBuilder
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.columns import RUNNING, Index
from penstock.engine.protocol.messages import Ints, Step, StepDone, Submit, Tokens

ELDER_EVERY = 8
ELDER = -(1 << 40)  # a priority that no request has
AHEAD = 2  # blocks are given up to half a block of tokens early: to many rows at once, and not in every step
SLOT_SHARE = 16  # a client with one slot in so many is large, and one in so many is kept for those that are not
SPARE = 100  # a newcomer leaves one block in so many to running samples; it would soon be preempted for them


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`Scheduler` checks it against its schedule."""

    max_model_len: int  # tokens of prompt and answer together
    max_num_batched_tokens: int = 2048  # that one step computes at most
    vocabulary: int = 1 << 31  # ids of prompts are below that
    eos_ids: tuple[int, ...] = ()
    has_prefix_cache: bool = True  # False: blocks are shared only within a request
    has_overlap: bool = True  # a step is planned while the one before it runs
    max_short_prompt: int | None = None  # prompts of more tokens share no blocks with those of fewer; None: all share
    output_processors: int = 1  # that are told of tokens


class Stats(NamedTuple):
    """Gauges of the present, and counters since the start."""

    running: int
    preempted: int
    waiting: int
    free_blocks: int
    prompt_tokens: int  # of all samples that were let in, each time that they were
    cached_tokens: int  # those of them that the cache had
    preemptions: int


class Scheduler:
    """For each step: `schedule`, send and apply it, `on_sent`; when it is done, `on_result`. Other calls in between."""

    def __init__(self, schedule: BatchState, config: SchedulerConfig) -> None:
        """Raises ValueError if one request of the greatest length, or one token for each slot, does not fit."""
        slots, size = schedule.slots, schedule.block_size
        if not 2 <= config.max_model_len <= schedule.max_blocks_per_request * size:
            raise ValueError(
                f"max_model_len: expected 2 to {schedule.max_blocks_per_request * size}, as many as there is room for, "
                f"got {config.max_model_len}"
            )
        if config.max_num_batched_tokens < slots:
            raise ValueError(
                f"max_num_batched_tokens: expected a token for each of {slots} slots, "
                f"got {config.max_num_batched_tokens}"
            )
        self.cache = BlockCache(schedule.blocks)
        self._schedule = schedule
        self._config = config
        self._size = size
        self._most_flights = 2 if config.has_overlap else 1
        self._requests: dict[tuple[int, int], Request] = {}  # those that are open
        self._arrivals = 0
        # ── waiting ──
        self._queue: RequestQueue[Request] = RequestQueue()
        self._aside: list[tuple[tuple[int, int, int], Sample]] = []  # a heap, by rank
        self._forking: dict[int, Request] = {}  # by slot of the first sample; the others wait for its prompt's blocks
        self._turns = 0  # admissions so far
        self._reserve = slots // SLOT_SHARE  # slots; none where there are few
        self._slots_of: dict[str, int] = {}  # by named client
        self._large: set[str] = set()  # named clients that are large
        self._refused: tuple[Sample, int, bool] | None = None  # the sample that did not fit, and into what
        # ── slots ──
        self._progress = InFlight(schedule, self.cache, self._queue, config.max_model_len, config.eos_ids)
        self._tokens = TokensBuilder(slots, config.output_processors)
        self._priorities = np.zeros(slots, np.int64)  # by slot
        self._prefilling: set[int] = set()
        self._leaving: list[Sample] = []
        # ── steps ──
        self._newly_scheduled: list[int] = []  # slots that join with the step that is being planned, or get blocks
        self._removed_slots: set[int] = set()  # rows that do not run in that step any more
        self._awaiting_result: set[int] = set()  # rows that compute nothing in it: all of their tokens are sampled
        self._prompt_tokens = self._cached_tokens = self._preemptions = 0
        self._open_samples = 0
        self.prefix_queries = self.prefix_hits = 0  # tokens of prompts; a preempted sample counts once
        self.admitted_ns: list[int] = []  # arrivals of the samples that have got a slot; the caller clears it

    # ── from outside ──
    def submit(self, submit: Submit, queued_ns: int = 0) -> None:
        """Queues a request. `queued_ns`: its arrival, for `admitted_ns`. Raises RequestRefused if it can never run."""
        number, length, most = (submit.server, submit.request), submit.prompt.size, self._config.max_model_len
        if not 1 <= length < most:
            raise RequestRefused(400, f"expected a prompt of 1 to {most - 1} tokens, got {length}")
        if submit.prompt.ndim != 1 or submit.prompt.min() < 0 or submit.prompt.max() >= self._config.vocabulary:
            raise RequestRefused(400, f"expected ids from 0 to {self._config.vocabulary - 1} in the prompt")
        try:
            submit.params.require_choice(self._config.eos_ids, self._config.vocabulary)
        except ValueError as error:
            raise RequestRefused(400, str(error)) from None
        if number in self._requests:
            raise RequestRefused(409, f"request {number[1]} of server {number[0]} is open already")
        self._arrivals += 1
        inputs, keys = check_inputs(submit.inputs, length, self._arrivals)
        max_short_prompt = self._config.max_short_prompt
        kind = b"s" if max_short_prompt is None or length <= max_short_prompt else b"l"
        salt = kind + submit.salt if self._config.has_prefix_cache else b"%d" % self._arrivals
        request = Request(
            submit, self._size, arrival=self._arrivals, salt=salt, inputs=inputs, keys=keys, queued_ns=queued_ns
        )
        self._requests[number] = request
        self._open_samples += request.params.n
        self._queue.push(request)

    def abort(self, server: int, request: int, sample: int | None = None) -> None:
        """Ends a request in any state, or one sample of it. One that has ended already, or never was, is no error:
        messages cross."""
        found = self._requests.get((server, request))
        samples = [] if found is None else found.samples
        for one in samples if sample is None else samples[sample : sample + 1]:
            if one.slot is not None and not one.is_ended:
                self._tokens.abort(one.slot)
            self._end(one)

    def forget_server(self, server: int) -> list[int]:
        """Aborts all open requests of a server and returns their numbers."""
        numbers = [number for its, number in self._requests if its == server]
        for number in numbers:
            self.abort(server, number)
        return numbers

    @property
    def in_flight(self) -> int:
        return self._progress.in_flight

    @property
    def open_requests(self) -> int:
        return len(self._requests)

    @property
    def waiting(self) -> int:
        """Returns how many requests wait with no sample admitted yet."""
        return len(self._queue)

    @property
    def open_samples(self) -> int:
        return self._open_samples

    @property
    def running(self) -> int:
        """Returns how many samples are in the batch of the last step."""
        return self._schedule.rows.size

    @property
    def stats(self) -> Stats:
        status = self._schedule.status
        return Stats(
            running=self._schedule.rows.size,
            preempted=int(np.count_nonzero(status)) - self._schedule.rows.size,
            waiting=self.waiting,
            free_blocks=self.cache.num_free,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            preemptions=self._preemptions,
        )

    # ── the next step ──
    def schedule(self, plan: StepBuilder) -> bool:
        """Decides the next step. Returns False, with nothing decided, if there is none now: results are missing."""
        if self._progress.in_flight == self._most_flights:
            return False
        if self._is_steady(plan):
            return True
        self._removed_slots.clear()
        has_finished = bool(self._leaving)
        if has_finished:
            self._free_finished(plan)
        is_waited_for = self._is_waited_for(plan)
        if is_waited_for:
            self._progress.charge()
        preempted = self._preempt_for_priority(plan) if is_waited_for else []
        made_way = len(preempted)
        self._find_fully_sampled()
        out_of_blocks = self._allocate_decode_blocks(plan, preempted)
        rows = self._schedule.rows.size - len(self._removed_slots)
        advancing = rows - len(self._awaiting_result) - len(out_of_blocks)
        budget = self._config.max_num_batched_tokens - (advancing - len(self._prefilling))
        if self._prefilling:
            budget = self._schedule_prefills(plan, budget)
        if is_waited_for and not out_of_blocks and len(preempted) == made_way:  # else there is no room
            self._admit_waiting(plan, budget, rows)
        for sample in preempted:  # not before: their step is the next one at the earliest
            self._wait_aside(sample)
        assert advancing or self._awaiting_result or not rows, "nobody comes on"
        if not (has_finished or preempted or advancing or self._newly_scheduled):
            return False
        for slot in (*self._awaiting_result, *out_of_blocks):
            plan.advance(slot, 0)
        return True

    def _is_steady(self, plan: StepBuilder) -> bool:
        """Returns whether nothing is to decide: all rows advance by a token, as before, and no sample can join."""
        if (
            self._leaving
            or self._removed_slots
            or self._awaiting_result
            or self._prefilling
            or self._is_waited_for(plan)
        ):
            return False
        schedule = self._schedule
        return (
            schedule.rows.size > 0 and not schedule.short_of_blocks().size and not self._progress.fully_sampled_slots()
        )

    def _is_waited_for(self, plan: StepBuilder) -> bool:
        """Returns whether a sample is aside, or a request is queued and a slot is free."""
        return bool(self._aside) or (plan.free_slots > 0 and bool(self._queue))

    def _free_finished(self, plan: StepBuilder) -> None:
        for sample in self._leaving:
            slot = sample.slot
            assert slot is not None
            if self._schedule.status[slot] == RUNNING:
                self._removed_slots.add(slot)
            self.cache.release(self._schedule.blocks_of(slot))
            plan.leave(slot)
            self._progress.leave(slot)
            self._prefilling.discard(slot)
            sample.slot = None
            sample.request.slots.discard(slot)
            self._count_slot(sample.request.client, -1)
        self._leaving.clear()

    def _preempt(self, plan: StepBuilder, sample: Sample) -> None:
        slot = sample.slot
        assert slot is not None
        self._preemptions += 1
        self._removed_slots.add(slot)
        self.cache.release(self._schedule.blocks_of(slot))
        plan.preempt(slot)
        self._prefilling.discard(slot)

    def _preempt_for_priority(self, plan: StepBuilder) -> list[Sample]:
        """Preempts samples of worse priority for the one to be admitted next, if that can free enough blocks."""
        sample = self._next(plan.free_slots)
        if sample is None or self._is_elders_turn or (sample.slot is None and not plan.free_slots):
            return []
        wanted = self._blocks_for(sample) + self._spare - self.cache.num_free
        if wanted <= 0:
            return []
        rows = self._schedule.rows
        worse = rows[self._priorities[rows] > sample.request.priority].tolist()
        worse = [slot for slot in worse if slot not in self._removed_slots]
        if int(self._schedule.block_counts[worse].sum()) < wanted:
            return []
        preempted = []
        for one in sorted(map(self._progress.sample, worse), key=_rank, reverse=True):
            if wanted <= 0:
                break
            free = self.cache.num_free
            self._preempt(plan, one)
            preempted.append(one)
            wanted -= self.cache.num_free - free
        return preempted

    def _find_fully_sampled(self) -> None:
        slots, status = self._progress.fully_sampled_slots(), self._schedule.status
        self._awaiting_result = {slot for slot in slots if status[slot] == RUNNING and slot not in self._removed_slots}
        self._prefilling -= self._awaiting_result

    def _allocate_decode_blocks(self, plan: StepBuilder, preempted: list[Sample]) -> list[int]:
        """Gives a block to each row that needs one for its next token. Returns the slots that must wait for one."""
        short = self._short_of_blocks(1)  # no row that prefills: it has blocks for all known tokens
        if not short.size:
            return []
        for some in (self._short_of_blocks(self._size // AHEAD), short):
            blocks = self.cache.take(some.size)
            if blocks is not None:
                plan.append_one_each(some, blocks)
                return []
        out_of_blocks = []
        still = self._removed_slots | self._awaiting_result
        rows = [slot for slot in self._schedule.rows.tolist() if slot not in still]
        victims = sorted(map(self._progress.sample, rows), key=_rank)  # the last one is preempted next
        for sample in sorted(map(self._progress.sample, short.tolist()), key=_rank):
            slot = sample.slot
            assert slot is not None
            if slot in self._removed_slots:
                continue
            while not self.cache.num_free and victims[-1] is not sample:
                preempted.append(victims.pop())
                self._preempt(plan, preempted[-1])
            block = self.cache.take(1)
            if block is not None:
                plan.append(slot, block.tolist())
            else:
                out_of_blocks.append(slot)
        return out_of_blocks

    def _short_of_blocks(self, by: int) -> Index:
        """Returns the slots that advance and have no block for one of their next `by` tokens."""
        schedule = self._schedule
        short = schedule.short_of_blocks(by)
        short = short[schedule.block_counts[short] < schedule.max_blocks_per_request]  # the others end before
        if short.size and (self._removed_slots or self._awaiting_result):
            still = self._removed_slots | self._awaiting_result
            short = np.array([slot for slot in short.tolist() if slot not in still], np.intp)
        return short

    def _schedule_prefills(self, plan: StepBuilder, budget: int) -> int:
        """Schedules the next chunks of rows that prefill. Returns what is left of the budget."""
        for sample in sorted(map(self._progress.sample, self._prefilling), key=_rank):
            slot = sample.slot
            assert slot is not None
            chunk = min(budget, int(self._schedule.known[slot] - self._schedule.computed[slot]))
            budget -= chunk
            if chunk != 1:
                plan.advance(slot, chunk)
        return budget

    # ── admission ──
    @property
    def _is_elders_turn(self) -> bool:
        return self._turns % ELDER_EVERY == ELDER_EVERY - 1

    @property
    def _spare(self) -> int:
        return self.cache.num_blocks // SPARE

    def _next(self, free_slots: int) -> Sample | None:
        """Returns the sample to be admitted next: no other one is, before it fits."""
        small, large = self._first_aside()
        if self._is_elders_turn:
            eldest = min((one for _, one in self._aside if one.is_preempted), key=_age, default=None)
            oldest = self._queue.oldest()
            if oldest is not None and (eldest is None or eldest.request.arrival >= oldest.arrival):
                eldest = oldest.samples[0]
            if eldest is None or free_slots > self._reserve or not self._is_large(eldest):
                return eldest
        first = self._queue.first(() if free_slots > self._reserve else self._large)
        if first is not None and (small is None or first.priority < small.request.priority):
            small = first.samples[0]
        if large is None or free_slots <= self._reserve:
            return small
        return large if small is None or large.request.priority < small.request.priority else small

    def _first_aside(self) -> tuple[Sample | None, Sample | None]:
        """Returns the best sample aside that is not large (`_is_large`), and the best large one ranked before it."""
        small, large = None, []
        while self._aside and small is None:
            sample = self._aside[0][1]
            if not sample.is_preempted:
                heapq.heappop(self._aside)
            elif self._is_large(sample):
                large.append(heapq.heappop(self._aside))
            else:
                small = sample
        for entry in large:
            heapq.heappush(self._aside, entry)
        return small, large[0][1] if large else None

    def _is_large(self, sample: Sample) -> bool:
        """Returns whether the sample wants a slot, and its client has a large share of them."""
        request = sample.request
        slots = self._slots_of.get(request.client, 0) if request.client else len(request.slots)
        return sample.slot is None and 0 < self._reserve <= slots

    def _count_slot(self, client: str, change: int) -> None:
        if not client:
            return
        slots = self._slots_of[client] = self._slots_of.get(client, 0) + change
        if not slots:
            del self._slots_of[client]
        if 0 < self._reserve <= slots:
            self._large.add(client)
        else:
            self._large.discard(client)

    def _known(self, sample: Sample) -> int:
        return sample.request.prompt.size if sample.slot is None else self._progress.ids(sample.slot)

    def _blocks_for(self, sample: Sample) -> int:
        return -(-self._known(sample) // self._size)

    def _admit_waiting(self, plan: StepBuilder, budget: int, rows: int) -> None:
        while budget > 0:
            sample = self._next(plan.free_slots)
            if sample is None or (sample.slot is None and not plan.free_slots):
                return
            before = sample, self.cache.num_free, rows > 0
            if before == self._refused:
                return  # nothing has changed
            hashes = sample.request.hashes if sample.slot is None else self._progress.hashes(sample.slot)
            found = self.cache.match(hashes[: (self._known(sample) - 1) // self._size * HASH_NBYTES])
            wanted = self._blocks_for(sample) - found.size
            if wanted + (self._spare if rows else 0) > self.cache.num_free:
                self.cache.release(found)
                self._refused = before
                return
            taken = self.cache.take(wanted)
            assert taken is not None
            computed = found.size * self._size
            chunk = min(budget, self._known(sample) - computed)
            self._begin(plan, sample, np.concatenate((found, taken)), computed, chunk)
            budget -= chunk
            rows += 1

    def _begin(self, plan: StepBuilder, sample: Sample, blocks: Ints, computed: int, chunk: int) -> None:
        """Admits a sample: it gets a slot if it has none, and blocks in which `computed` of its tokens are found."""
        request = sample.request
        if request.is_waiting:
            self._queue.take(request)
        sample.is_preempted = False
        if self._is_elders_turn:
            sample.rank = (ELDER, *sample.rank[1:])
        self._turns += 1
        self._prompt_tokens += self._known(sample)
        self._cached_tokens += computed
        slot = sample.slot
        if not request.slots:
            request.cached = computed
        if slot is not None:
            plan.resume(slot, blocks, computed=computed, chunk=chunk)
        else:
            slot = plan.join(
                request.number,
                request.prompt,
                request.params,
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
            self.admitted_ns.append(request.queued_ns)
            if self._config.has_prefix_cache:
                self.prefix_queries += request.prompt.size
                self.prefix_hits += computed
        self._priorities[slot] = sample.rank[0]
        self._progress.begin(slot, computed // self._size)
        self._prefilling.add(slot)
        self._newly_scheduled.append(slot)

    def _take_slot(self, sample: Sample, slot: int) -> None:
        request = sample.request
        sample.slot = slot
        self._progress.join(slot, sample)
        self._tokens.start(sample, slot)
        request.slots.add(slot)
        self._count_slot(request.client, 1)
        if sample.index:
            self._put_aside(request, sample.index + 1)
        elif len(request.samples) > 1:
            self._forking[slot] = request
            if request.prompt.size <= self._size:
                self._fork(slot)

    def _fork(self, slot: int) -> None:
        """Lets the other samples wait for a slot: the prompt blocks that they can share are there, or will never be."""
        self._put_aside(self._forking.pop(slot), 1)

    def _put_aside(self, request: Request, index: int) -> None:
        """Puts the next sample, from `index` on, aside to wait for a slot; once it has one, the next one follows."""
        for sample in request.samples[index:]:
            if not sample.is_ended:
                self._wait_aside(sample)
                return

    def _wait_aside(self, sample: Sample) -> None:
        sample.is_preempted = True  # its entries in the heap count, also one of an earlier time
        heapq.heappush(self._aside, (sample.rank, sample))

    # ── steps sent and done ──
    def on_sent(self, step: Step) -> list[tuple[int, Tokens]]:
        """Records that the planned step has been sent, and applied by the batch state. Returns messages to the output
        processors about its new samples."""
        now = self._schedule
        self._progress.sent(step, self._newly_scheduled)
        self._newly_scheduled.clear()
        if self._prefilling:
            self._prefilling = {slot for slot in self._prefilling if now.known[slot] - now.computed[slot] > 1}
        return self._tokens.build_started() if step.joined is not None else []

    def on_result(self, done: StepDone) -> list[tuple[int, Tokens]]:
        """Applies a result. Returns messages to the output processors about it. Raises DecodeError, and changes
        nothing, if it misfits the oldest step in flight."""
        progress = self._progress
        failures = done.failures()
        flight = progress.pop_oldest(done)
        failed = progress.failed(flight, failures)
        for end in failed:
            self._end(progress.sample(end.slot))  # before its blocks are published
        progress.publish(flight)
        rows, ended = progress.receive(flight, done.ids)
        for end in ended:
            self._end(progress.sample(end.slot))
        for slot, request in list(self._forking.items()):
            shared = (request.prompt.size - 1) // self._size * self._size
            if progress.has_computed(slot, flight, shared):
                self._fork(slot)
        return self._tokens.build(flight.sampled, done.ids, rows, done.logprobs, failed + ended)

    def _end(self, sample: Sample) -> None:
        """Ends a sample: ids that it still samples are discarded. It leaves its slot with the next step."""
        if sample.is_ended:
            return
        sample.is_ended, sample.is_preempted = True, False
        self._open_samples -= 1
        request, slot = sample.request, sample.slot
        if slot is not None:
            self._progress.end(slot)
            self._leaving.append(sample)
            self._queue.charge(request.client, sample.serve(self._progress.ids(slot)))
            if slot in self._forking:
                self._fork(slot)
        request.open_samples -= 1
        if not request.open_samples:
            if request.is_waiting:
                self._queue.drop(request)
            self._queue.close(request.client)
            del self._requests[request.server, request.number]


def _rank(sample: Sample) -> tuple[int, int, int]:
    return sample.rank


def _age(sample: Sample) -> tuple[int, int]:
    return sample.request.arrival, sample.index
