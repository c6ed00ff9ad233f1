"""Requests of any length up to the model's: what the device keeps of them grows while others join, wait and leave."""

import random

import pytest

# First: where torch is missing, this skips the rest.
from tests.support.models import BLOCK_SIZE, WORDS, Asked, BuildFamily, ask, device, must_be_greedy

# isort: split
from penstock.engine.worker import paged_attention
from tests import tiers
from tests.support.ranks import answers_of_threads

LENGTHS = (256, 512, 1024)  # at which tables are widened
MAX_LENGTH = 1280


def random_requests(seed: int, limit: int = MAX_LENGTH) -> list[Asked]:
    """Some end one token before a table is full, some with it, some after it; the last ones as long as the model
    allows. Their prompts begin alike, so that blocks are shared."""
    chance = random.Random(seed)
    beginning = chance.choices(WORDS, k=limit)
    lengths = [length + more for length in LENGTHS if length < limit for more in (0, 1, chance.randint(2, 50))]
    chance.shuffle(lengths)
    requests = []
    for length in [*lengths, chance.randint(100, limit), limit, limit]:
        prompt = chance.randint(50, length - 1)
        same = chance.randint(40, prompt - 1)
        requests.append(Asked(beginning[:same] + chance.choices(WORDS, k=prompt - same), [], length - prompt))
    return requests


def test_requests_join_after_an_answer_that_grew_past_the_table(family: BuildFamily) -> None:
    of = family("llama")
    requests = [Asked([5] * 200, [], 100), Asked([6, 7], []), Asked([8] * 300, []), Asked([9], [])]
    must_be_greedy(of.path, requests, ask(device(of, blocks=128), requests, slots=1, budget=256).answers)


@pytest.mark.parametrize("kind", ["native", "gathered"])
def test_random_lengths_are_answered_as_by_transformers(
    kind: str, family: BuildFamily, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """With joins, preemption and prefix hits in between; however the rows that compute one token attend."""
    if kind == "gathered":
        monkeypatch.setattr(paged_attention, "CPU_DTYPES", ())
    of = family("llama", max_position_embeddings=MAX_LENGTH)
    limit = MAX_LENGTH if kind == "native" else 600
    requests = random_requests(seed, limit)
    result = ask(device(of, blocks=limit // BLOCK_SIZE + 8), requests, slots=4, budget=100)
    must_be_greedy(of.path, requests, result.answers)
    assert result.preemptions > 0 and result.cached_tokens > 0


@tiers.needs_all
def test_two_ranks_answer_random_lengths_as_transformers_does(family: BuildFamily, seed: int) -> None:
    of = family("llama", max_position_embeddings=MAX_LENGTH)
    requests = random_requests(seed, 600)
    first, second = answers_of_threads(2, of, requests, blocks=600 // BLOCK_SIZE + 8, budget=100)
    assert first == second
    must_be_greedy(of.path, requests, first)
