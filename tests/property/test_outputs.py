"""What servers get against what each sample says by itself: random traces of all that can happen to it on the way."""

import random

import pytest

from penstock.engine.protocol.columns import PREEMPTED
from penstock.engine.protocol.messages import FinishReason
from tests import tiers
from tests.property.speaking import KEY, Sample, Speaking, random_sample

STEPS = 300


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(tiers.OUTPUTS_SEEDS))
def test_every_sample_says_what_it_would_say_alone_and_ends_once(seed: int, depth: int) -> None:
    chance = random.Random(1000 * depth + seed)
    engine = Speaking(depth=depth)
    samples: dict[KEY, Sample] = {}
    aborted: set[KEY] = set()
    cached: dict[KEY, int] = {}
    parents: list[tuple[int, Sample, int]] = []  # slot, a sample of the request, and how many are still to join
    requests = 0
    for _ in range(STEPS):
        for slot, sample in list(engine.samples.items()):
            what = chance.random()
            if sample.is_over:
                if what < 0.7:  # sometimes the core takes its time
                    engine.leave(slot)
            elif what < 0.02:
                engine.leave(slot)
                aborted.add(sample.key)
            elif what < 0.05 and engine.is_running(slot):
                engine.plan.preempt(slot)
            elif what < 0.3 and engine.schedule.status[slot] == PREEMPTED:
                engine.resume(slot, chance.choice([None, 1]))
            elif what < 0.1 and engine.is_running(slot):
                engine.plan.advance(slot, 0)  # not in this step
        parents = [one for one in parents if engine.samples.get(one[0]) is one[1] and not one[1].is_over]
        while engine.plan.free_slots and chance.random() < 0.4:
            if parents and chance.random() < 0.7:
                parent, first, which = parents.pop()
                sample = random_sample(chance, (*first.key[:2], which), first.params.n)
                sample.params, sample.prompt = first.params, first.prompt
                engine.join(sample, cached=sample.prompt - 1, parent=parent)
                cached[sample.key] = cached[first.key]
                if which + 1 < first.params.n:
                    parents.append((parent, first, which + 1))
            else:
                requests += 1
                sample = random_sample(chance, (chance.choice([0, 0, 1, 4]), requests, 0), chance.choice([1, 1, 3]))
                cached[sample.key] = chance.randrange(sample.prompt)
                slot = engine.join(sample, cached=cached[sample.key], chunk=chance.choice([None, 1]))
                if sample.params.n > 1:
                    parents.append((slot, sample, 1))
            samples[sample.key] = sample
        engine.send()
        while len(engine.flight) >= depth:
            engine.hear()
            if chance.random() < 0.7:
                engine.halt()
    engine.finish()
    ends = set()
    for key, sample in samples.items():
        got = engine.servers.got[key]
        ids, text, end = sample.plainly()
        assert got.end is not None, key
        assert got.cached == cached[key], key
        ends.add(got.end[0])
        if key in aborted and got.end[0] == FinishReason.ABORT:
            assert ids[: len(got.ids)] == got.ids and text.encode().startswith(got.text), key
        else:
            assert (got.ids, got.text.decode(), got.end) == (ids, text, end), (key, sample.params)
        if sample.params.logprobs:
            assert got.logprobs == [[one, one + 1, one + 2] for one in got.ids], key
        else:
            assert not got.logprobs
    assert engine.servers.got.keys() == samples.keys()
    assert {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT} <= ends
