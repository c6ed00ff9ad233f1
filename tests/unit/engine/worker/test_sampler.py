"""From logits to ids, against a reference that takes one row at a time and one rule after the other."""

import math
import random
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.engine.protocol.messages import FinishReason, SamplingParams

torch = pytest.importorskip("torch")

from penstock.engine.worker.grammars import TokenMasks  # noqa: E402  (it needs torch)
from penstock.engine.worker.sampler import Sampler  # noqa: E402
from tests.support.columns import ints  # noqa: E402

VOCABULARY, EOS = 24, 2


def sampler(slots: int = 8) -> Sampler:
    return Sampler(slots, VOCABULARY, (EOS,))


def slots(*numbers: int) -> Any:
    return np.array(numbers, np.intp)


def some_logits(seed: int, rows: int = 1) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (rows, VOCABULARY)).astype(np.float32))


def alone(
    params: SamplingParams, logits: Any, prompt: tuple[int, ...] = (), seed: int = 0, steps: int = 1
) -> list[int]:
    """What one sample gets of the same logits in each step."""
    row_sampler = sampler()
    row_sampler.join(0, params, ints(*prompt), seed=seed)
    return [int(row_sampler.sample(logits, slots(0)).ids[0]) for _ in range(steps)]


def test_bad_words_of_a_resumed_answer_begin_in_what_it_has() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 7] = 9.0
    for generated, expected in (((4, 5, 6), 0), ((5, 4, 6), 7), ((6,), 7), ((), 7)):
        resumed = sampler()
        params = SamplingParams(temperature=0, bad_words_ids=((5, 6, 7),))
        resumed.join(0, params, ints(1), seed=0, generated=ints(*generated))
        assert int(resumed.sample(logits, slots(0)).ids[0]) == expected
    resumed.leave(0)
    resumed.join(0, SamplingParams(temperature=0), ints(1), seed=0, generated=ints(5, 6))
    assert int(resumed.sample(logits, slots(0)).ids[0]) == 7


# ── the reference ──
def expected_logits(params: SamplingParams, row: list[float], prompt: list[int], generated: list[int]) -> list[float]:
    out = list(row)
    for token in range(VOCABULARY):
        if token in prompt or token in generated:
            out[token] = (
                out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
            )
        out[token] -= params.frequency_penalty * generated.count(token)
        out[token] -= params.presence_penalty * (token in generated)
    for token, bias in params.logit_bias:
        out[token] += bias
    for token in range(VOCABULARY):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            out[token] = -math.inf
        for *before, end in params.bad_words_ids:
            if token == end and (not before or generated[-len(before) :] == before):
                out[token] = -math.inf
        ends = (not params.ignore_eos and token == EOS) or token in params.stop_token_ids
        if len(generated) < params.min_tokens and ends:
            out[token] = -math.inf
    return out


def expected_distribution(
    params: SamplingParams, row: list[float], prompt: list[int], generated: list[int]
) -> dict[int, float]:
    out = expected_logits(params, row, prompt, generated)
    if params.temperature == 0:
        return {int(np.argmax(out)): 1.0}
    weights = {token: math.exp((value - max(out)) / params.temperature) for token, value in enumerate(out)}
    order = sorted(weights, key=lambda token: (-weights[token], token))
    order = order[: params.top_k or None]
    total, before, left = sum(weights[token] for token in order), 0.0, []
    for token in order:
        if left and before >= params.top_p * total:
            break
        left.append(token)
        before += weights[token]
    least = max(params.min_p, weights[left[-1]])
    left = [token for token in weights if weights[token] >= least]
    total = sum(weights[token] for token in left)
    return {token: weights[token] / total for token in left if weights[token]}


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
    "bad words": SamplingParams(bad_words_ids=((3,), (9, 5, 4), (5, 5, 6), (5, 7), (1, VOCABULARY))),
    "not yet": SamplingParams(min_tokens=3, stop_token_ids=(7, 8)),
    "penalized": SamplingParams(presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.3),
    "greedy and penalized": SamplingParams(temperature=0, frequency_penalty=2.0, repetition_penalty=0.8),
    "greedy": SamplingParams(temperature=0),
}


@pytest.mark.parametrize("name", EVERY)
def test_ids_come_as_often_as_the_reference_says(name: str) -> None:
    """Chi-square, at one in a thousand: the seeds are fixed, so it holds or it does not."""
    params, count = EVERY[name], 4000
    prompt, generated = [1, 1, 6], [5, 9, 5]
    many = Sampler(count, VOCABULARY, (EOS,))
    where = np.arange(count)
    row = some_logits(11)
    for slot in range(count):
        many.join(slot, params, ints(*prompt), seed=slot)
    for token in generated[: 2 if name == "not yet" else 3]:  # all say the same first
        forced = torch.full((count, VOCABULARY), -torch.inf)
        forced[:, token] = 0.0
        if params.allowed_token_ids is None:
            many.sample(forced, where)
    generated = generated[:2] if name == "not yet" else generated
    counts = np.bincount(many.sample(row.expand(count, -1), where).ids.numpy(), minlength=VOCABULARY)
    expected = expected_distribution(params, row[0].tolist(), prompt, generated)
    assert set(np.flatnonzero(counts)) <= expected.keys()
    likely = {token: count * share for token, share in expected.items() if count * share >= 5}
    rest = count - sum(likely.values())
    chi = sum((counts[token] - expected_count) ** 2 / expected_count for token, expected_count in likely.items())
    if rest > 1e-6:
        chi += (count - sum(counts[token] for token in likely) - rest) ** 2 / max(rest, 5)
    freedom = len(likely) - 1 + (rest > 1e-6)
    # Wilson and Hilferty's approximation of the quantile.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3 if freedom else 1e-9
    assert chi <= limit


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_a_mixed_batch_sample_as_they_would_alone(seed: int) -> None:
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
                row_sampler = sampler(1)
                for each, where in ((together, slot), (row_sampler, 0)):
                    each.join(where, params, ints(*prompt), seed=seed)
                there[slot] = params, row_sampler, prompt, []
        running = [slot for slot in there if chance.random() < 0.8]
        running.sort()
        if not running:
            continue
        logits = some_logits(1000 * seed + step, len(running))
        before = logits.clone()
        ids = together.sample(logits, slots(*running)).ids.tolist()
        assert torch.equal(logits, before), "the logits are the model's"
        for row, slot in enumerate(running):
            params, row_sampler, prompt, generated = there[slot]
            assert row_sampler.sample(logits[row : row + 1], slots(0)).ids.tolist() == [ids[row]]
            assert ids[row] in expected_distribution(params, logits[row].tolist(), prompt, generated)
            generated.append(ids[row])


def test_seed_repeats_draws_and_each_sample_has_its_own() -> None:
    flat = torch.zeros((1, VOCABULARY))
    assert alone(SamplingParams(), flat, seed=7, steps=30) == alone(SamplingParams(seed=9), flat, seed=7, steps=30)
    assert alone(SamplingParams(), flat, seed=1, steps=30) != alone(SamplingParams(), flat, seed=2, steps=30)
    row_sampler = sampler()
    for which in range(3):
        row_sampler.join(which, SamplingParams(), ints(), seed=7, sample=which)
    drawn = [row_sampler.sample(flat.expand(3, -1), slots(0, 1, 2)).ids.tolist() for _ in range(30)]
    assert [ids[0] for ids in drawn] == alone(SamplingParams(), flat, seed=7, steps=30)
    assert len({tuple(ids) for ids in zip(*drawn, strict=True)}) == 3


def test_seeds_of_64_bits_differ() -> None:
    flat = torch.zeros((1, VOCABULARY))
    drawn = {tuple(alone(SamplingParams(), flat, seed=seed, steps=20)) for seed in (0, 1, 1 << 63, (1 << 64) - 1)}
    assert len(drawn) == 4


@pytest.mark.parametrize("name", EVERY)
def test_resumed_sample_draws_the_ids_of_an_undisturbed_sample(name: str) -> None:
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


def test_new_sample_in_an_unchanged_batch_has_its_own_parameters() -> None:
    row_sampler, row, there = sampler(), some_logits(3), slots(0)
    row_sampler.join(0, EVERY["greedy"], ints(), seed=0)
    assert [int(row_sampler.sample(row, there).ids[0]) for _ in range(2)] == [int(row.argmax())] * 2
    row_sampler.join(0, SamplingParams(temperature=0, allowed_token_ids=(6,)), ints(), seed=0)
    assert int(row_sampler.sample(row, there).ids[0]) == 6


def test_ends_are_not_chosen_before_min_tokens_and_then_they_are() -> None:
    row = some_logits(3)
    row[0, EOS], row[0, 7] = 50.0, 49.0
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(7,))
    assert alone(params, row, steps=4)[2:] == [EOS, EOS]
    assert not {EOS, 7} & set(alone(params, row, steps=2))
    ignoring = SamplingParams(temperature=0, min_tokens=2, ignore_eos=True)
    assert alone(ignoring, row) == [EOS]


def test_logits_that_are_not_numbers_fail_their_row_alone() -> None:
    row_sampler = sampler()
    for slot, name in enumerate(["greedy", "plain", "allowed", "penalized", "top_k"]):
        row_sampler.join(slot + 1, EVERY[name], ints(1), seed=slot)
    logits = some_logits(4, 5)
    there = slots(1, 2, 3, 4, 5)
    assert row_sampler.sample(logits, there).failed(there) == {}
    logits[0, 3] = math.nan
    logits[2, 20] = math.nan  # where no row may look
    logits[4] = -math.inf
    chosen = row_sampler.sample(logits, there)
    failed = chosen.failed(there)
    assert failed == dict.fromkeys([1, 3, 5], FinishReason.ERROR)
    assert ((chosen.ids >= 0) & (chosen.ids < VOCABULARY)).all() and chosen.ids.dtype == torch.int32


def test_row_in_which_every_id_is_ruled_out_is_stuck() -> None:
    """By a grammar and bad words, or by allowed ids and bad words. Logits that are not numbers are an error still."""
    row_sampler, there = sampler(), slots(0, 1, 2, 3)
    bad = ((7,), (8,))
    row_sampler.join(0, SamplingParams(bad_words_ids=bad), ints(1), seed=0)
    row_sampler.join(1, SamplingParams(bad_words_ids=bad, allowed_token_ids=(7, 8)), ints(1), seed=0)
    row_sampler.join(2, SamplingParams(bad_words_ids=bad, allowed_token_ids=(7, 8)), ints(1), seed=0)
    row_sampler.join(3, SamplingParams(bad_words_ids=bad, allowed_token_ids=(7, 9)), ints(1), seed=0)
    bits = np.zeros((1, -(-VOCABULARY // 32)), np.int32)
    bits[0, 0] = 1 << 7 | 1 << 8
    logits = some_logits(4, 4)
    logits[2, 3] = math.nan
    chosen = row_sampler.sample(logits, there, TokenMasks(slots(0), bits, {}))
    assert chosen.failed(there) == {0: FinishReason.STUCK, 1: FinishReason.STUCK, 2: FinishReason.ERROR}
    assert chosen.ids.tolist() == [0, 0, 0, 9]


def test_ids_that_the_model_does_not_have_are_passed_over() -> None:
    odd = (1 << 40, -5, VOCABULARY)
    params = SamplingParams(
        temperature=0,
        logit_bias=(*((token, 90.0) for token in odd), (4, 50.0)),
        stop_token_ids=odd,
        allowed_token_ids=(*odd, 4, 5),
        min_tokens=2,
    )
    assert alone(params, some_logits(5), (VOCABULARY + 1,)) == [4]


def test_log_probabilities_are_the_models_own_and_come_with_ranks() -> None:
    row_sampler = sampler()
    row_sampler.join(0, SamplingParams(temperature=0), ints(), seed=0)
    row_sampler.join(1, SamplingParams(logprobs=2, allowed_token_ids=(5,)), ints(), seed=0)
    row_sampler.join(2, SamplingParams(logprobs=0, temperature=0), ints(), seed=0)
    row_sampler.join(3, SamplingParams(logprobs=VOCABULARY + 9), ints(), seed=0)
    logits = some_logits(6, 4)
    chosen = row_sampler.sample(logits, slots(0, 1, 2, 3))
    logprobs = chosen.logprobs()
    assert logprobs is not None and logprobs.counts is not None
    assert logprobs.counts.tolist() == [0, 3, 1, VOCABULARY + 1]
    starts = [0, 0, 3, 4]
    ids = chosen.ids.tolist()
    for row in (1, 2, 3):
        own = logits[row].double()
        own = own - own.logsumexp(0)
        order = own.argsort(descending=True).tolist()
        part = slice(starts[row], starts[row] + int(logprobs.counts[row]))
        assert logprobs.ids[part].tolist() == [ids[row], *order[: logprobs.counts[row] - 1]]
        assert np.allclose(logprobs.values[part], own[logprobs.ids[part].tolist()], atol=1e-5)
        assert logprobs.ranks[row] == order.index(ids[row]) + 1
    assert logprobs.ranks[0] == 0 and ids[1] == 5
    row_sampler.leave(1), row_sampler.leave(2), row_sampler.leave(3)
    assert row_sampler.sample(logits[:1], slots(0)).logprobs() is None


def test_half_precision_is_sampled_as_well() -> None:
    row = some_logits(7).to(torch.bfloat16)
    assert alone(EVERY["greedy"], row) == [int(row.argmax())]
    assert alone(EVERY["all three"], row)[0] in expected_distribution(EVERY["all three"], row[0].tolist(), [], [])
