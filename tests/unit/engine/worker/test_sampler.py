"""From logits to ids, against a reference that takes one row at a time and one rule after the other."""

import math
import random
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.engine.protocol.messages import SamplingParams

torch = pytest.importorskip("torch")

from penstock.engine.worker.sampler import Sampler  # noqa: E402  (it needs torch)

VOCABULARY, EOS = 24, 2


def sampler(slots: int = 8) -> Sampler:
    return Sampler(slots, VOCABULARY, (EOS,))


def slots(*numbers: int) -> Any:
    return np.array(numbers, np.intp)


def ints(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def some_logits(seed: int, rows: int = 1) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (rows, VOCABULARY)).astype(np.float32))


def alone(
    params: SamplingParams, logits: Any, prompt: tuple[int, ...] = (), seed: int = 0, steps: int = 1
) -> list[int]:
    """What one sample gets of the same logits in each step."""
    one = sampler()
    one.join(0, params, ints(*prompt), seed=seed)
    return [int(one.sample(logits, slots(0)).ids[0]) for _ in range(steps)]


# ── the reference ──
def expected_logits(params: SamplingParams, row: list[float], prompt: list[int], said: list[int]) -> list[float]:
    out = list(row)
    for one in range(VOCABULARY):
        if one in prompt or one in said:
            out[one] = out[one] / params.repetition_penalty if out[one] > 0 else out[one] * params.repetition_penalty
        out[one] -= params.frequency_penalty * said.count(one)
        out[one] -= params.presence_penalty * (one in said)
    for one, bias in params.logit_bias:
        out[one] += bias
    for one in range(VOCABULARY):
        if params.allowed_token_ids is not None and one not in params.allowed_token_ids:
            out[one] = -math.inf
        ends = (not params.ignore_eos and one == EOS) or one in params.stop_token_ids
        if len(said) < params.min_tokens and ends:
            out[one] = -math.inf
    return out


def expected_distribution(
    params: SamplingParams, row: list[float], prompt: list[int], said: list[int]
) -> dict[int, float]:
    out = expected_logits(params, row, prompt, said)
    if params.temperature == 0:
        return {int(np.argmax(out)): 1.0}
    weights = {one: math.exp((value - max(out)) / params.temperature) for one, value in enumerate(out)}
    order = sorted(weights, key=lambda one: (-weights[one], one))
    order = order[: params.top_k or None]
    total, before, left = sum(weights[one] for one in order), 0.0, []
    for one in order:
        if left and before >= params.top_p * total:
            break
        left.append(one)
        before += weights[one]
    least = max(params.min_p, weights[left[-1]])
    left = [one for one in weights if weights[one] >= least]
    total = sum(weights[one] for one in left)
    return {one: weights[one] / total for one in left if weights[one]}


EVERY = {
    "plain": SamplingParams(),
    "hot": SamplingParams(temperature=3.0),
    "cold": SamplingParams(temperature=0.3),
    "top_k": SamplingParams(top_k=5),
    "top_p": SamplingParams(top_p=0.7),
    "min_p": SamplingParams(min_p=0.05),
    "all three": SamplingParams(temperature=1.7, top_k=9, top_p=0.8, min_p=0.02),
    "only the likeliest": SamplingParams(top_p=1e-6),
    "biased": SamplingParams(logit_bias=((3, 4.0), (4, -100.0), (3, 1.0))[:2]),
    "allowed": SamplingParams(allowed_token_ids=(1, 5, 9), logit_bias=((5, 2.0),)),
    "not yet": SamplingParams(min_tokens=3, stop_token_ids=(7, 8)),
    "penalized": SamplingParams(presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.3),
    "greedy and penalized": SamplingParams(temperature=0, frequency_penalty=2.0, repetition_penalty=0.8),
    "greedy": SamplingParams(temperature=0),
}


@pytest.mark.parametrize("name", EVERY)
def test_ids_come_as_often_as_the_reference_says(name: str) -> None:
    """Chi-square, at one in a thousand: the seeds are fixed, so it holds or it does not."""
    params, count = EVERY[name], 4000
    prompt, said = [1, 1, 6], [5, 9, 5]
    many = Sampler(count, VOCABULARY, (EOS,))
    where = np.arange(count)
    row = some_logits(11)
    for slot in range(count):
        many.join(slot, params, ints(*prompt), seed=slot)
    for one in said[: 2 if name == "not yet" else 3]:  # all say the same first
        forced = torch.full((count, VOCABULARY), -torch.inf)
        forced[:, one] = 0.0
        if params.allowed_token_ids is None:
            many.sample(forced, where)
    said = said[:2] if name == "not yet" else said
    found = np.bincount(many.sample(row.expand(count, -1), where).ids.numpy(), minlength=VOCABULARY)
    expected = expected_distribution(params, row[0].tolist(), prompt, said)
    assert set(np.flatnonzero(found)) <= expected.keys()
    likely = {one: count * share for one, share in expected.items() if count * share >= 5}
    rest = count - sum(likely.values())
    chi = sum((found[one] - wanted) ** 2 / wanted for one, wanted in likely.items())
    if rest > 1e-6:
        chi += (count - sum(found[one] for one in likely) - rest) ** 2 / max(rest, 5)
    freedom = len(likely) - 1 + (rest > 1e-6)
    # Wilson and Hilferty's approximation of the quantile.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3 if freedom else 1e-9
    assert chi <= limit


@pytest.mark.parametrize("seed", range(20))
def test_a_mixed_batch_that_comes_and_goes_gets_what_each_row_would_get_by_itself(seed: int) -> None:
    chance = random.Random(seed)
    together = sampler(6)
    there: dict[int, tuple[SamplingParams, Sampler, list[int], list[int]]] = {}
    for step in range(30):
        for slot in range(6):
            if slot in there and chance.random() < 0.1:
                together.leave(slot)
                del there[slot]
            elif slot not in there and chance.random() < 0.5:
                params = chance.choice(list(EVERY.values()))
                prompt = [chance.randrange(VOCABULARY) for _ in range(4)]
                seed = chance.randrange(100)
                one = sampler(1)
                for each, where in ((together, slot), (one, 0)):
                    each.join(where, params, ints(*prompt), seed=seed)
                there[slot] = params, one, prompt, []
        running = [slot for slot in there if chance.random() < 0.8]
        running.sort()
        if not running:
            continue
        logits = some_logits(1000 * seed + step, len(running))
        before = logits.clone()
        ids = together.sample(logits, slots(*running)).ids.tolist()
        assert torch.equal(logits, before), "the logits are the model's"
        for row, slot in enumerate(running):
            params, one, prompt, said = there[slot]
            assert one.sample(logits[row : row + 1], slots(0)).ids.tolist() == [ids[row]]
            assert ids[row] in expected_distribution(params, logits[row].tolist(), prompt, said)
            said.append(ids[row])


def test_a_seed_repeats_itself_and_each_sample_of_a_request_draws_for_itself() -> None:
    flat = torch.zeros((1, VOCABULARY))
    assert alone(SamplingParams(), flat, seed=7, steps=30) == alone(SamplingParams(seed=9), flat, seed=7, steps=30)
    assert alone(SamplingParams(), flat, seed=1, steps=30) != alone(SamplingParams(), flat, seed=2, steps=30)
    one = sampler()
    for which in range(3):
        one.join(which, SamplingParams(), ints(), seed=7, sample=which)
    said = [one.sample(flat.expand(3, -1), slots(0, 1, 2)).ids.tolist() for _ in range(30)]
    assert [ids[0] for ids in said] == alone(SamplingParams(), flat, seed=7, steps=30)
    assert len({tuple(ids) for ids in zip(*said, strict=True)}) == 3


def test_seeds_of_64_bits_differ() -> None:
    flat = torch.zeros((1, VOCABULARY))
    said = {tuple(alone(SamplingParams(), flat, seed=seed, steps=20)) for seed in (0, 1, 1 << 63, (1 << 64) - 1)}
    assert len(said) == 4


@pytest.mark.parametrize("name", EVERY)
def test_a_sample_that_is_resumed_goes_on_as_if_it_had_stayed(name: str) -> None:
    params = msgspec.structs.replace(EVERY[name], min_tokens=6)
    rows = [some_logits(at) for at in range(12)]
    for row in rows:
        row[0, EOS] = 40.0  # it is chosen as soon as it may be
    whole, resumed = sampler(), sampler()
    whole.join(0, params, ints(1, 2), seed=3, sample=1)
    ids = [int(whole.sample(row, slots(0)).ids[0]) for row in rows]
    for begin in (1, 4, 9):
        resumed.join(2, params, ints(1, 2), seed=3, sample=1, generated=ints(*ids[:begin]))
        assert [int(resumed.sample(row, slots(2)).ids[0]) for row in rows[begin:]] == ids[begin:]
    resumed.join(2, params, ints(1, 2), seed=3, sample=1)
    assert [int(resumed.sample(row, slots(2)).ids[0]) for row in rows] == ids, "a trace of the sample before"


def test_who_takes_a_slot_has_nothing_of_who_had_it() -> None:
    row = some_logits(3)
    one = sampler()
    one.join(0, EVERY["greedy and penalized"], ints(1, 2, 3), seed=0)
    for _ in range(5):
        one.sample(row, slots(0))
    one.leave(0)
    one.join(0, EVERY["greedy and penalized"], ints(), seed=0)
    said = [int(one.sample(row, slots(0)).ids[0]) for _ in range(5)]
    assert said == alone(EVERY["greedy and penalized"], row, steps=5)
    one.join(0, EVERY["greedy"], ints(), seed=0)
    assert int(one.sample(row, slots(0)).ids[0]) == int(row.argmax())


def test_a_batch_that_stays_hears_of_who_joins_it_anew() -> None:
    one, row, there = sampler(), some_logits(3), slots(0)
    one.join(0, EVERY["greedy"], ints(), seed=0)
    assert [int(one.sample(row, there).ids[0]) for _ in range(2)] == [int(row.argmax())] * 2
    one.join(0, SamplingParams(temperature=0, allowed_token_ids=(6,)), ints(), seed=0)
    assert int(one.sample(row, there).ids[0]) == 6


def test_ends_are_not_chosen_before_min_tokens_and_then_they_are() -> None:
    row = some_logits(3)
    row[0, EOS], row[0, 7] = 50.0, 49.0
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(7,))
    assert alone(params, row, steps=4)[2:] == [EOS, EOS]
    assert not {EOS, 7} & set(alone(params, row, steps=2))
    ignoring = SamplingParams(temperature=0, min_tokens=2, ignore_eos=True)
    assert alone(ignoring, row) == [EOS]


def test_logits_that_are_not_numbers_fail_their_row_alone() -> None:
    one = sampler()
    for slot, name in enumerate(["greedy", "plain", "allowed", "penalized", "top_k"]):
        one.join(slot + 1, EVERY[name], ints(1), seed=slot)
    logits = some_logits(4, 5)
    there = slots(1, 2, 3, 4, 5)
    assert one.sample(logits, there).failed(there) is None
    logits[0, 3] = math.nan
    logits[2, 20] = math.nan  # where nobody is allowed to look
    logits[4] = -math.inf
    chosen = one.sample(logits, there)
    failed = chosen.failed(there)
    assert failed is not None and failed.tolist() == [1, 3, 5] and failed.dtype == np.uint16
    assert ((chosen.ids >= 0) & (chosen.ids < VOCABULARY)).all() and chosen.ids.dtype == torch.int32


def test_ids_that_the_model_does_not_have_are_passed_over() -> None:
    odd = (1 << 40, -5, VOCABULARY)
    params = SamplingParams(
        temperature=0,
        logit_bias=(*((one, 90.0) for one in odd), (4, 50.0)),
        stop_token_ids=odd,
        allowed_token_ids=(*odd, 4, 5),
        min_tokens=2,
    )
    assert alone(params, some_logits(5), (VOCABULARY + 1,)) == [4]


def test_log_probabilities_are_the_models_own_and_come_with_ranks() -> None:
    one = sampler()
    one.join(0, SamplingParams(temperature=0), ints(), seed=0)
    one.join(1, SamplingParams(logprobs=2, allowed_token_ids=(5,)), ints(), seed=0)
    one.join(2, SamplingParams(logprobs=0, temperature=0), ints(), seed=0)
    one.join(3, SamplingParams(logprobs=VOCABULARY + 9), ints(), seed=0)
    logits = some_logits(6, 4)
    chosen = one.sample(logits, slots(0, 1, 2, 3))
    found = chosen.logprobs()
    assert found is not None and found.counts is not None
    assert found.counts.tolist() == [0, 3, 1, VOCABULARY + 1]
    starts = [0, 0, 3, 4]
    ids = chosen.ids.tolist()
    for row in (1, 2, 3):
        own = logits[row].double()
        own = own - own.logsumexp(0)
        order = own.argsort(descending=True).tolist()
        part = slice(starts[row], starts[row] + int(found.counts[row]))
        assert found.ids[part].tolist() == [ids[row], *order[: found.counts[row] - 1]]
        assert np.allclose(found.values[part], own[found.ids[part].tolist()], atol=1e-5)
        assert found.ranks[row] == order.index(ids[row]) + 1
    assert found.ranks[0] == 0 and ids[1] == 5
    one.leave(1), one.leave(2), one.leave(3)
    assert one.sample(logits[:1], slots(0)).logprobs() is None


def test_half_precision_is_sampled_as_well() -> None:
    row = some_logits(7).to(torch.bfloat16)
    assert alone(EVERY["greedy"], row) == [int(row.argmax())]
    assert alone(EVERY["all three"], row)[0] in expected_distribution(EVERY["all three"], row[0].tolist(), [], [])
