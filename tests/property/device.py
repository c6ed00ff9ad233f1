"""A device in plain Python that knows what lies where in its cache, and a core around it that knows the answers.

What lies at a position is the hash of all that is before it, as a real cache's content depends on it. A row that
reads a block of another prefix, an empty block, or a value that is no number fails the test.
"""

import hashlib
import random
from collections import deque
from typing import Any, NamedTuple

import msgspec
import numpy as np

from penstock import Buffer, Handle
from penstock.engine._native import BlockCache, ledger_nbytes
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.core.scheduler_config import SchedulerConfig
from penstock.engine.core.step_builder import StepBuilder
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.columns import RUNNING, Input
from penstock.engine.protocol.messages import Inputs, Progress, SamplingParams, Step, StepDone, Submit, Tokens

BLOCK_SIZE = 4
EOS, VOCABULARY = 1, 40
MAX_MODEL_LEN = 60
POISON = "no number"


def hashed(*parts: object) -> int:
    """The same in every process, so that a seed repeats its trace: `hash` of None and of bytes is not."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def follows(before: object, token: int, item: object) -> int:
    return hashed(before, token, item)


def items_at(inputs: list[Input]) -> dict[int, object]:
    return {position + n: (key_number(item), n) for item, position, length in inputs for n in range(length)}


def sampled(content: object, index: int, seed: int) -> int:
    return hashed(content, index, seed) % VOCABULARY


def answer(submit: Submit, index: int) -> list[int]:
    """What this sample must be, computed without a scheduler."""
    params = submit.params
    items = items_at(inputs_of(submit))
    content: object = 0
    for at, token in enumerate(submit.prompt.tolist()):
        content = follows(content, token, items.get(at))
    out: list[int] = []
    while True:
        out.append(sampled(content, index, submit.seed))
        if out[-1] == EOS or len(out) == params.max_tokens or submit.prompt.size + len(out) == MAX_MODEL_LEN:
            return out
        content = follows(content, out[-1], None)


def key_number(item: Handle) -> int:
    """What the image shows."""
    assert isinstance(item.where, bytes)
    return item.where[0]


def image(shown: int, position: int, length: int, *, has_key: bool = True) -> Inputs:
    item = Handle(bytes([shown]) * 32 if has_key else None, bytes([shown]), Buffer(b""))
    return Inputs(np.array([1], np.int32), (item,), np.array([position], np.int32), np.array([length], np.int32))


def inputs_of(submit: Submit) -> list[Input]:
    if submit.inputs is None:
        return []
    inputs = submit.inputs
    return list(zip(inputs.items, inputs.positions.tolist(), inputs.lengths.tolist(), strict=True))


class Device:
    """Executes steps as they are launched."""

    def __init__(self, schedule: BatchState) -> None:
        self.schedule = schedule
        self.cache: dict[tuple[int, int], object] = {}
        self.tokens: dict[int, list[int]] = {}  # by slot
        self.right: dict[int, list[object]] = {}  # by slot: what must lie at each position
        self.failed: set[int] = set()

    def read(self, slot: int, end: int) -> list[object]:
        table = self.schedule.blocks_of(slot).tolist()
        return [self.cache.get((table[at // BLOCK_SIZE], at % BLOCK_SIZE)) for at in range(end)]

    def launch(self, step: Step, failing: float, chance: random.Random) -> tuple[list[int], list[int]]:
        """Returns the ids of sampling rows, and the failed slots."""
        now = self.schedule
        for slot in [] if step.left is None else step.left.tolist():
            self.failed.discard(slot)
        for slot in [] if step.joined is None else step.joined.slots.tolist():
            self.tokens[slot], self.right[slot] = [*now.prompts[slot].tolist(), *now.generated[slot].tolist()], []
        rows = now.rows.tolist()
        begins = {slot: int(now.computed[slot] - now.counts[slot]) for slot in rows}
        contents = {}
        for slot in rows:
            tokens, right, items = self.tokens[slot], self.right[slot], items_at(list(now.inputs[slot]))
            assert len(tokens) == now.known[slot] - (slot in now.sampled), "known is not what is known"
            while len(right) < now.computed[slot]:
                at = len(right)
                right.append(follows(right[-1] if right else 0, tokens[at], items.get(at)))
            if slot not in self.failed:
                assert self.read(slot, begins[slot]) == right[: begins[slot]], f"slot {slot} reads what is not its own"
        fails = [slot for slot in rows if now.counts[slot] and chance.random() < failing]
        for slot in rows:
            blocks = now.blocks_of(slot).tolist()
            for at in range(begins[slot], int(now.computed[slot])):
                wrong = slot in fails or slot in self.failed
                self.cache[blocks[at // BLOCK_SIZE], at % BLOCK_SIZE] = POISON if wrong else self.right[slot][at]
        self.failed.update(fails)
        for slot in rows:
            if slot not in self.failed:
                end = int(now.computed[slot])
                assert self.read(slot, end) == self.right[slot][:end], f"somebody wrote into a block of slot {slot}"
        for slot in now.sampled.tolist():
            contents[slot] = sampled(self.right[slot][-1], int(now.samples[slot]), int(now.seeds[slot]))
            self.tokens[slot].append(contents[slot])
        return [contents[slot] for slot in now.sampled.tolist()], fails


def found_in_cache(step: Step) -> int:
    """How many tokens of the samples that this step admits need not be computed."""
    columns = [rows.computed for rows in (step.joined, step.resumed) if rows is not None]
    return sum(int(computed.sum()) for computed in columns if computed is not None)


Owner = tuple[int, int, int]  # server, request, sample


class Flight(NamedTuple):
    number: int
    sampling: list[Owner]
    ids: list[int]
    failing: list[Owner]
    failed: list[int]


class Core:
    """Drives a scheduler, and looks after each step whether all is as it must be."""

    def __init__(
        self,
        chance: random.Random,
        blocks: int,
        slots: int = 6,
        failing: float = 0,
        before: "Core | None" = None,
        **config: Any,
    ) -> None:
        """`before`: the life that was killed; its blocks and the ledger of them are there still."""
        self.chance = chance
        self.ledger = np.zeros(ledger_nbytes(blocks, slots, BLOCK_SIZE), np.uint8) if before is None else before.ledger
        self.failing = failing
        self.schedule = BatchState(slots, blocks, BLOCK_SIZE, max_blocks_per_request=-(-MAX_MODEL_LEN // BLOCK_SIZE))
        self.budget = config.setdefault("max_num_batched_tokens", chance.choice((slots, 2 * slots, 40)))
        self.scheduler = Scheduler(
            self.schedule,
            SchedulerConfig(max_model_len=MAX_MODEL_LEN, eos_ids=(EOS,), **config),
            BlockCache(blocks, self.ledger, slots, BLOCK_SIZE),
        )
        self.plan = StepBuilder(self.schedule)
        self.device = Device(self.schedule)
        if before is not None:
            self.device.cache = before.device.cache
        self.flights: deque[Flight] = deque()
        self.number = 0
        self.owners: dict[int, Owner] = {}  # by slot
        self.submits: dict[tuple[int, int], Submit] = {}
        self.got: dict[Owner, list[int]] = {}
        self.ended: dict[Owner, str] = {}
        self.messages: list[Tokens] = []  # to the output processor
        self.shared = self.preempted = self.steps = 0
        self.cached_tokens = 0  # of all samples, each time that they got blocks

    # ── what comes from outside ──
    def submit(self, submit: Submit) -> None:
        self.scheduler.submit(submit)
        self.submits[submit.server, submit.request] = submit
        generated = [np.zeros(0)] * submit.params.n if submit.progress is None else submit.progress.generated()
        for index, ids in enumerate(generated):
            owner = submit.server, submit.request, index
            self.got[owner] = answer(submit, index) if ids is None else ids.tolist()
            if ids is None:
                self.end(owner, "done")

    def abort(self, server: int, request: int) -> None:
        self.scheduler.abort(server, request)
        for owner in self.open_samples():
            if owner[:2] == (server, request):
                self.end(owner, "aborted")

    def stop(self, owner: Owner) -> None:
        """Its text has ended this sample."""
        self.scheduler.abort(*owner)
        if owner in self.got and owner not in self.ended:
            self.end(owner, "stopped")

    def forget_server(self, server: int) -> None:
        self.scheduler.abort_all(lambda request: request.server == server)
        for owner in self.open_samples():
            if owner[0] == server:
                self.end(owner, "aborted")

    def open_samples(self) -> list[Owner]:
        return [owner for owner in self.got if owner not in self.ended]

    def end(self, owner: Owner, why: str) -> None:
        assert owner not in self.ended, f"{owner} ends twice"
        self.ended[owner] = why

    # ── one step ──
    def begin(self) -> bool:
        if not self.scheduler.schedule(self.plan):
            return False
        self.steps += 1
        self.number += 1
        step = self.plan.build(1, self.number)
        for slot in [] if step.left is None else step.left.tolist():
            assert self.owners[slot] in self.ended, "who has not ended leaves"
            del self.owners[slot]
        self.schedule.apply(step)
        self.messages += [tokens for _, tokens in self.scheduler.on_sent(step)]
        if step.joined is not None:
            for slot in step.joined.slots.tolist():
                server, request, index = (
                    int(column[slot])
                    for column in (self.schedule.servers, self.schedule.requests, self.schedule.samples)
                )
                owner = server, request, index
                assert owner in self.got and owner not in self.owners.values() and owner not in self.ended
                self.owners[slot] = owner
        self.preempted += 0 if step.preempted is None else step.preempted.size
        assert self.scheduler.preemptions == self.preempted
        self.cached_tokens += found_in_cache(step)
        ids, failed = self.device.launch(step, self.failing, self.chance)
        sampling = [self.owners[slot] for slot in self.schedule.sampled.tolist()]
        self.flights.append(Flight(self.number, sampling, ids, [self.owners[slot] for slot in failed], failed))
        self.check(step)
        return True

    def finish(self) -> None:
        flight = self.flights.popleft()
        failed = np.array(flight.failed, np.uint16) if flight.failed else None
        done = StepDone(1, flight.number, np.array(flight.ids, np.int32), failed=failed)
        self.messages += [tokens for _, tokens in self.scheduler.on_result(done)]
        for owner in flight.failing:
            if owner not in self.ended:
                self.end(owner, "failed")
        for owner, token in zip(flight.sampling, flight.ids, strict=True):
            if owner in self.ended:
                continue
            submit, actual = self.submits[owner[:2]], self.got[owner]
            actual.append(token)
            most = min(MAX_MODEL_LEN - submit.prompt.size, submit.params.max_tokens or MAX_MODEL_LEN)
            if token == EOS or len(actual) >= most:
                self.end(owner, "done")
        self.check_open()

    # ── what must be so ──
    def check(self, step: Step) -> None:
        now, cache = self.schedule, self.scheduler.cache
        cache.check()
        assert now.counts.sum() <= self.budget, "over the budget"
        is_told = step.left is not None or step.preempted is not None
        assert now.counts.any() or is_told, "nobody comes on"
        for slot in np.flatnonzero(now.counts).tolist():
            server, request, _ = owner = self.owners[slot]
            params, prompt = self.submits[server, request].params, self.submits[server, request].prompt
            most = min(MAX_MODEL_LEN, prompt.size + (params.max_tokens or MAX_MODEL_LEN))
            assert now.known[slot] <= most or owner in self.ended, "a token beyond the length is sampled"
        users: dict[int, list[tuple[int, int]]] = {}
        for slot in np.flatnonzero(now.status == RUNNING).tolist():
            for at, block in enumerate(now.blocks_of(slot).tolist()):
                users.setdefault(block, []).append((slot, at))
        for block in range(now.blocks):
            assert cache.ref_count(block) == len(users.get(block, ())), f"ref_count of block {block}"
        for block, places in users.items():
            if len(places) == 1:
                continue
            self.shared += 1
            assert len({at for _, at in places}) == 1, f"block {block} lies at several places"
            for slot, at in places:
                assert now.computed[slot] - now.counts[slot] >= (at + 1) * BLOCK_SIZE, "shared before it was computed"
            salts = {self.submits[self.owners[slot][:2]].salt for slot, _ in places}
            assert len(salts) == 1, "shared with another salt"

    def check_open(self) -> None:
        still = {owner[:2] for owner in self.open_samples()}
        assert self.scheduler.open_requests == len(still), "open requests"
        assert self.scheduler.open_samples == len(self.open_samples()), "open samples"

    def drain(self) -> None:
        """Until nothing is open. Then nothing may be left."""
        for _ in range(10_000):
            if not self.begin() and not self.flights:
                break
            if len(self.flights) == 2 or (self.flights and self.chance.random() < 0.5):
                self.finish()
        assert not self.open_samples(), "somebody never ends"
        assert self.scheduler.in_flight == self.scheduler.open_requests == self.scheduler.open_samples == 0
        assert not self.schedule.status.any() and self.scheduler.cache.num_free == self.schedule.blocks

    def require_answers(self, seed: int) -> None:
        """Fails for a wrong id. The answer of a request that was done is whole."""
        for owner, value in self.got.items():
            expected = answer(self.submits[owner[:2]], owner[2])
            assert value == expected if self.ended[owner] == "done" else value == expected[: len(value)], (seed, owner)

    def answers(self) -> dict[Owner, list[int]]:
        return {owner: self.got[owner] for owner, why in self.ended.items() if why == "done"}


class Users:
    """Random requests. Their prompts begin alike; images have the same ids, whatever they show."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.begins = [[chance.randrange(2, VOCABULARY) for _ in range(MAX_MODEL_LEN)] for _ in range(2)]
        self.number = 0

    def submit(self) -> Submit:
        chance = self.chance
        self.number += 1
        prompt = list(chance.choice(self.begins)[: chance.randint(1, 40)])
        prompt += [chance.randrange(2, VOCABULARY) for _ in range(chance.choice((0, 0, 1, 9)))]
        inputs = None
        if len(prompt) > 14 and chance.random() < 0.4:
            position, length = chance.randint(0, 4), chance.randint(1, 9)
            prompt[position : position + length] = [0] * length
            inputs = image(chance.randrange(2), position, length, has_key=chance.random() < 0.8)
        most = chance.choice((None, 1, 3, 20, 20, 30))
        n = chance.choice((1, 1, 1, 2, 3, 8))
        submit = Submit(
            chance.randrange(2),
            self.number,
            np.array(prompt, np.int32),
            SamplingParams(n=n, max_tokens=most),
            chance.choice((0, 0, 0, -1, 3)),
            chance.choice(("a", "b", "")),
            chance.choice((b"", b"", b"secret")),
            inputs,
            seed=chance.randrange(3),
        )
        return self.resumed(submit) if chance.random() < 0.3 else submit

    def resumed(self, submit: Submit) -> Submit:
        """The request on its way: some samples are over, some have not begun."""
        chance = self.chance
        answers = [answer(submit, index) for index in range(submit.params.n)]
        counts = [chance.choice((-1, 0, chance.randrange(len(ids)), chance.randrange(len(ids)))) for ids in answers]
        at = chance.randrange(len(counts))
        counts[at] = chance.randrange(len(answers[at]))
        generated = [token for ids, count in zip(answers, counts, strict=True) for token in ids[: max(0, count)]]
        progress = Progress(np.array(counts, np.int32), np.array(generated, np.int32))
        return msgspec.structs.replace(submit, progress=progress, arrived_ns=chance.randrange(1 << 40))
