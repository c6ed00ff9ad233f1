"""The schedule in plain Python: dicts and lists, one request after the other. What the arrays must be equal to."""

import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from penstock import Buffer, Handle
from penstock.codec import Catalogue, FrameDecoder, FrameEncoder
from penstock.engine.core.step_builder import StepBuilder
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.columns import FREE, PREEMPTED, RUNNING, Input
from penstock.engine.protocol.messages import STEPS, SamplingParams, Step
from penstock.lowlevel import Ref
from penstock.tensor import plan

CATALOGUE = Catalogue.of(STEPS)
SLOTS, BLOCKS, BLOCK_SIZE, MAX_BLOCKS = 12, 500, 4, 40
LAYOUT = plan({"pixels": np.arange(9.0)}).layout
ITEMS = (
    Handle(b"k" * 32, Ref(1 << 63, 5, 7, 0, 1 << 20)),
    Handle(None, Ref(1, 6, 8, 0, 4096)),
    Handle(b"s" * 32, LAYOUT, Buffer(np.arange(9.0))),
    Handle(None, LAYOUT, Buffer(np.arange(9.0) + 1)),
)


def small_schedule() -> BatchState:
    return BatchState(SLOTS, BLOCKS, BLOCK_SIZE, MAX_BLOCKS)


class Refused(Exception):
    """What must be a DecodeError."""


def require(condition: object) -> None:
    if not condition:
        raise Refused


class Row:
    def __init__(
        self,
        request: int,
        prompt: list[int],
        params: SamplingParams,
        server: int,
        inputs: list[Input],
        sample: int = 0,
        seed: int = 0,
        generated: Sequence[int] = (),
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.params = params
        self.server = server
        self.inputs = inputs
        self.sample = sample
        self.seed = seed
        self.generated = list(generated)
        self.computed = 0
        self.known = len(prompt) + len(generated)
        self.samples = False
        self.blocks: list[int] = []
        self.runs = True
        self.count = 0

    def contents(self) -> dict[str, Any]:
        return dict(vars(self), blocks=list(self.blocks))


class Plain:
    """Told one thing after the other, in the order in which a step's columns happen."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}

    def contents(self) -> dict[int, dict[str, Any]]:
        return {slot: self.rows[slot].contents() for slot in sorted(self.rows)}

    def copy(self) -> "Plain":
        copied = Plain()
        for slot, row in self.rows.items():
            copied.rows[slot] = Row(row.request, row.prompt, row.params, row.server, row.inputs, row.sample)
            vars(copied.rows[slot]).update(row.contents())
        return copied

    def running(self) -> list[int]:
        return [slot for slot in sorted(self.rows) if self.rows[slot].runs]

    def at(self, slot: int, *, runs: bool) -> Row:
        require(slot in self.rows and self.rows[slot].runs == runs)
        return self.rows[slot]

    def leave(self, slot: int) -> None:
        require(slot in self.rows)
        del self.rows[slot]

    def preempt(self, slot: int) -> None:
        row = self.at(slot, runs=True)
        row.runs, row.computed, row.blocks, row.count = False, 0, [], 0
        row.samples = False

    def join(self, slot: int, row: Row, blocks: list[int], computed: int) -> None:
        require(0 <= slot < SLOTS and slot not in self.rows)
        require(row.request >= 0 and all(token >= 0 for token in [*row.prompt, *row.generated]))
        self.rows[slot] = row
        self.run(row, blocks, computed)

    def resume(self, slot: int, blocks: list[int], computed: int) -> None:
        self.run(self.at(slot, runs=False), blocks, computed)

    def run(self, row: Row, blocks: list[int], computed: int) -> None:
        require(0 <= computed < row.known)
        row.runs, row.computed, row.blocks = True, computed, []
        self.give(row, blocks)

    def append(self, slot: int, blocks: list[int]) -> None:
        self.give(self.at(slot, runs=True), blocks)

    def give(self, row: Row, blocks: list[int]) -> None:
        require(all(0 <= block < BLOCKS for block in blocks) and len(row.blocks) + len(blocks) <= MAX_BLOCKS)
        row.blocks += blocks

    def advance(self, counts: dict[int, int]) -> None:
        for slot, count in counts.items():
            self.at(slot, runs=True)
            require(count >= 0)
        for slot in self.running():
            row = self.rows[slot]
            row.count = counts.get(slot, 1)
            row.computed += row.count
            require(row.computed <= len(row.blocks) * BLOCK_SIZE)
            require(row.computed <= row.known)
            row.samples = row.computed == row.known
            if row.samples:
                row.known = row.computed + 1

    # ── a step, read column by column ──
    def apply(self, step: Step) -> "Plain":
        """The next state. Raises Refused where a step must be refused."""
        then = self.copy()
        for slot in numbers(step.left):
            then.leave(slot)
        for slot in numbers(step.preempted):
            then.preempt(slot)
        require(len(set(numbers(step.preempted))) == len(numbers(step.preempted)))
        if step.joined is not None:
            then.apply_joined(step)
        if step.resumed is not None:
            resumed = step.resumed
            blocks = split(resumed.blocks, resumed.block_counts)
            computed = [0] * len(blocks) if resumed.computed is None else numbers(resumed.computed)
            for slot, more, done in rows(resumed.slots, blocks, computed):
                then.resume(slot, more, done)
        if step.appended is not None:
            appended = step.appended
            counts = appended.counts
            if counts is None:
                counts = np.ones(len(numbers(appended.slots)), np.int32)
            for slot, more in rows(appended.slots, split(appended.blocks, counts)):
                then.append(slot, more)
        advances = step.advances
        then.advance({} if advances is None else dict(rows(advances.slots, advances.counts)))
        return then

    def apply_joined(self, step: Step) -> None:
        joined = step.joined
        assert joined is not None
        slots = numbers(joined.slots)
        size = len(slots)
        prompts = split(joined.ids, joined.lengths)
        known = joined.params
        of = list(range(len(known))) if joined.params_of is None else numbers(joined.params_of)
        require(len(of) == size and all(index < len(known) for index in of))
        parents = slots if joined.parents is None else numbers(joined.parents)
        computed = [0] * size if joined.computed is None else numbers(joined.computed)
        servers = [0] * size if joined.servers is None else numbers(joined.servers)
        inputs: list[list[Input]] = [[] for _ in slots]
        if joined.inputs is not None:
            items = list(joined.inputs.items)
            flat = list(rows(items, joined.inputs.positions, joined.inputs.lengths, distinct=False))
            require(all(position >= 0 and length >= 0 for _, position, length in flat))
            inputs = split(flat, joined.inputs.counts)
        samples = [0] * size if joined.samples is None else numbers(joined.samples)
        seeds = [0] * size if joined.seeds is None else numbers(joined.seeds)
        require((joined.generated is None) == (joined.generated_counts is None))
        generated: list[list[int]] = [[] for _ in slots]
        if joined.generated is not None:
            generated = split(joined.generated, joined.generated_counts)
        columns = (prompts, of, numbers(joined.requests), split(joined.blocks, joined.block_counts))
        for (
            slot,
            prompt,
            params_index,
            request,
            blocks,
            done,
            server,
            media,
            parent,
            sample,
            seed,
            ids_generated,
        ) in rows(slots, *columns, computed, servers, inputs, parents, samples, seeds, generated):
            if parent != slot:
                require(not prompt and not media and parent in self.rows)
                prompt, media = self.rows[parent].prompt, self.rows[parent].inputs
            self.join(
                slot,
                Row(request, prompt, known[params_index], server, media, sample, seed, ids_generated),
                blocks,
                done,
            )


def numbers(column: Any) -> list[Any]:
    if column is None:
        return []
    if isinstance(column, list):
        return column
    require(column.ndim == 1)
    values: list[Any] = column.tolist()
    return values


def rows(*columns: Any, distinct: bool = True) -> Iterable[tuple[Any, ...]]:
    lists = [numbers(column) for column in columns]
    require(len({len(column) for column in lists}) == 1)
    require(not distinct or len(set(lists[0])) == len(lists[0]))
    return list(zip(*lists, strict=True))


def split(column: Any, counts: Any) -> list[Any]:
    column, counts = numbers(column), numbers(counts)
    require(all(count >= 0 for count in counts) and sum(counts) == len(column))
    ends = np.cumsum(counts).tolist()
    return [column[end - count : end] for end, count in zip(ends, counts, strict=True)]


def shown(schedule: BatchState) -> dict[int, dict[str, Any]]:
    """The arrays, as `Plain` tells it. They must also agree among themselves."""
    assert schedule.rows.tolist() == np.flatnonzero(schedule.status == RUNNING).tolist()
    assert not schedule.counts[schedule.status != RUNNING].any()
    assert not schedule.computed[schedule.status != RUNNING].any()
    assert not schedule.block_counts[schedule.status != RUNNING].any()
    assert not schedule.known[schedule.status == FREE].any()
    sampled = schedule.sampled.tolist()
    assert sampled == sorted(sampled) and set(sampled) <= set(schedule.rows.tolist())
    out = {}
    for slot in np.flatnonzero(schedule.status).tolist():
        params = schedule.params[slot]
        assert params is not None
        out[slot] = {
            "request": int(schedule.requests[slot]),
            "prompt": schedule.prompts[slot].tolist(),
            "params": params,
            "server": int(schedule.servers[slot]),
            "inputs": list(schedule.inputs[slot]),
            "sample": int(schedule.samples[slot]),
            "seed": int(schedule.seeds[slot]),
            "generated": schedule.generated[slot].tolist(),
            "computed": int(schedule.computed[slot]),
            "known": int(schedule.known[slot]),
            "samples": slot in sampled,
            "blocks": schedule.blocks_of(slot).tolist(),
            "runs": schedule.status[slot] != PREEMPTED,
            "count": int(schedule.counts[slot]),
        }
    return out


class Wire:
    """Frames of one sender, and what they say."""

    def __init__(self) -> None:
        self.encoder = FrameEncoder(CATALOGUE)

    def frame(self, message: Any) -> bytes:
        return flat(self.encoder.encode(message))


def flat(frame: Any) -> bytes:
    return b"".join(memoryview(piece).cast("B") for piece in frame) if isinstance(frame, list) else bytes(frame)


class Life:
    """A random scheduler: what it decides it tells a plan and the plain state, in the same order."""

    def __init__(self, random: random.Random) -> None:
        self.random = random
        self.plain = Plain()
        self.schedule = small_schedule()
        self.plan = StepBuilder(self.schedule)
        self.requests = 0

    def blocks(self, count: int) -> list[int]:
        return [self.random.randrange(BLOCKS) for _ in range(count)]

    def decide(self) -> None:
        """Takes a step. In half of the cases no row joins or leaves, and every row computes one token."""
        chance, plain = self.random.random, self.plain
        counts: dict[int, int] = {}
        for slot in plain.running():
            if plain.rows[slot].computed >= (MAX_BLOCKS - 8) * BLOCK_SIZE:
                self.plan.leave(slot)
                plain.leave(slot)
        if chance() < 0.5 and plain.rows:
            self.go(counts)
            return
        for slot in sorted(plain.rows):  # ended, aborted
            if chance() < 0.06:
                self.plan.leave(slot)
                plain.leave(slot)
        for slot in plain.running():
            if chance() < 0.05:
                self.plan.preempt(slot)
                plain.preempt(slot)
        while len(plain.rows) < SLOTS and chance() < 0.4:
            self.join(counts)
        for slot in sorted(plain.rows):
            if not plain.rows[slot].runs and chance() < 0.3:
                blocks = self.blocks(self.random.randint(0, 3))
                computed = self.random.randint(0, min(plain.rows[slot].known - 1, len(blocks) * BLOCK_SIZE))
                self.plan.resume(slot, blocks, computed=computed)
                plain.resume(slot, blocks, computed)
        for slot in plain.running():
            if chance() < 0.3:
                row = plain.rows[slot]
                left = row.known - row.computed
                counts[slot] = min(left, self.random.choice((0, 0, 1, 2, 3, 5, 17)))
                self.plan.advance(slot, counts[slot])
        self.go(counts)

    def join(self, counts: dict[int, int]) -> None:
        self.requests += 1
        seed = self.random.choice((None, None, 1, self.requests))
        params = SamplingParams(temperature=0.8, top_p=0.95, seed=seed)
        prompt = np.array([self.random.randrange(50_000) for _ in range(self.random.randint(1, 60))], np.int32)
        parent = self.random.choice(sorted(self.plain.rows)) if self.plain.rows and self.random.random() < 0.2 else None
        prompt_ids = self.plain.rows[parent].prompt if parent is not None else prompt.tolist()
        blocks = self.blocks(self.random.randint(0, 16))
        generated = [self.random.randrange(50_000) for _ in range(self.random.choice((0, 0, 0, 1, 9)))]
        most = min(len(prompt_ids) + len(generated) - 1, len(blocks) * BLOCK_SIZE)
        computed = self.random.randint(0, most) if self.random.random() < 0.4 else 0
        inputs = [(self.random.choice(ITEMS), n, 7) for n in range(self.random.choice((0, 0, 0, 2)))]
        server, sample = self.random.choice((0, 0, 3)), self.random.choice((0, 0, 5))
        own_seed = self.random.choice((0, self.random.getrandbits(64)))
        chunk = min(len(prompt_ids) + len(generated) - computed, self.random.choice((1, 8, 20, 60)))
        slot = self.plan.join(
            self.requests,
            prompt,
            params,
            blocks,
            computed=computed,
            chunk=chunk,
            parent=parent,
            server=server,
            inputs=tuple(inputs),
            sample=sample,
            seed=own_seed,
            generated=np.array(generated, np.int32),
        )
        counts[slot] = chunk
        if parent is not None:
            inputs = self.plain.rows[parent].inputs
        self.plain.join(
            slot,
            Row(self.requests, prompt_ids, params, server, inputs, sample, own_seed, generated),
            list(blocks),
            computed,
        )

    def go(self, counts: dict[int, int]) -> None:
        each: list[int] = []
        for slot in self.plain.running():
            row = self.plain.rows[slot]
            short = -(-(row.computed + counts.get(slot, 1)) // BLOCK_SIZE) - len(row.blocks)
            if short == 1 and self.random.random() < 0.7:
                each.append(slot)
            elif short > 0:
                blocks = self.blocks(short)
                self.plan.append(slot, blocks)
                self.plain.append(slot, blocks)
        blocks = self.blocks(len(each))
        self.plan.append_one_each(np.array(each, np.int32), np.array(blocks, np.int32))
        for slot, block in zip(each, blocks, strict=True):
            self.plain.append(slot, [block])
        self.plain.advance(counts)


def decode(frame: bytes, decoder: FrameDecoder | None = None) -> Any:
    return (FrameDecoder(CATALOGUE) if decoder is None else decoder).decode(frame)
