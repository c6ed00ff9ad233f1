"""Requests that were on their way when their group was lost. What is true of all traces: tests/property."""

import random

import msgspec
import numpy as np
import pytest

from penstock.engine.core.in_flight import StopConditions
from penstock.engine.core.request import HASH_NBYTES, Request, RequestRefused, Sample, build_request
from penstock.engine.core.step_builder import TokensBuilder
from penstock.engine.protocol.messages import FinishReason, Inputs, Progress, SamplingParams, Submit
from tests.property.device import BLOCK_SIZE, Core, answer, image, inputs_of
from tests.support.columns import ints

MAX_TOKENS = 12
BUDGET = {"max_num_batched_tokens": 40}


def submit(number: int, *counts: int, length: int = 10, arrived_ns: int = 0, **fields: object) -> Submit:
    """A request that has generated so many ids of each sample (-1: it is over); without counts, a new one."""
    prompt = np.array([100 + number, *range(2, length + 1)], np.int32)
    params = SamplingParams(n=max(1, len(counts)), max_tokens=MAX_TOKENS)
    for seed in range(1000):
        new = Submit(0, number, prompt, params, seed=seed, arrived_ns=arrived_ns, **fields)  # type: ignore[arg-type]
        answers = [answer(new, index) for index in range(params.n)]
        if all(len(ids) == MAX_TOKENS for ids in answers):
            break
    else:
        raise AssertionError("no seed gives long answers")
    generated = [token for ids, count in zip(answers, counts) for token in ids[: max(0, count)]]
    return msgspec.structs.replace(new, progress=Progress(ints(*counts), ints(*generated)) if counts else None)


def core(slots: int = 4, blocks: int = 100) -> Core:
    return Core(random.Random(1), blocks, slots, **BUDGET)


def finish(engine_core: Core) -> None:
    engine_core.drain()
    for owner, value in engine_core.got.items():
        assert value == answer(engine_core.submits[owner[:2]], owner[2])


def running(engine_core: Core) -> list[tuple[int, int]]:
    """Request and sample of each slot that runs."""
    rows = engine_core.schedule.rows
    return list(
        zip(engine_core.schedule.requests[rows].tolist(), engine_core.schedule.samples[rows].tolist(), strict=True)
    )


# ── what runs, and in which order ────────────────────────────────────────────────────────────────────────────────────
def test_resumed_sample_computes_generated_ids_with_its_prompt() -> None:
    engine_core = core()
    engine_core.submit(submit(1, 5))
    engine_core.begin()
    assert (
        engine_core.schedule.counts[0] == engine_core.schedule.computed[0] == 15 and engine_core.schedule.known[0] == 16
    )
    assert engine_core.schedule.prompts[0].size == 10 and engine_core.schedule.generated[0].size == 5
    engine_core.finish()
    assert len(engine_core.got[0, 1, 0]) == 6
    finish(engine_core)


@pytest.mark.parametrize(("is_kept", "counts"), [(True, [2, 1, 1]), (False, [12])])
def test_ids_after_the_last_kept_block_are_computed_singly(is_kept: bool, counts: list[int]) -> None:
    before = core()
    before.submit(submit(1))
    before.drain()  # the prompt of 10 ids has filled 2 blocks
    engine_core = Core(random.Random(1), 100, 4, before=before if is_kept else None, repeats_singly=True, **BUDGET)
    engine_core.submit(submit(1, 2))
    chunks = []
    while not chunks or not engine_core.schedule.sampled.size:
        engine_core.begin()
        chunks.append(int(engine_core.schedule.counts[0]))
        engine_core.finish()
    assert chunks == counts
    assert engine_core.scheduler.resumed_found == 12 - sum(counts) == 12 - engine_core.scheduler.resumed_computed
    finish(engine_core)


def test_finished_samples_get_no_slot_and_the_first_open_runs_the_prompt() -> None:
    engine_core = core()
    engine_core.submit(submit(1, -1, 3, -1, 0, 7))
    assert engine_core.scheduler.open_samples == 3
    engine_core.begin()
    assert running(engine_core) == [(1, 1)]
    engine_core.finish()
    engine_core.begin()
    assert set(running(engine_core)) == {(1, 1), (1, 3), (1, 4)}
    blocks = [engine_core.schedule.blocks_of(slot)[: 10 // BLOCK_SIZE].tolist() for slot in range(3)]
    assert blocks[0] == blocks[1] == blocks[2], "the prompt is computed once"
    assert engine_core.schedule.generated[2].size == 7
    engine_core.finish()
    finish(engine_core)


def test_started_requests_go_before_new_ones_by_first_arrival() -> None:
    engine_core = core(slots=1)
    engine_core.submit(submit(1))
    engine_core.submit(submit(2, 3, arrived_ns=20))
    engine_core.submit(submit(3, 3, arrived_ns=10))
    engine_core.submit(submit(4, priority=-1))
    engine_core.drain()
    assert [request for _, request, _ in engine_core.ended] == [4, 3, 2, 1]


def test_request_without_ids_goes_before_later_ones_of_its_client() -> None:
    engine_core = core(slots=1)
    for number, arrived_ns in ((1, 30), (2, 40)):
        engine_core.submit(submit(number, arrived_ns=arrived_ns, client="a"))
    engine_core.submit(submit(3, 0, arrived_ns=10, client="a"))
    engine_core.submit(submit(4, arrived_ns=20, client="a"))
    engine_core.drain()
    assert [request for _, request, _ in engine_core.ended] == [3, 4, 1, 2]


def test_queue_offers_one_started_request_per_client() -> None:
    engine_core = core(slots=1)
    queue = engine_core.scheduler._queue
    for number in range(1, 9):
        engine_core.submit(submit(number, 3, arrived_ns=number, client="ab"[number % 2]))
    assert len(queue._aside) == 2
    engine_core.begin()
    assert running(engine_core) == [(1, 0)] and len(queue._aside) <= 3
    engine_core.abort(0, 2)
    engine_core.abort(0, 3)
    engine_core.abort(0, 8)
    engine_core.finish()
    engine_core.drain()
    assert [request for _, request, _ in engine_core.ended if engine_core.ended[0, request, 0] == "done"] == [
        1,
        4,
        5,
        6,
        7,
    ]
    assert not queue._begun


def test_a_client_pays_once_for_its_prompt_and_for_what_was_generated() -> None:
    engine_core = core(slots=2)
    engine_core.submit(submit(1, 8, length=40, client="resumed"))
    engine_core.begin()
    engine_core.finish()
    charged = engine_core.scheduler._queue._requests._served
    assert charged["resumed"] == 0
    engine_core.submit(submit(2, length=12, client="new"))
    engine_core.begin()
    engine_core.finish()
    assert charged["new"] == 12
    finish(engine_core)


def test_resumed_sample_counts_neither_as_cache_query_nor_as_queued() -> None:
    engine_core = core()
    engine_core.submit(submit(1, 5))
    engine_core.begin()
    assert engine_core.scheduler.prefix_queries == 0 and engine_core.scheduler.admitted == []
    engine_core.finish()
    finish(engine_core)


def test_resumed_sample_is_not_timed_in_the_slot_of_an_aborted_one() -> None:
    engine_core = core(slots=1)
    engine_core.submit(submit(1))
    engine_core.begin()
    engine_core.abort(0, 1)
    engine_core.drain()
    engine_core.submit(submit(2, 5))
    engine_core.drain()
    assert engine_core.scheduler.answered == []


def test_blocks_of_generated_ids_are_found_by_hash() -> None:
    engine_core = core()
    whole = submit(1)
    engine_core.submit(whole)
    engine_core.drain()
    engine_core.submit(msgspec.structs.replace(submit(1, 9), request=2))
    engine_core.begin()
    assert engine_core.schedule.computed[0] - engine_core.schedule.counts[0] == (10 + 9 - 1) // BLOCK_SIZE * BLOCK_SIZE
    engine_core.finish()
    finish(engine_core)


# ── refused ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_progress_that_leaves_no_token_to_go_is_refused_with_the_numbers() -> None:
    engine_core = core()
    full = Progress(ints(MAX_TOKENS), ints(*range(2, 2 + MAX_TOKENS)))
    with pytest.raises(RequestRefused, match="expected less than 12 generated ids of an open sample, got 12"):
        engine_core.scheduler.submit(msgspec.structs.replace(submit(1), progress=full))
    prompt = np.arange(55, dtype=np.int32)
    long = msgspec.structs.replace(submit(1), prompt=prompt, progress=Progress(ints(5), ints(*range(2, 7))))
    with pytest.raises(RequestRefused, match="expected less than 5 generated ids of an open sample, got 5"):
        engine_core.scheduler.submit(long)
    assert engine_core.scheduler.open_requests == engine_core.scheduler.open_samples == 0


def test_generated_ids_that_the_model_does_not_have_are_refused() -> None:
    engine_core = Core(random.Random(1), 100, 4, max_num_batched_tokens=40, vocabulary=200)
    with pytest.raises(RequestRefused, match="expected ids from 0 to 199 in the progress"):
        engine_core.scheduler.submit(msgspec.structs.replace(submit(1), progress=Progress(ints(1), ints(200))))


# ── the pieces ───────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("inputs", [None, image(7, 8, 2)], ids=["text", "image"])
@pytest.mark.parametrize("count", [1, 2, 3, 11])
def test_hashes_of_generated_ids_equal_those_of_a_prompt_of_the_same_ids(count: int, inputs: Inputs | None) -> None:
    resumed = msgspec.structs.replace(submit(1, count), inputs=inputs)
    keys = tuple((b"key", position, length) for _, position, length in inputs_of(resumed))
    sample = Request(resumed, BLOCK_SIZE, arrival=(0, 1), salt=b"s", keys=keys).samples[0]
    assert resumed.progress is not None
    prompt = np.concatenate((resumed.prompt, resumed.progress.ids))
    whole = msgspec.structs.replace(resumed, prompt=prompt, progress=None)
    assert sample.chain == Request(whole, BLOCK_SIZE, arrival=(0, 2), salt=b"s", keys=keys).chain
    assert len(sample.chain) == HASH_NBYTES * (1 + (10 + count) // BLOCK_SIZE)
    assert sample.num_tokens == 10 + count and sample.ids.tolist() == prompt.tolist()


@pytest.mark.parametrize("has_prefix_cache", [True, False])
def test_equal_numbers_in_two_lives_of_a_core_share_no_block(has_prefix_cache: bool) -> None:
    inputs = [image(7, 8, 2, has_key=False), image(8, 8, 2, has_key=False)] if has_prefix_cache else [None, None]
    submits = [submit(1, length=40, inputs=value) for value in inputs]
    first, second = (build_request(value, BLOCK_SIZE, 1, 0, has_prefix_cache, None).chain for value in submits)
    shared = 1 + 8 // BLOCK_SIZE if has_prefix_cache else 0  # the root, and blocks before the image
    hashes = [first[at : at + HASH_NBYTES] for at in range(0, len(first), HASH_NBYTES)]
    others = [second[at : at + HASH_NBYTES] for at in range(0, len(second), HASH_NBYTES)]
    assert hashes[:shared] == others[:shared] and set(hashes[shared:]).isdisjoint(others)
    resumed = msgspec.structs.replace(submits[0], request=5)
    assert build_request(resumed, BLOCK_SIZE, 9, 0, has_prefix_cache, None).chain == first


def test_generated_ids_count_for_max_tokens_and_min_tokens() -> None:
    ends = StopConditions(2, 100, {1})
    ends.join(0, SamplingParams(max_tokens=6), 10, 4)
    ends.join(1, SamplingParams(max_tokens=9, min_tokens=5), 10, 4)
    both = np.array([0, 1])
    assert ends.check(both, ints(7, 1)) == []
    first, second = ends.check(both, ints(7, 1))
    assert (first.slot, first.reason) == (0, FinishReason.LENGTH)
    assert (second.slot, second.reason) == (1, FinishReason.STOP)


def test_output_gets_the_generated_ids_and_the_context_of_the_prompt() -> None:
    builder = TokensBuilder(8, 1)
    sample: Sample = Request(submit(3, -1, 2), 4, arrival=(0, 1)).samples[1]
    builder.start(sample, 5)
    ((_, tokens),) = builder.build_started()
    (started,) = tokens.started
    assert started.generated == tuple(sample.generated.tolist()) and len(started.generated) == 2
    assert started.context == (3, 4, 5, 6, 7, 8, 9, 10) and (started.sample, started.cached) == (1, 0)
