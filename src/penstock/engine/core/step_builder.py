"""Builds the messages of a step, request by request: the `Step` for workers, and `Tokens` for output processors.

The scheduler decides, and `engine_core` sends. `batch_state` checks that the step fits: the core applies the step as
every receiver does.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.engine.core.request import Sample
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.columns import (
    FREE,
    NOTHING,
    Column,
    Index,
    Input,
    LogprobRows,
    columns_of_adapters,
    columns_of_grammars,
    columns_of_inputs,
    columns_of_params,
)
from penstock.engine.protocol.messages import (
    CONTEXT,
    Advances,
    Appended,
    Ended,
    Ints,
    Joined,
    Logprobs,
    PromptLogprobs,
    Resumed,
    SamplingParams,
    Slots,
    Started,
    Step,
    Tokens,
)
from penstock.tensor import Handle

Blocks = Sequence[int] | Ints


class StepBuilder:
    """Collects the decisions for one step. `build` returns the step and begins the next one."""

    def __init__(self, batch: BatchState) -> None:
        self._free: list[int] = np.flatnonzero(batch.status == FREE).tolist()  # a heap: low slots keep arrays dense
        self._begin()

    def _begin(self) -> None:
        self._left: list[int] = []
        self._preempted: list[int] = []
        self._joined: dict[int, _NewRow] = {}
        self._resumed: dict[int, tuple[Blocks, int]] = {}
        self._appended: dict[int, list[int]] = {}
        self._each: list[tuple[Column, Ints]] = []
        self._advances: dict[int, int] = {}

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def join(
        self,
        request: int,
        prompt: Ints,
        params: SamplingParams,
        blocks: Blocks,
        *,
        computed: int = 0,
        chunk: int = 1,
        parent: int | None = None,
        server: int = 0,
        inputs: tuple[Input, ...] = (),
        sample: int = 0,
        seed: int = 0,
        generated: Ints = NOTHING,
        grammar: Handle | None = None,
        adapter: bytes = b"",
    ) -> int:
        """Gives a request a slot. `computed` tokens are in the blocks already; this step computes `chunk` more.

        With a `parent` (a slot), the row is a further `sample` of the parent's prompt: prompt and inputs are not sent
        again. `generated` are the ids of a resumed sample. Raises ValueError when there is no slot.
        """
        if not self._free:
            raise ValueError("no slot is free")
        slot = heapq.heappop(self._free)
        self._joined[slot] = _NewRow(
            request, prompt, params, blocks, computed, parent, server, inputs, sample, seed, generated, grammar, adapter
        )
        if chunk != 1:
            self.advance(slot, chunk)
        return slot

    def leave(self, slot: int) -> None:
        """Frees the slot of a request that has ended. A join of this step may get it."""
        self._take_back(slot)
        if self._joined.pop(slot, None) is None:
            self._left.append(slot)
        heapq.heappush(self._free, slot)

    def preempt(self, slot: int) -> None:
        """Preempts a request: the request loses all blocks and keeps the slot."""
        self._take_back(slot)
        if self._resumed.pop(slot, None) is None:
            self._preempted.append(slot)

    def _take_back(self, slot: int) -> None:
        """Drops the blocks and the advance that were decided for the slot before."""
        self._appended.pop(slot, None)
        self._advances.pop(slot, None)

    def resume(self, slot: int, blocks: Blocks, *, computed: int = 0, chunk: int = 1) -> None:
        self._resumed[slot] = blocks, computed
        if chunk != 1:
            self.advance(slot, chunk)

    def append(self, slot: int, blocks: Blocks) -> None:
        """Appends blocks to one request."""
        self._appended.setdefault(slot, []).extend(blocks)

    def append_one_each(self, slots: Column, blocks: Ints) -> None:
        """Appends one block to each slot. No slot gets further blocks, leaves or is preempted in this step."""
        if slots.size:
            self._each.append((slots, blocks))

    def advance(self, slot: int, count: int) -> None:
        """Lets this step compute `count` tokens of the request; without this call, one."""
        self._advances[slot] = count

    def build(self, leader: int, number: int) -> Step:
        step = Step(
            leader,
            number,
            left=_slots(self._left) if self._left else None,
            preempted=_slots(self._preempted) if self._preempted else None,
            joined=self._columns_of_joined() if self._joined else None,
            resumed=self._columns_of_resumed() if self._resumed else None,
            appended=self._columns_of_appended() if self._appended or self._each else None,
            advances=Advances(_slots(self._advances), _ints(self._advances.values())) if self._advances else None,
        )
        self._begin()
        return step

    def _columns_of_joined(self) -> Joined:
        slots, rows = list(self._joined), list(self._joined.values())
        prompts = [NOTHING if row.parent is not None else np.asarray(row.prompt, np.int32) for row in rows]
        params, params_of = columns_of_params([row.params for row in rows])
        are_resumed = any(row.generated.size for row in rows)
        grammars, grammars_of = columns_of_grammars([row.grammar for row in rows])
        adapters, adapters_of = columns_of_adapters([row.adapter for row in rows])
        return Joined(
            slots=_slots(slots),
            requests=_ints([row.request for row in rows]),
            params=params,
            lengths=_ints([prompt.size for prompt in prompts]),
            ids=np.concatenate(prompts),
            block_counts=_ints([len(row.blocks) for row in rows]),
            blocks=_together([row.blocks for row in rows]),
            params_of=params_of if len(rows) > 1 else None,
            computed=_ints([row.computed for row in rows]) if any(row.computed for row in rows) else None,
            parents=_slots([slot if row.parent is None else row.parent for slot, row in self._joined.items()])
            if any(row.parent is not None for row in rows)
            else None,
            servers=_slots([row.server for row in rows]) if any(row.server for row in rows) else None,
            inputs=columns_of_inputs([() if row.parent is not None else row.inputs for row in rows]),
            samples=_slots([row.sample for row in rows]) if any(row.sample for row in rows) else None,
            seeds=np.array([row.seed for row in rows], np.uint64) if any(row.seed for row in rows) else None,
            generated_counts=_ints([row.generated.size for row in rows]) if are_resumed else None,
            generated=np.concatenate([row.generated for row in rows]) if are_resumed else None,
            grammars=grammars,
            grammars_of=grammars_of,
            adapters=adapters,
            adapters_of=adapters_of,
        )

    def _columns_of_resumed(self) -> Resumed:
        rows = self._resumed.values()
        return Resumed(
            _slots(self._resumed),
            _ints([len(blocks) for blocks, _ in rows]),
            _together([blocks for blocks, _ in rows]),
            _ints([computed for _, computed in rows]) if any(computed for _, computed in rows) else None,
        )

    def _columns_of_appended(self) -> Appended:
        slots = [column.astype(np.uint16) for column, _ in self._each]
        blocks = [column.astype(np.int32, copy=False) for _, column in self._each]
        if not self._appended:
            return Appended(np.concatenate(slots), np.concatenate(blocks))
        counts = [np.ones(column.size, np.int32) for column in slots]
        counts.append(_ints([len(more) for more in self._appended.values()]))
        slots.append(_slots(self._appended))
        blocks += [_ints(more) for more in self._appended.values()]
        together = np.concatenate(counts)
        return Appended(np.concatenate(slots), np.concatenate(blocks), None if (together == 1).all() else together)


class _NewRow:
    """One row of `Joined`."""

    __slots__ = (
        "adapter",
        "blocks",
        "computed",
        "generated",
        "grammar",
        "inputs",
        "params",
        "parent",
        "prompt",
        "request",
        "sample",
        "seed",
        "server",
    )

    def __init__(
        self,
        request: int,
        prompt: Ints,
        params: SamplingParams,
        blocks: Blocks,
        computed: int,
        parent: int | None,
        server: int,
        inputs: tuple[Input, ...],
        sample: int,
        seed: int,
        generated: Ints,
        grammar: Handle | None,
        adapter: bytes,
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.params = params
        self.blocks = blocks
        self.computed = computed
        self.parent = parent
        self.server = server
        self.inputs = inputs
        self.sample = sample
        self.seed = seed
        self.generated = generated
        self.grammar = grammar
        self.adapter = adapter


def _slots(slots: Any) -> Slots:
    return np.array(list(slots), np.uint16)


def _ints(numbers: Any) -> Ints:
    return np.array(list(numbers), np.int32)


def _together(blocks: list[Blocks]) -> Ints:
    return np.concatenate([np.asarray(row, np.int32) for row in blocks])


class TokensBuilder:
    """Collects the new samples, ids and ends that are due to each output processor, for one `Tokens` message to each.

    Output processor r modulo `outputs` has the samples of request r.
    """

    def __init__(self, slots: int, outputs: int) -> None:
        self._outputs = range(outputs)
        self._output_of = np.zeros(slots, np.uint8)  # by slot
        self._started: list[list[Started]] = [[] for _ in self._outputs]
        self._aborted: list[list[int]] = [[] for _ in self._outputs]
        self._slots: list[Index | None] = [None for _ in self._outputs]  # of the last message with ids

    def start(self, sample: Sample, slot: int) -> None:
        output = sample.request.number % len(self._outputs)
        self._output_of[slot] = output
        self._started[output].append(_started(slot, sample))

    def abort(self, slot: int) -> None:
        """Records that the slot's sample has ended without another token."""
        self._aborted[self._output_of[slot]].append(slot)

    def forget(self, output: int) -> None:
        """Drops what is due to an output processor: its next life knows no slot."""
        self._started[output].clear()
        self._aborted[output].clear()
        self._slots[output] = None

    def build_started(self) -> list[tuple[int, Tokens]]:
        """Returns pairs of an output processor and its message, of those with new samples."""
        return [(output, self._build(output, NOTHING)) for output in self._outputs if self._started[output]]

    def build(
        self,
        slots: Index,
        ids: Ints,
        rows: Index | None,
        logprobs: Logprobs | None,
        ended: Sequence[Ended],
        prompts: Sequence[PromptLogprobs] = (),
        vectors: Sequence[Handle] = (),
    ) -> list[tuple[int, Tokens]]:
        """Returns pairs of an output processor and its message, of those with something new. `rows`: which of the ids
        belong to samples that had not ended before; None: all. `prompts`: log-probabilities of prompts. `vectors`: of
        a pooling engine, which has no output processors."""
        if rows is not None:
            logprobs = _logprobs_of(rows, logprobs, slots.size)
            slots, ids = slots[rows], ids[rows]
            vectors = [vectors[row] for row in rows.tolist()] if vectors else ()
        if len(self._outputs) == 1:
            is_new = bool(ids.size or ended or self._aborted[0] or prompts)
            return [(0, self._build(0, ids, slots, logprobs, ended, prompts, vectors))] if is_new else []
        messages = []
        output_of = self._output_of[slots]
        for output in self._outputs:
            own_rows = np.flatnonzero(output_of == output)
            own_ends = [end for end in ended if self._output_of[end.slot] == output]
            own_prompts = [entry for entry in prompts if self._output_of[entry.number] == output]
            if own_rows.size or own_ends or self._aborted[output] or own_prompts:
                columns = ids[own_rows], slots[own_rows], _logprobs_of(own_rows, logprobs, slots.size)
                messages.append((output, self._build(output, *columns, own_ends, own_prompts)))
        return messages

    def _build(
        self,
        output: int,
        ids: Ints,
        slots: Index | None = None,
        logprobs: Logprobs | None = None,
        ended: Sequence[Ended] = (),
        prompts: Sequence[PromptLogprobs] = (),
        vectors: Sequence[Handle] = (),
    ) -> Tokens:
        new_slots = None
        if ids.size and slots is not (before := self._slots[output]):
            self._slots[output] = slots
            assert slots is not None
            if before is None or not np.array_equal(slots, before):
                new_slots = slots.astype(np.uint16)
        samples = tuple(self._aborted[output]), tuple(self._started[output]), tuple(ended)
        tokens = Tokens(ids, new_slots, logprobs, *samples, tuple(prompts), tuple(vectors))
        self._aborted[output].clear()
        self._started[output].clear()
        return tokens


def _logprobs_of(rows: Index, logprobs: Logprobs | None, size: int) -> Logprobs | None:
    return None if logprobs is None else LogprobRows.read(logprobs, size).of(rows).columns([])


def _started(slot: int, sample: Sample) -> Started:
    request = sample.request
    context = tuple(request.prompt[-CONTEXT:].tolist())
    return Started(
        slot,
        request.number,
        request.params,
        context,
        request.chunk_format,
        request.server,
        sample.index,
        request.cached,
        tuple(sample.generated.tolist()),
    )
