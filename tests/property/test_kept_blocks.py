"""Cores that are killed at any point of a step: the next life reads no block that is not what its hash says.

Each life counts its requests from 1, and inline images have no key: blocks of two lives may not be mistaken.
"""

import random

import msgspec
import numpy as np
import pytest

from penstock.engine.client.submitted_request import SubmittedRequest
from penstock.engine.protocol.messages import Progress, SamplingParams, Submit
from tests import tiers
from tests.property.device import BLOCK_SIZE, Core, Users, image

LIVES, REQUESTS = 5, 12
MEMORY = {"little": 24, "plenty": 120}  # blocks


def open_requests(core: Core) -> list[Submit]:
    """Returns the open requests of a life as their servers submit them again: with all ids that have come."""
    submits = []
    for number, submit in core.submits.items():
        owners = [(*number, index) for index in range(submit.params.n)]
        counts = [-1 if owner in core.ended else len(core.got[owner]) for owner in owners]
        if max(counts) < 0:
            continue
        ids = [token for owner, count in zip(owners, counts, strict=True) if count > 0 for token in core.got[owner]]
        progress = Progress(np.array(counts, np.int32), np.array(ids, np.int32))
        submits.append(msgspec.structs.replace(submit, progress=progress if any(counts) else None))
    return submits


def run(seed: int, blocks: int, has_prefix_cache: bool, repeats_singly: bool) -> tuple[int, int, int]:
    """Returns the tokens of resumed requests that were found, the lives that found an unfinished block, and the blocks
    that the last life adopted."""
    chance, users, core, hits, tails = random.Random(seed), Users(random.Random(seed)), None, 0, 0
    for life in range(LIVES):
        config = {"has_prefix_cache": has_prefix_cache, "repeats_singly": repeats_singly}
        resumed = [] if core is None else open_requests(core)
        core = Core(random.Random(seed + life), blocks, failing=0.002, before=core, **config)
        core.submits.update({(submit.server, submit.request): submit for submit in resumed})
        for submit in resumed:
            core.submit(submit)
        users.number = 1000 * life
        first = users.number
        while users.number < first + REQUESTS:
            if chance.random() < 0.5:
                core.submit(users.submit())
            core.begin()
            if core.flights and (len(core.flights) == 2 or chance.random() < 0.5):
                core.finish()
        if life < LIVES - 1 and chance.random() < 0.5:
            core.scheduler.schedule(core.plan)  # blocks are taken, and the step is never sent
        hits += core.scheduler.resumed_found
        tails += core.scheduler.resumed_found % BLOCK_SIZE > 0
    core.drain()
    core.require_answers(seed)
    return hits, tails, core.scheduler.cache.num_adopted


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("has_prefix_cache", [True, False])
def test_lives_that_are_killed_read_no_wrong_block_and_answer(memory: str, has_prefix_cache: bool) -> None:
    hits = tails = adopted = 0
    for seed in range(tiers.SCHEDULER_SEEDS):
        more = run(seed, MEMORY[memory], has_prefix_cache, repeats_singly=seed % 2 == 1)
        hits, tails, adopted = hits + more[0], tails + more[1], adopted + more[2]
    assert hits > 10 * BLOCK_SIZE and tails > 0 and adopted > 0


@pytest.mark.parametrize("has_prefix_cache", [True, False])
def test_two_lives_with_an_inline_image_each_share_no_block_of_it(has_prefix_cache: bool) -> None:
    core, prompt = None, np.arange(2, 34, dtype=np.int32)
    for shown in (7, 8):
        core = Core(random.Random(1), 100, before=core, has_prefix_cache=has_prefix_cache)
        inputs = image(shown, BLOCK_SIZE, 5, has_key=False)
        core.submit(Submit(0, 1, prompt, SamplingParams(max_tokens=3), inputs=inputs))
        core.drain()  # the device knows what lies in each block
        adopted, cached = core.scheduler.cache.num_adopted, core.cached_tokens
    assert adopted >= prompt.size // BLOCK_SIZE and cached == (BLOCK_SIZE if has_prefix_cache else 0)


@pytest.mark.parametrize("has_begun", [False, True])
def test_prompt_with_logprobs_is_found_again_only_with_an_answer(has_begun: bool) -> None:
    """The log-probabilities of blocks that are found are not computed: they were delivered before the first id."""
    prompt = np.arange(2, 34, dtype=np.int32)
    params = SamplingParams(max_tokens=9, prompt_logprobs=0)
    submitted = SubmittedRequest(Submit(0, 1, prompt, params, name=b"n" * 16))
    killed = Core(random.Random(1), 100, max_num_batched_tokens=16)
    killed.submit(submitted.submit(1))
    for _ in range(3):
        killed.begin()
        killed.finish()
    if has_begun:
        submitted.add(0, killed.got[0, 1, 0])
    core = Core(random.Random(1), 100, before=killed, max_num_batched_tokens=16)
    core.submit(submitted.submit(2))
    core.drain()
    assert core.cached_tokens == (prompt.size if has_begun else 0)
