"""The scheduler on random traces, against a device that knows what lies in its cache and answers that are known."""

import random
from collections import Counter

import numpy as np
import pytest

from penstock.engine.core.request_queue import SLOT_SHARE
from penstock.engine.protocol.messages import SamplingParams, Submit
from tests import tiers
from tests.property.device import EOS, VOCABULARY, Core, Users, answer

SEEDS = tiers.SCHEDULER_SEEDS
MEMORY = {"scarce": 15, "little": 24, "plenty": 120}  # blocks; the longest request needs 15


def run(
    seed: int,
    blocks: int,
    *,
    calm: bool = False,
    failing: float = 0.0,
    requests: int = 25,
    slots: int = 6,
    **config: int | None,
) -> Core:
    chance = random.Random(seed)
    core = Core(random.Random(seed), blocks, slots, failing=failing, **config)
    users = Users(random.Random(seed))  # the same ones, whatever the core does
    while users.number < requests:
        if chance.random() < 0.5:
            core.submit(users.submit())
        if not calm:
            interfere(core, chance)
        core.begin()
        if core.flights and (len(core.flights) == 2 or chance.random() < 0.5):
            core.finish()
    core.drain()
    return core


def interfere(core: Core, chance: random.Random) -> None:
    if chance.random() < 0.05 and core.got:
        core.abort(*chance.choice(list(core.got))[:2])
    if chance.random() < 0.1 and core.owners:
        server, request, sample = chance.choice(list(core.owners.values()))
        core.stop((server, request, sample + chance.choice((0, 0, 100))))  # at times, of one that there is not
    if chance.random() < 0.01:
        core.forget_server(chance.randrange(2))


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("has_overlap", [True, False], ids=["overlap", "alone"])
def test_every_request_gets_its_own_answer_and_nothing_is_left(memory: str, has_overlap: bool) -> None:
    ends: Counter[str] = Counter()
    shared = preempted = 0
    for seed in range(SEEDS):
        full_step = 8 if seed % 2 else None
        core = run(seed, MEMORY[memory], failing=0.002, has_overlap=has_overlap, full_step_tokens=full_step)
        ends.update(core.ended.values())
        shared, preempted = shared + core.shared, preempted + core.preempted
        core.require_answers(seed)
    assert set(ends) == {"done", "aborted", "stopped", "failed"}, ends
    assert shared > 100 and (preempted > 10) == (memory != "plenty"), (shared, preempted)


@pytest.mark.parametrize("seed", [2026])
def test_a_sample_is_not_resumed_in_the_step_that_preempts_it(seed: int) -> None:
    """The heap of samples that wait has an entry of it from an earlier time. A token of it is in flight."""
    core = run(seed, MEMORY["scarce"], failing=0.002)
    assert core.preempted > 10


@pytest.mark.parametrize("seed", range(3))
def test_answers_do_not_depend_on_overlap_nor_on_the_cache_nor_on_memory(seed: int) -> None:
    cores = [
        run(seed, MEMORY[memory], calm=True, has_overlap=has_overlap, has_prefix_cache=has_prefix_cache)
        for memory in MEMORY
        for has_overlap in (True, False)
        for has_prefix_cache in (True, False)
    ]
    expected = {owner: answer(submit, owner[2]) for owner in cores[0].got for submit in [cores[0].submits[owner[:2]]]}
    for core in cores:
        assert core.answers() == expected


@pytest.mark.parametrize("seed", range(2))
def test_without_the_prefix_cache_only_samples_of_one_request_share_blocks(seed: int) -> None:
    core = run(seed, MEMORY["plenty"], calm=True, has_prefix_cache=False)
    assert core.shared
    cached = core.cached_tokens
    assert 0 < cached < run(seed, MEMORY["plenty"], calm=True).cached_tokens


# ── slots ────────────────────────────────────────────────────────────────────────────────────────────────────────────
SLOTS = 2 * SLOT_SHARE


@pytest.mark.parametrize("memory", MEMORY)
def test_slots_reserved_for_small_clients_change_no_answer(memory: str) -> None:
    for seed in range(SEEDS // 2):
        core = run(seed, MEMORY[memory], failing=0.002, requests=40, slots=SLOTS)
        core.require_answers(seed)


def asking(number: int, client: str, chance: random.Random, n: int = 1) -> Submit:
    prompt = np.array([chance.randrange(EOS + 1, VOCABULARY) for _ in range(chance.randint(1, 6))], np.int32)
    params = SamplingParams(n=n, max_tokens=50)
    return Submit(0, number, prompt, params, client=client, seed=chance.randrange(100))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_small_client_gets_a_slot_at_once_beside_large_clients(seed: int) -> None:
    chance = random.Random(seed)
    core = Core(random.Random(seed), 1000, SLOTS, max_num_batched_tokens=400)
    clients = (("bulk",), ("bulk", "more"), ("",))[seed % 3]
    number = most = 0
    for _ in range(60):
        # There is always more than can run: of clients that are named, or of one request without a client.
        while core.scheduler.open_requests < (1 if clients == ("",) else SLOTS):
            number += 1
            n = 200 if clients == ("",) else chance.choice((1, 8, 30))
            core.submit(asking(number, chance.choice(clients), chance, n=n))
        core.begin()
        core.finish()
        most = max(most, core.schedule.rows.size)
        if chance.random() < 0.3 and not any(owner[1] > 1 << 20 for owner in core.owners.values()):
            number += 1
            core.submit(asking(number + (1 << 20), chance.choice(("small", "")), chance))
            core.begin()
            assert any(owner[1] > 1 << 20 for owner in core.owners.values()), "it waits for a slot"
            core.finish()
    assert most >= SLOTS - SLOT_SHARE, "slots are idle"
    for request in {owner[:2] for owner in core.open_samples()}:
        core.abort(*request)
    core.drain()


@pytest.mark.parametrize("client", ["", "only"])
def test_large_client_gets_all_slots_but_the_reserved(client: str) -> None:
    chance = random.Random(1)
    core = Core(random.Random(1), 1000, SLOTS, max_num_batched_tokens=400)
    for number in range(2 * SLOTS):
        core.submit(asking(number, client, chance))
    for _ in range(3):
        core.begin()
        core.finish()
    reserved = SLOTS // SLOT_SHARE if client else 0
    assert core.schedule.rows.size >= SLOTS - reserved - 3, "some have ended by chance"
    assert reserved == 0 or core.schedule.rows.size <= SLOTS - reserved
    core.drain()
