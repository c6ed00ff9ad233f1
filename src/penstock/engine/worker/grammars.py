"""The grammars of a batch, in the process that samples: what may come next in each row, as bits.

The state of a sample is a function of its grammar and of the ids that it has generated. So a resumed sample replays
its ids, a preempted sample keeps its state, and prefix hits and chunks of a prompt change nothing.

One thread compiles, advances and masks, in the order of the steps. While the device computes a step, the thread waits
for the ids of the step before, advances the samples by them, and fills the masks: a step costs more only where the
masks take longer than the forward pass.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock import DecodeError, Handle, Lease, Missing
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.columns import Index
from penstock.engine.protocol.messages import FinishReason, Ints, Step
from penstock.engine.text.grammar import compile_grammar, has_nothing_left, model_tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MAX_COMPILED = 256  # grammars …
MAX_COMPILED_CHARS = 1 << 17  # … and of their texts: a compiled grammar takes 30 to 130 bytes for each
Bits: TypeAlias = npt.NDArray[np.int32]


class TokenMasks(NamedTuple):
    """The ids that may come next, of the rows of a step that have a grammar."""

    rows: Index
    bits: Bits  # a row for each of `rows`: bit i % 32 of word i // 32 is set if id i may come
    failed: Mapping[int, FinishReason]  # by slot; the bits of such a row mean nothing


@dataclass
class GrammarCounts:
    """What the thread of grammars has done."""

    open: int = 0  # samples with a grammar
    compiled: int = 0
    compile_ns: int = 0
    masks: int = 0  # rows of steps
    mask_ns: int = 0


class GrammarState:
    """The state of one sample."""

    __slots__ = ("generated", "handle", "has_ended", "matcher", "reason", "slot")

    def __init__(self, slot: int, handle: Handle, generated: list[int]) -> None:
        self.slot = slot
        self.handle = handle
        self.generated = generated  # before the sample was resumed
        self.matcher: LLMatcher | None = None
        self.has_ended = False  # an end id has been sampled: the row that is in flight behind that id has no mask
        self.reason: FinishReason | None = None  # why the sample fails

    @property
    def is_open(self) -> bool:
        return self.matcher is not None or self.reason is not None


class Grammars:
    """The methods are called in the order `follow`, `begin`, `sampled`, for each step.

    While `states` is empty, steps in which no grammar joins need not call this object. Before the first grammar no
    thread begins, and no process imports llguidance.
    """

    def __init__(
        self, directory: Path, vocabulary: int, end_ids: Collection[int], open_handle: Callable[[Handle], Lease]
    ) -> None:
        """`directory`: of the model, with its tokenizer."""
        self.counts = GrammarCounts()
        self._directory = directory
        self._vocabulary = vocabulary
        self._end_ids = frozenset(end_ids)
        self._open_handle = open_handle
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()  # with the length of the text
        self._compiled_chars = 0
        self._executor: LLExecutor | None = None
        self.states: dict[int, GrammarState] = {}  # by slot
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._rows: list[tuple[int, GrammarState]] = []  # of the step that has begun
        self._ids: tuple[list[tuple[int, GrammarState]], Callable[[], Ints]] | None = None  # of the step before

    # ── a step ──
    def launch(self, batch: BatchState, step: Step) -> Future[TokenMasks] | None:
        """Begins the masks of a step that `batch` has just applied. Returns None if no sampling row has a grammar."""
        self.follow(batch, step)
        return self.begin(batch.sampled)

    def follow(self, batch: BatchState, step: Step) -> None:
        """Applies the leaves and joins of a step. Grammars that join are compiled meanwhile."""
        for slot in () if step.left is None else step.left.tolist():
            self.states.pop(slot, None)
        for slot in () if step.joined is None else step.joined.slots.tolist():
            handle = batch.grammars.get(slot)
            if handle is not None:
                state = self.states[slot] = GrammarState(slot, handle, batch.generated[slot].tolist())
                self._thread.submit(self._open, state)
        self.counts.open = len(self.states)

    def begin(self, slots: Index) -> Future[TokenMasks] | None:
        """Begins the masks of a step, before the device computes the step. `slots`: those that sample. Returns None if
        no row has a grammar."""
        states, (before, self._ids) = self.states, (self._ids, None)
        numbers = slots.tolist() if states else []
        self._rows = [(row, states[slot]) for row, slot in enumerate(numbers) if slot in states]
        masks = self._thread.submit(self._fill, self._rows, before) if self._rows or before is not None else None
        return masks if self._rows else None

    def sampled(self, ids: Callable[[], Ints]) -> None:
        """`ids` returns what the step has sampled, and may block until the device has."""
        if self._rows:
            self._ids = self._rows, ids

    # ── in the thread ──
    def _open(self, state: GrammarState) -> None:
        if state.is_open:
            return
        try:
            state.matcher = self._matcher(state.handle).deep_copy()
        except Missing:
            state.reason = FinishReason.MISSING
        except (ValueError, DecodeError, TypeError):  # the server compiled it, but for another vocabulary
            state.reason = FinishReason.GRAMMAR_LIMIT
        else:
            if state.generated and not state.matcher.consume_tokens(state.generated):
                state.reason = FinishReason.GRAMMAR_MISFIT
        state.generated = []

    def _matcher(self, handle: Handle) -> LLMatcher:
        if handle.key is not None and handle.key in self._compiled:
            self._compiled.move_to_end(handle.key)
            return self._compiled[handle.key][0]
        began = time.perf_counter_ns()
        with self._open_handle(handle) as lease:
            text = str(lease.value())
        if self._tokenizer is None:
            self._tokenizer = model_tokenizer(self._directory / "tokenizer.json", self._vocabulary, self._end_ids)
        matcher = compile_grammar(self._tokenizer, text)
        if handle.key is not None:
            self._keep(handle.key, matcher, len(text))
        self.counts.compiled += 1
        self.counts.compile_ns += time.perf_counter_ns() - began
        return matcher

    def _keep(self, key: bytes, matcher: LLMatcher, chars: int) -> None:
        self._compiled[key] = matcher, chars
        self._compiled_chars += chars
        while len(self._compiled) > MAX_COMPILED or self._compiled_chars > MAX_COMPILED_CHARS:
            self._compiled_chars -= self._compiled.popitem(last=False)[1][1]

    def _fill(
        self,
        rows: list[tuple[int, GrammarState]],
        before: tuple[list[tuple[int, GrammarState]], Callable[[], Ints]] | None,
    ) -> TokenMasks:
        # Here: a fork may have no grammar, and the device computes the first step meanwhile.
        from llguidance import LLExecutor
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

        if self._executor is None:
            self._executor = LLExecutor(1)
        if before is not None:
            self._advance(before[0], before[1](), self._executor)
        masked: list[tuple[int, GrammarState, LLMatcher]] = []
        failed: dict[int, FinishReason] = {}
        for row, state in rows:
            self._open(state)  # again, if it raised
            if state.reason is not None:
                failed[state.slot] = state.reason
            elif not state.has_ended and state.matcher is not None:
                masked.append((row, state, state.matcher))
        bits = allocate_token_bitmask(len(masked), self._vocabulary)
        if masked:
            began = time.perf_counter_ns()
            matchers = [(matcher, number) for number, (_, _, matcher) in enumerate(masked)]
            fill_next_token_bitmask_par(self._executor, matchers, bits)
            self.counts.masks += len(masked)
            self.counts.mask_ns += time.perf_counter_ns() - began
        for number, (_, state, matcher) in enumerate(masked):
            if matcher.is_error():
                is_stuck = has_nothing_left(matcher)
                state.reason = FinishReason.STUCK if is_stuck else FinishReason.GRAMMAR_LIMIT
                failed[state.slot] = state.reason
                bits[number] = -1
        return TokenMasks(np.array([row for row, _, _ in masked], np.intp), bits, failed)

    def _advance(self, rows: list[tuple[int, GrammarState]], ids: Ints, executor: LLExecutor) -> None:
        generated, advanced = ids.tolist(), []
        tokens: list[tuple[LLMatcher, int]] = []
        for row, state in rows:
            if state.has_ended or state.reason is not None or state.matcher is None:
                continue
            # The library calls a matcher stopped both before an end id, which alone may come, and after it.
            if generated[row] in self._end_ids:
                state.has_ended = True
            else:
                advanced.append(state)
                tokens.append((state.matcher, generated[row]))
        are_consumed = executor.consume_token_par(tokens) if tokens else []
        for state, is_consumed in zip(advanced, are_consumed, strict=True):
            if not is_consumed:
                state.reason = FinishReason.GRAMMAR_LIMIT
