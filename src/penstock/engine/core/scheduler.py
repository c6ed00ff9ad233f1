"""Decides which samples run in the next step, and with which blocks. No input, no output, no clock.

Every step computes one token for each decoding sample, and chunks of prompts with the rest of the token budget. A
sample gets blocks for all known tokens at admission, and then one block at a time. Full blocks can be found by hash as
soon as the device has computed them: by further samples, and by the sample itself after a preemption.

A sample that reaches its maximum length in a step in flight computes nothing more, and waits for the result.

A sample is preempted only for a better sample: of a better priority, or older with equal priority. The best sample
always advances, and in the end all samples do. A sample without a free block waits if no worse sample runs.

`request_queue` says which sample is admitted next, the cache assigns blocks, `in_flight` keeps what steps have sampled,
`step_builder` builds the step, and the messages to output processors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from operator import attrgetter

import numpy as np

from penstock.engine._native import BlockCache
from penstock.engine.core.in_flight import InFlight
from penstock.engine.core.request import (
    HASH_NBYTES,
    Request,
    RequestRefused,
    Sample,
    build_request,
    check_submit,
    take_tail,
)
from penstock.engine.core.request_queue import RequestQueue
from penstock.engine.core.scheduler_config import SchedulerConfig
from penstock.engine.core.step_builder import StepBuilder, TokensBuilder
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.columns import RUNNING, Index
from penstock.engine.protocol.messages import Ints, Step, StepDone, Submit, Tokens

AHEAD = 2  # blocks are given up to half a block of tokens early: to many rows at once, and not in every step
_sort_key = attrgetter("sort_key")
NO_ADAPTER = "this engine has no LoRA adapter of this content: it was unloaded, or nodes have different files"
SPARE = 100  # a newcomer leaves one block in so many to running samples; it would soon be preempted for them


class Scheduler:
    """For each step: `batch`, send and apply it, `on_sent`; when it is done, `on_result`. Other calls in between."""

    def __init__(self, batch: BatchState, config: SchedulerConfig, cache: BlockCache | None = None) -> None:
        """`cache`: of the batch's blocks, all of them free; None: an empty one. Raises ValueError if one request of the
        greatest length, or one token for each slot, does not fit."""
        slots, size, tokens = batch.slots, batch.block_size, config.max_num_batched_tokens
        longest = batch.max_blocks_per_request * size
        if not 2 <= config.max_model_len <= longest:
            raise ValueError(f"max_model_len: expected 2 to {longest}, which fit, got {config.max_model_len}")
        if tokens < slots:
            raise ValueError(f"max_num_batched_tokens: expected a token for each of {slots} slots, got {tokens}")
        self.cache = BlockCache(batch.blocks) if cache is None else cache
        self._batch = batch
        self._config = config
        self._size = size
        self._spare = batch.blocks // SPARE  # blocks
        self._full_step_tokens = config.full_step_tokens or tokens
        self._max_in_flight = 2 if config.has_overlap else 1
        self._requests: dict[tuple[int, int], Request] = {}  # those that are open
        self._submitted = 0  # requests so far
        # ── waiting ──
        self._queue = RequestQueue(slots)
        self._refused: tuple[Sample, int, bool] | None = None  # the sample that did not fit, and into what
        # ── slots ──
        self._in_flight = InFlight(batch, self.cache, self._queue, config.max_model_len, config.eos_ids)
        self._tokens = TokensBuilder(slots, config.output_processors)
        self._priorities = np.zeros(slots, np.int64)  # by slot
        self._prefilling: set[int] = set()
        self._leaving: list[Sample] = []
        # ── steps ──
        self._newly_scheduled: list[int] = []  # slots that join with the step that is being planned, or get blocks
        self.adapters = Counter[bytes]()  # how many slots have each adapter
        self.adapter_errors: dict[bytes, str] = {}  # why requests with an adapter are refused; "": they are not
        self._removed_slots: set[int] = set()  # rows that do not run in that step any more
        self._awaiting_result: set[int] = set()  # rows that compute nothing: all of their tokens are sampled
        self.open_samples = 0  # that have not ended
        self.preemptions = 0
        self.prefix_queries = self.prefix_hits = 0  # tokens of prompts; a preempted sample counts once
        self.resumed_found = self.resumed_computed = 0  # tokens of resumed requests, when they are admitted first
        self.closed: list[tuple[int, int]] = []  # servers and numbers of requests that have ended; the caller clears it
        # Samples that have got a slot, a first token, or an end here. The caller clears these lists.
        self.admitted: list[Sample] = []
        self.answered = self._in_flight.answered
        self.ended: list[Sample] = []

    # ── from outside ──
    def submit(self, submit: Submit, queued_ns: int = 0) -> None:
        """Queues a request. `queued_ns`: when it came. Raises RequestRefused if it can never run."""
        config, number = self._config, (submit.server, submit.request)
        check_submit(submit, config.max_model_len, config.vocabulary, config.eos_ids)
        if submit.adapter and (error := self.adapter_errors.get(submit.adapter, NO_ADAPTER)):
            raise RequestRefused(404, error)
        if number in self._requests:
            raise RequestRefused(409, f"request {number[1]} of server {number[0]} is open already")
        self._submitted += 1
        request = build_request(
            submit, self._size, self._submitted, queued_ns, config.has_prefix_cache, config.max_short_prompt
        )
        self._requests[number] = request
        self.open_samples += request.open_samples
        self._queue.push(request)

    def abort(self, server: int, request: int, sample: int | None = None) -> None:
        """Ends a request in any state, or one sample of it. One that has ended already, or never was, is no error:
        messages cross."""
        aborted = self._requests.get((server, request))
        samples = [] if aborted is None else aborted.samples
        for open_sample in samples if sample is None else samples[sample : sample + 1]:
            if open_sample.slot is not None and not open_sample.is_ended:
                self._tokens.abort(open_sample.slot)
            self._end(open_sample)

    def abort_all(self, matches: Callable[[Request], bool]) -> list[tuple[int, int]]:
        """Aborts all open requests that match, and returns their servers and numbers."""
        numbers = [number for number, request in self._requests.items() if matches(request)]
        for server, number in numbers:
            self.abort(server, number)
        return numbers

    def generated(self, number: tuple[int, int]) -> int | None:
        """Returns how many tokens a request has generated since it was submitted; None: the request has ended."""
        request = self._requests.get(number)
        return None if request is None else request.generated(self._in_flight.ids)

    def forget_output(self, output: int) -> None:
        """Drops messages due to a dead output processor, which the next life must not get."""
        self._tokens.forget(output)

    def has_adapter(self, digest: bytes) -> bool:
        """Returns whether an open request has an adapter."""
        return any(request.adapter == digest for request in self._requests.values())

    @property
    def in_flight(self) -> int:
        return self._in_flight.in_flight

    @property
    def open_requests(self) -> int:
        return len(self._requests)

    # ── the next step ──
    def schedule(self, builder: StepBuilder) -> bool:
        """Decides the next step. Returns False, with nothing decided, if there is none now: results are missing."""
        if self._in_flight.in_flight == self._max_in_flight:
            return False
        if self._is_steady(builder):
            return True
        self._removed_slots.clear()
        has_finished = bool(self._leaving)
        if has_finished:
            self._free_finished(builder)
        can_admit = self._queue.can_admit(builder.free_slots)
        if can_admit:
            self._in_flight.charge()
        preempted = self._preempt_for_priority(builder) if can_admit else []
        for_priority = len(preempted)
        self._find_fully_sampled()
        out_of_blocks = self._allocate_decode_blocks(builder, preempted)
        rows = self._batch.rows.size - len(self._removed_slots)
        advancing = rows - len(self._awaiting_result) - len(out_of_blocks)
        budget = self._config.max_num_batched_tokens - (advancing - len(self._prefilling))
        whole = budget
        if self._prefilling:
            budget = self._schedule_prefills(builder, budget)
        if can_admit and not out_of_blocks and len(preempted) == for_priority:  # else there is no room
            self._admit_waiting(builder, budget, rows, whole - budget)
        for sample in preempted:  # not before: their step is the next one at the earliest
            self._queue.put_aside(sample)
        assert advancing or self._awaiting_result or not rows, "no sample advances"
        if not (has_finished or preempted or advancing or self._newly_scheduled):
            return False
        for slot in (*self._awaiting_result, *out_of_blocks):
            builder.advance(slot, 0)
        return True

    def _is_steady(self, builder: StepBuilder) -> bool:
        """Returns whether nothing is to decide: all rows advance by a token, as before, and no sample can join."""
        if self._leaving or self._removed_slots or self._awaiting_result or self._prefilling:
            return False
        batch = self._batch
        if not batch.rows.size or self._queue.can_admit(builder.free_slots):
            return False
        return not batch.short_of_blocks().size and not self._in_flight.fully_sampled_slots()

    def _free_finished(self, builder: StepBuilder) -> None:
        for sample in self._leaving:
            slot = sample.slot
            assert slot is not None
            if self._batch.status[slot] == RUNNING:
                self._removed_slots.add(slot)
            self.cache.release(self._batch.blocks_of(slot))
            builder.leave(slot)
            self._in_flight.leave(slot)
            self._prefilling.discard(slot)
            sample.slot = None
            sample.request.slots.discard(slot)
            if adapter := sample.request.adapter:
                self.adapters[adapter] -= 1
                self.adapters += Counter()  # without those of no slot
            self._queue.leave_slot(sample)
        self._leaving.clear()

    def _preempt(self, builder: StepBuilder, sample: Sample) -> None:
        slot = sample.slot
        assert slot is not None
        self.preemptions += 1
        self._removed_slots.add(slot)
        self.cache.release(self._batch.blocks_of(slot))
        builder.preempt(slot)
        self._prefilling.discard(slot)

    def _preempt_for_priority(self, builder: StepBuilder) -> list[Sample]:
        """Preempts samples of worse priority for the one to be admitted next, if that can free enough blocks."""
        sample = self._queue.next(builder.free_slots)
        if sample is None or self._queue.is_oldest_next or (sample.slot is None and not builder.free_slots):
            return []
        needed = self._blocks_for(sample) + self._spare - self.cache.num_free
        if needed <= 0:
            return []
        rows = self._batch.rows
        worse = rows[self._priorities[rows] > sample.request.priority].tolist()
        worse = [slot for slot in worse if slot not in self._removed_slots]
        if int(self._batch.block_counts[worse].sum()) < needed:
            return []
        preempted = []
        for victim in sorted(map(self._in_flight.sample, worse), key=_sort_key, reverse=True):
            if needed <= 0:
                break
            free = self.cache.num_free
            self._preempt(builder, victim)
            preempted.append(victim)
            needed -= self.cache.num_free - free
        return preempted

    def _find_fully_sampled(self) -> None:
        slots, status = self._in_flight.fully_sampled_slots(), self._batch.status
        self._awaiting_result = {slot for slot in slots if status[slot] == RUNNING and slot not in self._removed_slots}
        self._prefilling -= self._awaiting_result

    def _allocate_decode_blocks(self, builder: StepBuilder, preempted: list[Sample]) -> list[int]:
        """Gives a block to each row without room for the next token. Returns the slots that must wait."""
        short = self._short_of_blocks(1)  # no row that prefills: it has blocks for all known tokens
        if not short.size:
            return []
        for some in (self._short_of_blocks(self._size // AHEAD), short):
            blocks = self.cache.take(some.size)
            if blocks is not None:
                builder.append_one_each(some, blocks)
                return []
        out_of_blocks = []
        still = self._removed_slots | self._awaiting_result
        rows = [slot for slot in self._batch.rows.tolist() if slot not in still]
        victims = sorted(map(self._in_flight.sample, rows), key=_sort_key)  # the last one is preempted next
        for sample in sorted(map(self._in_flight.sample, short.tolist()), key=_sort_key):
            slot = sample.slot
            assert slot is not None
            if slot in self._removed_slots:
                continue
            while not self.cache.num_free and victims[-1] is not sample:
                preempted.append(victims.pop())
                self._preempt(builder, preempted[-1])
            block = self.cache.take(1)
            if block is not None:
                builder.append(slot, block.tolist())
            else:
                out_of_blocks.append(slot)
        return out_of_blocks

    def _short_of_blocks(self, by: int) -> Index:
        """Returns the advancing slots without a block for all of the next `by` tokens."""
        batch = self._batch
        short = batch.short_of_blocks(by)
        short = short[batch.block_counts[short] < batch.max_blocks_per_request]  # the others end before
        if short.size and (self._removed_slots or self._awaiting_result):
            still = self._removed_slots | self._awaiting_result
            short = np.array([slot for slot in short.tolist() if slot not in still], np.intp)
        return short

    def _schedule_prefills(self, builder: StepBuilder, budget: int) -> int:
        """Schedules the next chunks of rows that prefill. Returns what is left of the budget."""
        for sample in sorted(map(self._in_flight.sample, self._prefilling), key=_sort_key):
            slot = sample.slot
            assert slot is not None
            chunk = self._chunk(sample, int(self._batch.computed[slot]), budget)
            budget -= chunk
            if chunk != 1:
                builder.advance(slot, chunk)
        return budget

    def _chunk(self, sample: Sample, computed: int, budget: int) -> int:
        """Returns how many tokens the sample computes in the next step. Ids after the last full block of a resumed
        sample are computed singly where a chunk is other arithmetic: then the answer is the undisturbed one."""
        rest = self._known(sample) - computed
        if self._config.repeats_singly and sample.generated.size and rest <= self._size + 1:
            rest = max(1, sample.request.prompt.size - computed)
        return min(budget, rest)

    # ── admission ──
    def _takes_adapter_of(self, sample: Sample) -> bool:
        """Returns whether the batch has the sample's adapter, or may have one adapter more."""
        adapter, limit = sample.request.adapter, self._config.max_loras
        if not adapter or limit is None:
            return True
        return adapter in self.adapters or len(self.adapters) < limit

    def _known(self, sample: Sample) -> int:
        return sample.num_tokens if sample.slot is None else self._in_flight.ids(sample.slot)

    def _blocks_for(self, sample: Sample) -> int:
        return -(-self._known(sample) // self._size)

    def _admit_waiting(self, builder: StepBuilder, budget: int, rows: int, scheduled: int) -> None:
        """Admits samples until the step is full. `scheduled`: tokens of prompts that the step computes already.

        Further prompts would only delay the first tokens of those in a full step."""
        while budget > 0 and scheduled < self._full_step_tokens:
            sample = self._queue.next(builder.free_slots)
            if sample is None or (sample.slot is None and not (builder.free_slots and self._takes_adapter_of(sample))):
                return
            before = sample, self.cache.num_free, rows > 0
            if before == self._refused:
                return  # nothing has changed
            if self._config.computes_whole and self._known(sample) > budget:
                return  # the next step has room
            hashes = sample.chain[HASH_NBYTES:] if sample.slot is None else self._in_flight.hashes(sample.slot)
            cached = self.cache.match(hashes[: (self._known(sample) - 1) // self._size * HASH_NBYTES])
            needed = self._blocks_for(sample) - cached.size
            if needed + (self._spare if rows else 0) > self.cache.num_free:
                self.cache.release(cached)
                self._refused = before
                return
            tail, in_tail = take_tail(self.cache, sample, cached.size)
            new = self.cache.take(needed - tail.size)
            assert new is not None
            computed = cached.size * self._size + in_tail
            chunk = self._chunk(sample, computed, budget)
            self._admit(builder, sample, np.concatenate((cached, tail, new)), computed, chunk)
            budget -= chunk
            scheduled += chunk
            rows += 1

    def _admit(self, builder: StepBuilder, sample: Sample, blocks: Ints, computed: int, chunk: int) -> None:
        """Admits a sample: assigns a slot if necessary, and blocks in which `computed` tokens were found."""
        request = sample.request
        self._queue.admit(sample)
        slot = sample.slot
        if not request.slots and not request.has_begun:
            request.cached = computed
        if slot is not None:
            builder.resume(slot, blocks, computed=computed, chunk=chunk)
        else:
            slot = builder.join(
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
                seed=request.seed,
                generated=sample.generated,
                grammar=request.grammar,
                adapter=request.adapter,
            )
            self._take_slot(sample, slot)
            if not sample.generated.size:  # else the lost group did all of the above
                self._count_admitted(sample, computed)
            if request.has_begun:
                self.resumed_found += computed
                self.resumed_computed += self._known(sample) - computed
        self._priorities[slot] = sample.sort_key[0]
        self._in_flight.begin(slot, computed // self._size)
        self._prefilling.add(slot)
        self._newly_scheduled.append(slot)

    def _count_admitted(self, sample: Sample, computed: int) -> None:
        self._queue.charge(sample.request.client, sample.request.prompt.size - computed)
        self.admitted.append(sample)
        if self._config.has_prefix_cache:
            self.prefix_queries += sample.request.prompt.size
            self.prefix_hits += computed

    def _take_slot(self, sample: Sample, slot: int) -> None:
        sample.slot = slot
        self._in_flight.join(slot, sample)
        self._tokens.start(sample, slot)
        sample.request.slots.add(slot)
        if sample.request.adapter:
            self.adapters[sample.request.adapter] += 1
        self._queue.take_slot(sample, slot)

    # ── steps sent and done ──
    def on_sent(self, step: Step) -> list[tuple[int, Tokens]]:
        """Records that the planned step has been sent, and applied by the batch state. Returns messages to the output
        processors about its new samples."""
        batch = self._batch
        self._in_flight.sent(step, self._newly_scheduled)
        self._newly_scheduled.clear()
        if self._prefilling:
            self._prefilling = {slot for slot in self._prefilling if batch.known[slot] - batch.computed[slot] > 1}
        return self._tokens.build_started() if step.joined is not None else []

    def on_result(self, done: StepDone) -> list[tuple[int, Tokens]]:
        """Applies a result. Returns messages to the output processors about it. Raises DecodeError, and changes
        nothing, if it misfits the oldest step in flight."""
        in_flight = self._in_flight
        failures = done.failures()
        step = in_flight.pop_oldest(done)
        failed = in_flight.failed(step, failures)
        for end in failed:
            self._end(in_flight.sample(end.slot))  # before its blocks are published
        prompts = in_flight.of_present(step, done.prompt_logprobs) if done.prompt_logprobs else ()
        in_flight.publish(step)
        rows, ended = in_flight.receive(step, done.ids)
        self.ended += [in_flight.sample(end.slot) for end in ended]
        for end in ended:
            self._end(in_flight.sample(end.slot))
        for slot, request in self._queue.forking:
            shared = (request.prompt.size - 1) // self._size * self._size
            if in_flight.has_computed(slot, step, shared):
                self._queue.fork(slot)
        news = rows, done.logprobs, failed + ended, prompts, done.vectors
        return self._tokens.build(step.sampled, done.ids, *news)

    def _end(self, sample: Sample) -> None:
        """Ends a sample: later ids are discarded. The sample leaves the slot with the next step."""
        if sample.is_ended:
            return
        sample.is_ended, sample.is_aside = True, False
        self.open_samples -= 1
        request, slot = sample.request, sample.slot
        if slot is not None:
            self._in_flight.end(slot)
            self._leaving.append(sample)
            self._queue.charge(request.client, sample.serve(self._in_flight.ids(slot)))
            self._queue.fork(slot)
        request.open_samples -= 1
        if not request.open_samples:
            self._queue.close(request)
            self.closed.append((request.server, request.number))
            del self._requests[request.server, request.number]
