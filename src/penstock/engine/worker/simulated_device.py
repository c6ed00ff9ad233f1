"""A simulated device: a step takes its time on a clock without using a processor, and its tokens follow a rule.

It queues as an accelerator does: a step that is launched while another runs begins when that one ends.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import DecodeError, Missing
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.columns import NOTHING
from penstock.engine.protocol.config import SimulatedDevice
from penstock.engine.protocol.messages import AdapterChange, AdapterState, FinishReason, Ints, Step
from penstock.engine.worker.device import EncodingCounts, PendingStep, SamplerOutput
from penstock.engine.worker.grammars import Bits, Grammars, TokenMasks
from penstock.tensor import Handle, Lease

Words = npt.NDArray[np.uint64]
_GOLDEN, _MIX_1, _MIX_2 = (np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
PAGE_NBYTES = 4096
_SHIFTS = tuple(np.uint64(number) for number in (30, 27, 31))


class TokenRule:
    """The rule of tokens: each token is a function of prompt, sample and position alone.

    So neither the input_batch, nor preemption, nor overlap, nor other requests change it, and a test can predict it.
    """

    def __init__(self, config: SimulatedDevice) -> None:
        self._config = config

    def key(self, prompt: Ints, sample: int = 0) -> int:
        """Returns the key of a sample, for `tokens`."""
        content = np.ascontiguousarray(prompt, np.int32).tobytes() + sample.to_bytes(8, "little")
        digest = hashlib.blake2b(content, digest_size=8, key=self._config.seed.to_bytes(8, "little")).digest()
        return int.from_bytes(digest, "little")

    def tokens(self, keys: Words, places: Ints) -> Ints:
        """Returns the token of each key at its place, counted from the beginning of the prompt."""
        mixed = keys + places.astype(np.uint64) * _GOLDEN  # splitmix64
        mixed = (mixed ^ (mixed >> _SHIFTS[0])) * _MIX_1
        mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _MIX_2
        mixed ^= mixed >> _SHIFTS[2]
        ids: Ints = (mixed % np.uint64(self._config.vocabulary)).astype(np.int32)
        end_id = self._config.end_id
        if end_id is not None:
            ids[ids == end_id] = (end_id + 1) % self._config.vocabulary
            ids[(mixed >> np.uint64(32)) % np.uint64(self._config.end_one_in) == 0] = end_id
        return ids

    def answer(self, prompt: Ints, count: int, sample: int = 0) -> list[int]:
        """Returns the first `count` tokens after the prompt, or fewer: up to and including the end id."""
        keys = np.full(count, self.key(prompt, sample), np.uint64)
        ids: list[int] = self.tokens(keys, np.arange(prompt.size, prompt.size + count, dtype=np.int32)).tolist()
        end_id = self._config.end_id
        return ids[: ids.index(end_id) + 1] if end_id is not None and end_id in ids else ids


class SimulatedPendingStep:
    """A step that runs until `done_at`, on the clock."""

    def __init__(
        self,
        done_at: float,
        sampled: SamplerOutput,
        clock: Callable[[], float],
        masks: Future[TokenMasks] | None = None,
    ) -> None:
        """`masks`: of the rows with a grammar, the ids of which `sampled` has without it."""
        self.done_at = done_at
        self._sampled = sampled
        self._clock = clock
        self._masks = masks
        self._masked_ids: Ints | None = None

    def result(self) -> SamplerOutput:
        """Blocks until the step is done."""
        while (left := self.done_at - self._clock()) > 0:
            time.sleep(left)
        if self._masks is None:
            return self._sampled
        return SamplerOutput(self.ids(), None, {**self._sampled.failed, **self._masks.result().failed})

    def ids(self) -> Ints:
        """Returns the sampled ids, before the step is done."""
        if self._masks is None:
            return self._sampled.ids
        if self._masked_ids is None:
            rows, bits, _ = self._masks.result()
            ids = self._sampled.ids.copy()
            ids[rows] = choose(bits, ids[rows])
            self._masked_ids = ids
        return self._masked_ids


_SET_BITS = np.array([number.bit_count() for number in range(1 << 16)], np.uint8)
_BLOCK = 64  # words


def choose(bits: Bits, numbers: Ints) -> Ints:
    """Returns an allowed id for each row: the one with the row's number, modulo how many there are."""
    words = bits.view(np.uint16)
    set_bits = _SET_BITS[words]
    counts = np.add.reduceat(set_bits, range(0, words.shape[1], _BLOCK), axis=1, dtype=np.int32)
    left = numbers % counts.sum(axis=1, dtype=np.int32)
    rows = np.arange(left.size)
    block, left = _part_with(counts, left)
    columns = np.minimum(_BLOCK * block[:, None] + np.arange(_BLOCK), words.shape[1] - 1)
    word, left = _part_with(set_bits[rows[:, None], columns], left)
    word += _BLOCK * block
    is_set = np.unpackbits(words[rows, word][:, None].view(np.uint8), axis=1, bitorder="little")
    ids: Ints = (16 * word + _part_with(is_set, left)[0]).astype(np.int32)
    return ids


def _part_with(counts: npt.NDArray[Any], numbers: Ints) -> tuple[Ints, Ints]:
    """Returns the part of each row in which the row's number lies, and the number counted from the part's begin."""
    until = counts.cumsum(axis=1, dtype=np.int32)
    parts = (until <= numbers[:, None]).sum(axis=1, dtype=np.int32)
    rows = np.arange(parts.size)
    return parts, numbers - (until[rows, parts] - counts[rows, parts])


class SimulatedRunner:
    """The device. `busy` and `idle` are in seconds, and exact on its clock.

    Idle is the time from the end of a step to the launch of the next, where the one before left requests to be
    continued: no request waits between a step after which all have left and the next one with rows.
    """

    def __init__(
        self,
        config: SimulatedDevice,
        slots: int,
        clock: Callable[[], float] = time.monotonic,
        open_handle: Callable[[Handle], Lease] | None = None,
        model: str = "",
        end_ids: Collection[int] = (),
    ) -> None:
        """`open_handle` gives images, and raises Missing; None: only those that travel inline. `model`: the directory
        of the tokenizer, and `end_ids`: for grammars."""
        self.blocks = config.blocks
        self.vocabulary = 1 << 31  # its rule takes any number
        self.max_short_prompt = None
        self.dtype, self.kv_epoch = "float32", None
        self.full_step_tokens = None
        self.model = 0
        self.encodings = EncodingCounts()  # it encodes none
        self.tune_after = None
        self.adapters: tuple[AdapterState, ...] = ()
        self.busy = 0.0
        self.idle = 0.0
        self._config = config
        self._rule = TokenRule(config)
        self._keys: Words = np.zeros(slots, np.uint64)  # by slot
        self._clock = clock
        self._open_handle = open_handle or Handle.open
        self._free_at = 0.0  # when the last step that was launched ends
        self._is_awaited = False  # a request of the last step with rows still runs
        self._grammars = Grammars(Path(model), config.vocabulary, end_ids, self._open_handle)
        self.grammars = self._grammars.counts

    def change_adapter(self, change: AdapterChange) -> str:
        return "a simulated device has no weights that an adapter could change"

    def tune(self) -> None:
        """Does nothing: no time of this device is measured."""

    @property
    def idle_share(self) -> float:
        """Returns idle time as a share of the time in which there were requests to compute."""
        return self.idle / (self.idle + self.busy) if self.busy else 0.0

    def launch(self, batch: BatchState, step: Step) -> PendingStep:
        if step.joined is not None:
            samples = batch.samples
            for slot in step.joined.slots.tolist():
                self._keys[slot] = self._rule.key(batch.prompts[slot], int(samples[slot]))
        failed = self._open_images(batch, step) if self._config.opens_images else {}
        masks = self._grammars.launch(batch, step)
        now = self._clock()
        tokens = batch.rows.size if step.advances is None else int(batch.counts.sum())
        if not tokens:  # nothing is computed: requests left, perhaps
            self._is_awaited = self._is_awaited and batch.rows.size > 0
            output = SamplerOutput(NOTHING, None, failed)
            return output if now >= self._free_at else SimulatedPendingStep(self._free_at, output, self._clock)
        if self._is_awaited and now > self._free_at:
            self.idle += now - self._free_at
        self._is_awaited = True
        duration = self._config.step_seconds + self._config.token_seconds * tokens
        self._free_at = max(now, self._free_at) + duration
        self.busy += duration
        sampled = batch.sampled
        ids = self._rule.tokens(self._keys[sampled], batch.computed[sampled]) if sampled.size else NOTHING
        pending = SimulatedPendingStep(self._free_at, SamplerOutput(ids, None, failed), self._clock, masks)
        self._grammars.sampled(pending.ids)
        return pending.result() if self._clock() >= self._free_at else pending

    def _open_images(self, batch: BatchState, step: Step) -> dict[int, FinishReason]:
        """Opens joining requests' images that the cache does not have whole. Returns the slots that fail, and why."""
        joined = step.joined
        if joined is None or joined.inputs is None:
            return {}
        failed = {}
        slots: list[int] = joined.slots.tolist()
        parents = slots if joined.parents is None else joined.parents.tolist()
        for slot, parent in zip(slots, parents, strict=True):
            if parent != slot:
                continue  # the same images: opened for the parent
            cached = int(batch.computed[slot] - batch.counts[slot])
            try:
                for item, position, length in batch.inputs[slot]:
                    if position + length > cached:
                        with self._open_handle(item) as held:
                            _touch(held.value())
            except Missing:
                failed[slot] = FinishReason.MISSING
            except (DecodeError, ValueError):
                failed[slot] = FinishReason.MISFIT
        return failed


def _touch(value: Any) -> None:
    """Reads a byte of each page, as a copy to an accelerator reads all of them."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for number in value:
            _touch(number)
    elif isinstance(value, np.ndarray) and value.nbytes:
        value.reshape(-1).view(np.uint8)[::PAGE_NBYTES].max()
