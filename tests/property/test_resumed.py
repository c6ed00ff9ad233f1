"""Answers with up to three losses of their group equal the same answers without a loss, byte by byte.

Scheduler, sampler and output processors are real. The device's logits are a function of the ids before.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.engine.protocol.messages import (
    ChunkFormat,
    Delta,
    FinishReason,
    Progress,
    SamplingParams,
    Step,
    StepDone,
    Style,
    Submit,
)
from tests import tiers
from tests.property.speaking import EOS, PIECES, STOPS, Got, Speaking

torch = pytest.importorskip("torch")

from penstock.engine.worker.sampler import Sampler  # noqa: E402  (it needs torch)

REQUESTS, GROUPS, LOSSES = 12, 2, 5
MEMORY = {"scarce": 24, "plenty": 1000}  # blocks; the longest sample needs 16


def logits_after(ids: list[int]) -> Any:
    digest = hashlib.blake2b(np.array(ids, np.int32).tobytes(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).normal(0, 2, len(PIECES)).astype(np.float32)


class Group(Speaking):
    """A group with late Deltas: a loss drops the undelivered Deltas."""

    def __init__(self, **choices: Any) -> None:
        super().__init__(**choices)
        self.sampler = Sampler(self.schedule.slots, len(PIECES), (EOS,))
        self.ids: dict[int, list[int]] = {}  # by slot
        self.late: list[tuple[int, Delta]] = []

    def _sampled(self, step: Step) -> StepDone:
        now = self.schedule
        for slot in [] if step.left is None else step.left.tolist():
            self.sampler.leave(slot)
        for slot in [] if step.joined is None else step.joined.slots.tolist():
            params, prompt, generated = now.params[slot], now.prompts[slot], now.generated[slot]
            assert params is not None
            self.ids[slot] = [*prompt.tolist(), *generated.tolist()]
            assert now.known[slot] - (slot in now.sampled) == len(self.ids[slot])
            sample, seed = int(now.samples[slot]), int(now.seeds[slot])
            self.sampler.join(slot, params, prompt, seed=seed, sample=sample, generated=generated)
        sampled = now.sampled
        if not sampled.size:
            return StepDone(1, self.number, np.zeros(0, np.int32))
        logits = torch.from_numpy(np.stack([logits_after(self.ids[slot]) for slot in sampled.tolist()]))
        tokens = self.sampler.sample(logits, sampled)
        for slot, token in zip(sampled.tolist(), tokens.ids.tolist(), strict=True):
            self.ids[slot].append(token)
        return StepDone(1, self.number, tokens.ids.numpy(), tokens.logprobs())

    def _deliver(self, server: int, delta: Delta) -> None:
        self.late.append((server, delta))

    def deliver(self, count: int | None = None) -> None:
        for server, delta in self.late[:count]:
            self.servers.take(server, delta)
        del self.late[:count]

    def abort(self) -> None:
        for abort in self.aborts:
            assert abort.samples is not None
            for request, sample in zip(abort.requests.tolist(), abort.samples.tolist(), strict=True):
                self.scheduler.abort(abort.server, request, sample)
        self.aborts = []


@dataclass
class Asked:
    """A request, as its server knows it."""

    submit: Submit
    samples: list[Got] = field(default_factory=list)
    losses: int = 0

    @property
    def is_over(self) -> bool:
        return all(sample.end is not None for sample in self.samples)

    def numbered(self, number: int, chance: random.Random) -> Submit:
        """The request with what its samples have said."""
        counts = [len(sample.ids) if sample.end is None else -1 for sample in self.samples]
        ids = [token for sample in self.samples if sample.end is None for token in sample.ids]
        progress = Progress(np.array(counts, np.int32), np.array(ids, np.int32)) if self.losses else None
        if not any(counts) and chance.random() < 0.5:
            progress = None
        return msgspec.structs.replace(self.submit, request=number, progress=progress)


def random_requests(chance: random.Random) -> list[Asked]:
    requests = []
    for at in range(REQUESTS):
        stop = tuple(chance.sample(STOPS, chance.choice([0, 0, 1, 2])))
        most = chance.choice([None, 2, 10, 30, 30])
        params = SamplingParams(
            n=chance.choice([1, 1, 1, 3]),
            temperature=chance.choice([0.0, 0.7, 1.0]),
            top_k=chance.choice([0, 4]),
            presence_penalty=chance.choice([0.0, 1.0]),
            frequency_penalty=chance.choice([0.0, 0.5]),
            repetition_penalty=chance.choice([1.0, 1.3]),
            max_tokens=most,
            min_tokens=chance.choice([0, 0, min(most or 6, 6)]),
            stop=stop,
            stop_token_ids=tuple(chance.sample(range(10), chance.choice([0, 0, 0, 1]))),
            ignore_eos=chance.random() < 0.7,
            detokenize=bool(stop) or chance.random() < 0.9,
            skip_special_tokens=chance.random() < 0.5,
            include_stop_str_in_output=chance.random() < 0.3,
            logprobs=chance.choice([None, None, 0, 2]),
            logit_bias=((2, 2.0), (4, 2.0)) if chance.random() < 0.5 else (),  # halves of a character
        )
        style = chance.choice([None, Style.CHAT, Style.COMPLETION])
        submit = Submit(
            chance.choice([0, 1]),
            0,
            np.array([*[5] * chance.randint(0, 20), chance.randrange(10)], np.int32),
            params,
            chance.choice([0, 0, 1]),
            chance.choice(["", "a", "b"]),
            chunk_format=None if style is None else ChunkFormat(style, b'{"id":"x"', 2),
            seed=chance.getrandbits(64),
            arrived_ns=1 + at,
        )
        requests.append(Asked(submit, [Got() for _ in range(params.n)]))
    return requests


class Tree:
    """Servers with their requests, and groups that are lost."""

    def __init__(self, chance: random.Random, requests: list[Asked], losses: int, interval: int) -> None:
        self.chance = chance
        self.waiting = list(requests)
        self.open: list[dict[int, Asked]] = [{} for _ in range(GROUPS)]
        self.choices = {"blocks": MEMORY[chance.choice(list(MEMORY))], "outputs": chance.choice([1, 2])}
        self.choices["interval"] = interval
        self.depth = chance.choice([1, 2])
        self.groups = [self.start() for _ in range(GROUPS)]
        self.losses, self.number = losses, 0
        self.resumed = 0  # samples with ids

    def start(self) -> Group:
        return Group(depth=self.depth, **self.choices)

    def submit(self, request: Asked) -> None:
        at = self.chance.randrange(GROUPS)
        group, self.number = self.groups[at], self.number + 1
        submit = request.numbered(self.number, self.chance)
        self.resumed += sum(bool(outcome.ids) and outcome.end is None for outcome in request.samples)
        for sample, actual in enumerate(request.samples):
            if actual.end is None:
                group.servers.got[submit.server, self.number, sample] = actual
        self.open[at][self.number] = request
        group.scheduler.submit(submit)

    def lose(self, at: int) -> None:
        """Some messages have left the group, the others have not."""
        group = self.groups[at]
        group.deliver(self.chance.randint(0, len(group.late)))
        lost, self.open[at], self.groups[at] = self.open[at], {}, self.start()
        for request in lost.values():
            if not request.is_over:
                request.losses += 1
                self.submit(request)

    def is_on_its_way(self, at: int) -> bool:
        return any(
            outcome.ids and outcome.end is None for request in self.open[at].values() for outcome in request.samples
        )

    def run(self) -> None:
        chance = self.chance
        while self.waiting or any(group.scheduler.open_requests for group in self.groups):
            if self.waiting and chance.random() < 0.3:
                self.submit(self.waiting.pop())
            for at, group in enumerate(self.groups):
                if self.losses and chance.random() < 0.1 and self.is_on_its_way(at):
                    self.losses -= 1
                    self.lose(at)
                    continue
                group.step()
                while len(group.flight) >= self.depth or (group.flight and chance.random() < 0.3):
                    group.hear()
                    if chance.random() < 0.7:
                        group.abort()
                if chance.random() < 0.5:
                    group.deliver()
        for group in self.groups:
            group.finish()
            group.deliver()
            assert group.scheduler.cache.num_free == group.schedule.blocks and not group.schedule.status.any()
            assert not any(output.open for output in group.outputs)


@pytest.mark.parametrize("seed", range(tiers.RESUMED_SEEDS))
def test_answers_are_the_same_bytes_when_groups_are_lost_on_the_way(seed: int) -> None:
    whole, cut = random_requests(random.Random(seed)), random_requests(random.Random(seed))
    interval = (1, 3)[seed % 2]
    Tree(random.Random(seed), whole, 0, interval).run()
    cluster = Tree(random.Random(1000 + seed), cut, LOSSES, interval)
    cluster.run()
    assert cluster.resumed, "no loss has met an answer"
    ends = set()
    for alone, request in zip(whole, cut, strict=True):
        for expected, sample in zip(alone.samples, request.samples, strict=True):
            assert sample.end is not None and expected.end is not None
            assert (sample.ids, sample.text, sample.end, sample.logprobs) == (
                expected.ids,
                expected.text,
                expected.end,
                expected.logprobs,
            ), (request.losses, request.submit.params)
            ends.add(sample.end[0])
    assert ends == {FinishReason.STOP, FinishReason.LENGTH}
