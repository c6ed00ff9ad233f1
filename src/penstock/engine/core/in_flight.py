"""The progress of each slot: the steps in flight, the ids they have sampled, the blocks that these have filled,
and the end of the sample.

The scheduler assigns slots and blocks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from penstock.engine._native import BlockCache, PrefixHasher, count_tokens
from penstock.engine.core.request import Sample
from penstock.engine.core.request_queue import RequestQueue
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.columns import RUNNING, Index
from penstock.engine.protocol.messages import Ended, FinishReason, Ints, PromptLogprobs, SamplingParams, Step, StepDone
from penstock.errors import DecodeError

NO_MAX = np.int32(np.iinfo(np.int32).max)  # of a free slot, and of a sample that has ended
BUCKETS = 1 << 14  # stop ids are looked up by their low bits first, which few ids share


class InFlightStep(NamedTuple):
    """A step that has been sent and is not done."""

    number: int
    rows: Index
    sampled: Index
    computed: Ints  # by slot, after the step


class StopConditions:
    """How many tokens each slot has generated, and which id or length ends its sample. Arrays are by slot.

    The core tells output processors, which find the ends by a stop string.
    """

    def __init__(self, slots: int, max_model_len: int, eos_ids: Collection[int]) -> None:
        """`eos_ids` end every sample that does not ignore them; `max_model_len` is for prompt and answer together."""
        self.generated = np.zeros(slots, np.int32)
        self.has_ended = np.ones(slots, np.bool_)  # free slots too: ids sampled there are discarded
        self.limits = np.zeros(slots, np.int32)  # tokens that the sample generates at most
        self._least = np.zeros(slots, np.int32)  # min_tokens
        self._stops: list[frozenset[int]] = [frozenset()] * slots
        self._heeds_eos = np.zeros(slots, np.bool_)
        self._max_model_len = max_model_len
        self._eos_ids = frozenset(eos_ids)
        self._users: Counter[int] = Counter()  # how many slots would end by an id of this bucket, where any would
        self._marks = np.zeros(BUCKETS // 8, np.uint8)  # a bit for each bucket that is used: 2 KB stay at hand
        for token in self._eos_ids:
            self._use(token % BUCKETS, 1)

    def join(self, slot: int, params: SamplingParams, prompt_length: int, generated: int = 0) -> None:
        """`generated`: tokens before the sample was resumed. Raises ValueError where the model has no
        room for a single token after this prompt."""
        room = self._max_model_len - prompt_length
        if room < 1:
            raise ValueError(
                f"expected a prompt of less than {self._max_model_len} tokens, as many as fit the model with an "
                f"answer, got {prompt_length}"
            )
        self._forget_stops(slot)
        self.generated[slot] = generated
        self.has_ended[slot] = False
        self.limits[slot] = room if params.max_tokens is None else min(room, params.max_tokens)
        self._least[slot] = params.min_tokens
        self._heeds_eos[slot] = not params.ignore_eos
        self._stops[slot] = frozenset(params.stop_token_ids)
        for token in self._stops[slot]:
            self._use(token % BUCKETS, 1)

    def leave(self, slot: int) -> None:
        self._forget_stops(slot)
        self.has_ended[slot] = True

    def end(self, slot: int) -> None:
        """Ends the sample for another reason: ids sampled for it from now on are discarded."""
        self.has_ended[slot] = True

    def may_stop(self, slot: int) -> bool:
        """Returns whether the token counted last may end the sample: `min_tokens` have come before."""
        return bool(self.generated[slot] > self._least[slot])

    def check(self, slots: Index, ids: Ints) -> list[Ended]:
        """Counts one more token of each slot, without duplicates. Returns and marks the samples that end.

        An id ends a sample only after `min_tokens` ids; the sampler does not choose end ids before. Ended slots are
        skipped.
        """
        rows = count_tokens(self.generated, self.limits, self._marks, slots, ids)
        if rows is None:
            return []
        ended: list[Ended] = []
        for slot, token in zip(slots[rows].tolist(), ids[rows].tolist(), strict=True):
            if self.has_ended[slot]:
                continue
            reason, stop = None, None
            if self.may_stop(slot):
                if token in self._eos_ids and self._heeds_eos[slot]:
                    reason = FinishReason.STOP
                elif token in self._stops[slot]:
                    reason, stop = FinishReason.STOP, token
            if reason is None and self.generated[slot] >= self.limits[slot]:
                reason = FinishReason.LENGTH
            if reason is not None:
                self.has_ended[slot] = True
                ended.append(Ended(slot, reason, stop))
        return ended

    def _forget_stops(self, slot: int) -> None:
        for token in self._stops[slot]:
            self._use(token % BUCKETS, -1)
        self._stops[slot] = frozenset()

    def _use(self, bucket: int, by: int) -> None:
        self._users[bucket] += by
        bit = 1 << bucket % 8
        if self._users[bucket]:
            self._marks[bucket // 8] |= bit
        else:
            self._marks[bucket // 8] &= ~bit & 0xFF


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
        self._unanswered: set[int] = set()  # slots of samples without a token
        self.answered: list[Sample] = []  # that have their first token; the caller clears the list

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
        if not sample.generated.size:
            self._unanswered.add(slot)
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
        self._unanswered.discard(slot)

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

    def of_present(self, step: InFlightStep, prompts: Sequence[PromptLogprobs]) -> list[PromptLogprobs]:
        """Returns the log-probabilities of those samples that still have their slots."""
        first_step, slots = self._hasher.first_step, len(self._samples)
        return [entry for entry in prompts if entry.number < slots and first_step(entry.number) <= step.number]

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
        if self._unanswered and (answered := self._unanswered.intersection(slots.tolist())):
            self._unanswered -= answered
            self.answered += map(self.sample, answered)
        return open_rows, self._stop_conditions.check(slots, ids)
