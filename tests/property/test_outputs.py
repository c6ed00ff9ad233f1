"""What servers get against what each sample says by itself: random traces of all that can happen to it on the way.

The scheduler and the output processors are real, the device says what a script says.
"""

import random

import pytest

from penstock.engine.protocol.messages import FinishReason
from tests import tiers
from tests.property.speaking import KEY, Sample, Speaking, random_sample

STEPS = 300
MEMORY = {"scarce": 24, "plenty": 1000}  # blocks; the longest sample needs 16


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(tiers.OUTPUTS_SEEDS))
def test_sample_has_the_text_and_end_of_a_run_alone(seed: int, depth: int) -> None:
    chance = random.Random(1000 * depth + seed)
    memory, outputs = list(MEMORY)[seed % 2], 1 + seed // 2 % 2
    interval = (1, 1, 3, 20)[seed % 4]
    engine = Speaking(depth=depth, outputs=outputs, blocks=MEMORY[memory], interval=interval)
    aborted: set[KEY] = set()
    failed: dict[KEY, FinishReason] = {}
    requests = 0
    for _ in range(STEPS):
        what = chance.random()
        actual = engine.servers.got
        running = [
            sample
            for key, sample in engine.samples.items()
            if key in actual and actual[key].end is None and key not in aborted
        ]
        if what < 0.04 and running:
            sample = chance.choice(running)
            engine.scheduler.abort(*sample.key[:2])
            aborted.update(key for key in engine.samples if key[:2] == sample.key[:2])
        elif what < 0.06 and running:
            sample = chance.choice(running)
            reason = failed.setdefault(sample.key, chance.choice([FinishReason.ERROR, FinishReason.MISSING]))
            engine.fails[sample.key] = reason
        while engine.scheduler.open_requests < 8 and chance.random() < 0.4:
            requests += 1
            n = chance.choice([1, 1, 3])
            server = chance.choice([0, 0, 1, 4])
            first = random_sample(chance, (server, requests, 0), n)
            others = [random_sample(chance, (server, requests, which), n).script for which in range(1, n)]
            samples = [Sample((server, requests, 1 + at), first.params, first.prompt, script)
                       for at, script in enumerate(others)]  # fmt: skip
            engine.ask(first, *samples, begins=chance.randrange(3))
        engine.step()
        while len(engine.flight) >= depth:
            engine.hear()
            if chance.random() < 0.7:
                engine.abort()
    engine.fails.clear()
    engine.finish()
    ends = set()
    for key, sample in engine.samples.items():
        ids, text, end = sample.plainly()
        if key not in engine.servers.got:
            assert key in aborted, f"{key} has no end"
            continue
        answer = engine.servers.got[key]
        if answer.end is None:
            assert key in aborted, f"{key} has no end"
        else:
            assert answer.cached == (engine.cached[key] if answer.ids else 0), key
            ends.add(answer.end[0])
        if answer.end is None or answer.end[0] == failed.get(key):
            assert ids[: len(answer.ids)] == answer.ids and text.encode().startswith(answer.text), key
        else:
            assert (answer.ids, answer.text.decode(), answer.end) == (ids, text, end), (key, sample.params)
        if sample.params.logprobs:
            assert answer.logprobs == [[token, token + 1, token + 2] for token in answer.ids], key
        else:
            assert not answer.logprobs
    assert {FinishReason.STOP, FinishReason.LENGTH} <= ends
    assert bool(engine.preempted) == (memory == "scarce")
    assert not any(output.open for output in engine.outputs)
