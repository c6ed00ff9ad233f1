"""The scheduler, one decision after the other. What is true of all traces: tests/property/test_scheduler.py."""

import random

import numpy as np
import pytest

from penstock import DecodeError
from penstock.engine.core.request import HASH_NBYTES, Request, RequestRefused, build_request
from penstock.engine.core.request_queue import MAX_STALE, OLDEST_EVERY, FairQueue
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.core.scheduler_config import SchedulerConfig
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.columns import PREEMPTED
from penstock.engine.protocol.messages import SamplingParams, StepDone, Submit
from tests.property.device import BLOCK_SIZE, EOS, MAX_MODEL_LEN, Core, answer, image


def core(blocks: int = 100, slots: int = 4, budget: int = 40, **config: int) -> Core:
    return Core(random.Random(1), blocks, slots, max_num_batched_tokens=budget, **config)


def submit(number: int, length: int = 10, most: int = 30, *, n: int = 1, begin: int = 0, **fields: object) -> Submit:
    """Prompts are 2, 3, 4, …, after a first id of its own, unless `begin` says another. Long answers, mostly."""
    prompt = np.array([begin or 100 + number, *range(2, length + 1)], np.int32)
    params = SamplingParams(n=n, max_tokens=most)
    return Submit(0, number, prompt, params, **{"seed": number, **fields})  # type: ignore[arg-type]


def patient(number: int, length: int = 10, **fields: object) -> Submit:
    for seed in range(1000):
        candidate = submit(number, length, seed=seed, **fields)  # type: ignore[arg-type]
        if all(EOS not in answer(candidate, index) for index in range(candidate.params.n)):
            return candidate
    raise AssertionError("no seed gives a long answer")


def running(engine_core: Core) -> list[int]:
    return engine_core.schedule.requests[engine_core.schedule.rows].tolist()


def steps(engine_core: Core, count: int) -> None:
    for _ in range(count):
        engine_core.begin()
        engine_core.finish()


# ── what runs ────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("options", "lengths", "counts"),
    [
        ({"budget": 16}, (30, 30), [[1, 15, 0], [1, 15, 0], [1, 1, 14], [1, 1, 14], [1, 1, 2]]),
        (
            {"slots": 5, "full_step_tokens": 16},
            (10, 10, 10, 30),
            [[1, 10, 10, 0, 0], [1, 1, 1, 10, 27], [1, 1, 1, 1, 3]],
        ),
    ],
    ids=["budget", "full step"],
)
def test_decodes_go_first_and_prompts_fill_the_rest_of_a_step(
    options: dict[str, int], lengths: tuple[int, ...], counts: list[list[int]]
) -> None:
    engine_core = core(**options)
    engine_core.submit(patient(1, 8))
    steps(engine_core, 1)
    for number, length in enumerate(lengths, start=2):
        engine_core.submit(patient(number, length))
    for expected in counts:
        steps(engine_core, 1)
        assert engine_core.schedule.counts[: len(expected)].tolist() == expected
    engine_core.drain()


def test_prompts_that_must_be_whole_wait_for_a_step_with_room() -> None:
    engine_core = core(slots=5, budget=40, computes_whole=True)
    for number, length in enumerate((30, 20, 38, 2), start=1):
        engine_core.submit(submit(number, length, 1))
    counts = []
    for _ in range(3):
        steps(engine_core, 1)
        counts.append(sorted(filter(None, engine_core.schedule.counts.tolist())))
    assert counts == [[30], [20], [2, 38]]
    engine_core.drain()


def most_computed(engine_core: Core) -> int:
    """Of the only request, how many tokens were computed before it left."""
    most = 0
    while engine_core.begin() or engine_core.flights:
        most = max(most, int(engine_core.schedule.computed.max()))
        while engine_core.begin():
            most = max(most, int(engine_core.schedule.computed.max()))
        engine_core.finish()
    return most


def test_end_by_id_discards_one_token_and_end_by_length_none() -> None:
    ending = next(request for request in map(submit, range(1000)) if 3 <= len(answer(request, 0)) < 30)
    for has_overlap in (True, False):
        by_length, by_id = core(has_overlap=has_overlap), core(has_overlap=has_overlap)
        by_length.submit(patient(1, most=3))
        by_id.submit(ending)
        assert most_computed(by_length) == 10 + 3 - 1 and len(by_length.got[0, 1, 0]) == 3
        assert most_computed(by_id) == 10 + len(answer(ending, 0)) - 1 + has_overlap


def test_a_result_of_another_step_is_refused_and_changes_nothing() -> None:
    engine_core = core()
    engine_core.submit(patient(1))
    engine_core.begin()
    with pytest.raises(DecodeError, match=r"expected step 1 to be done, got 2 at \$\.number"):
        engine_core.scheduler.on_result(StepDone(1, 2, np.zeros(1, np.int32)))
    with pytest.raises(DecodeError, match=r"expected 1 numbers, got .* at \$\.ids"):
        engine_core.scheduler.on_result(StepDone(1, 1, np.zeros(2, np.int32)))
    engine_core.drain()
    with pytest.raises(DecodeError, match="expected no step to be done"):
        engine_core.scheduler.on_result(StepDone(1, 2, np.zeros(1, np.int32)))


def test_blocks_are_allocated_for_many_at_once_and_most_steps_have_none() -> None:
    engine_core = core()
    engine_core.submit(patient(1, 8))
    engine_core.submit(patient(2, 9))
    engine_core.begin()
    gained = []
    for _ in range(9):
        before = engine_core.schedule.block_counts[:2].tolist()
        engine_core.begin()
        engine_core.finish()
        gained.append((engine_core.schedule.block_counts[:2] - before).tolist())
    assert gained == [[1, 0], [0, 0], [0, 0], [1, 1], [0, 0], [0, 0], [0, 0], [1, 1], [0, 0]]
    engine_core.drain()


# ── the prefix cache ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_another_salt_another_image_or_one_elsewhere_is_another_prefix() -> None:
    engine_core = core(slots=6)
    for number, fields in enumerate(
        (
            {},
            {"salt": b"s"},
            {"inputs": image(1, 1, 3)},
            {"inputs": image(2, 1, 3)},
            {"inputs": image(1, 0, 3)},
            {"inputs": image(1, 1, 3, has_key=False)},
            {"inputs": image(1, 1, 3, has_key=False)},
        )
    ):
        engine_core.submit(submit(number, 12, 1, begin=7, **fields))
        engine_core.drain()
    assert engine_core.cached_tokens == 0
    engine_core.submit(submit(9, 12, 1, begin=7, inputs=image(2, 1, 3)))
    engine_core.drain()
    assert engine_core.cached_tokens == 8


def test_the_prefix_cache_is_asked_once_for_each_sample_that_is_admitted() -> None:
    engine_core = core(blocks=15)
    for number in (1, 2):
        engine_core.submit(patient(number, 16))
    while not engine_core.preempted:
        steps(engine_core, 1)
    while PREEMPTED in engine_core.schedule.status:  # it is looked up anew, and not counted
        steps(engine_core, 1)
    assert (engine_core.scheduler.prefix_queries, engine_core.scheduler.prefix_hits) == (32, 0)
    engine_core.drain()
    engine_core.submit(submit(3, 12, 1, begin=7))
    engine_core.drain()
    engine_core.submit(submit(4, 12, 1, begin=7, n=2))
    engine_core.drain()
    assert (engine_core.scheduler.prefix_queries, engine_core.scheduler.prefix_hits) == (32 + 3 * 12, 2 * 8)


def test_without_a_prefix_cache_nothing_is_asked_of_it() -> None:
    engine_core = core(has_prefix_cache=False)
    engine_core.submit(submit(1, 12, 1, n=2))
    engine_core.drain()
    assert (engine_core.scheduler.prefix_queries, engine_core.scheduler.prefix_hits) == (0, 0)


def test_each_sample_that_gets_a_slot_says_when_its_request_came() -> None:
    engine_core = core(slots=2, blocks=15)
    engine_core.scheduler.submit(patient(1, 16), 70)
    engine_core.scheduler.submit(patient(2, 16, n=2), 80)
    assert (engine_core.scheduler.open_samples, engine_core.schedule.rows.size, engine_core.scheduler.admitted) == (
        3,
        0,
        [],
    )
    assert engine_core.scheduler.schedule(engine_core.plan)
    assert [sample.request.queued_ns for sample in engine_core.scheduler.admitted] == [70, 80]


def test_samples_are_answered_once_and_end_once() -> None:
    """The core's loop times them. A sample that was aborted before its first token is neither."""
    engine_core = core(slots=2, blocks=40)
    scheduler = engine_core.scheduler
    for number, length in ((1, 16), (2, 16), (3, 16)):
        engine_core.submit(submit(number, length, 3))
    engine_core.begin()
    engine_core.abort(0, 2)
    engine_core.drain()
    for samples in (scheduler.answered, scheduler.ended):
        assert [sample.request.number for sample in samples] == [1, 3]


# ── n ────────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_samples_of_one_request_share_the_full_blocks_of_its_prompt() -> None:
    engine_core = core()
    engine_core.submit(patient(1, 10, n=3))
    engine_core.begin()
    assert running(engine_core) == [1]
    engine_core.finish()
    engine_core.begin()
    assert running(engine_core) == [1, 1, 1] and engine_core.schedule.samples[:3].tolist() == [0, 1, 2]
    tables = [engine_core.schedule.blocks_of(slot).tolist() for slot in range(3)]
    assert len({tuple(table[:2]) for table in tables}) == 1 and len({table[2] for table in tables}) == 3
    assert engine_core.schedule.prompts[2] is engine_core.schedule.prompts[0]
    engine_core.drain()


# ── too little room ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_lowest_priority_then_latest_is_preempted_without_blocks() -> None:
    engine_core = core(blocks=15)
    for number, priority in ((1, 0), (2, 5), (3, 0)):
        engine_core.submit(patient(number, 16, priority=priority))
    while not engine_core.preempted:
        steps(engine_core, 1)
    assert running(engine_core) == [1, 3]
    while engine_core.preempted == 1:
        steps(engine_core, 1)
    assert running(engine_core) == [1]
    engine_core.drain()
    assert len(engine_core.answers()) == 3


def test_preempted_sample_hits_the_prefix_cache_when_it_is_resumed() -> None:
    engine_core = core(blocks=15)
    engine_core.submit(patient(1, 16, most=20))
    engine_core.submit(patient(2, 16))
    while not engine_core.preempted:
        steps(engine_core, 1)
    had = engine_core.cached_tokens
    while PREEMPTED in engine_core.schedule.status:
        steps(engine_core, 1)
    assert engine_core.cached_tokens > had
    engine_core.drain()


def test_sample_is_preempted_for_a_better_priority_not_for_an_equal() -> None:
    for priority, expected in ((0, [1]), (-1, [2])):
        engine_core = core(blocks=15)
        engine_core.submit(patient(1, 24))
        steps(engine_core, 3)
        engine_core.submit(patient(2, 40, most=5, priority=priority))
        steps(engine_core, 2)
        assert running(engine_core) == expected
        engine_core.drain()


# ── order ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_worst_priority_is_admitted_while_better_ones_keep_coming() -> None:
    engine_core = core(slots=1)
    engine_core.submit(submit(1, 5, 1, priority=9))
    for number in range(2, 4 * OLDEST_EVERY):
        engine_core.submit(submit(number, 5, 1, priority=-9))
        steps(engine_core, 1)
        if (0, 1, 0) in engine_core.ended:
            break
    assert engine_core.ended[0, 1, 0] == "done" and number <= 2 * OLDEST_EVERY
    engine_core.drain()


def test_a_client_of_many_requests_does_not_keep_another_waiting() -> None:
    engine_core = core(slots=1)
    for number in range(1, 7):
        engine_core.submit(submit(number, 5, 1, client="many"))
    steps(engine_core, 1)
    engine_core.submit(submit(9, 5, 1, client="few"))
    steps(engine_core, 3)
    assert list(engine_core.ended)[:3] == [(0, 1, 0), (0, 9, 0), (0, 2, 0)]
    engine_core.drain()


def test_clients_get_alike_many_tokens_and_not_alike_many_requests() -> None:
    queue = FairQueue()
    prompt, params = np.ones(4, np.int32), submit(1).params
    for number in range(400):
        queue.push(
            Request(
                Submit(0, number, prompt, params, client="long" if number < 200 else "short"), 4, arrival=(0, number)
            )
        )
    served = {"long": 0, "short": 0}
    requests = {"long": 0, "short": 0}
    for _ in range(110):
        first = queue.first()
        assert first is not None
        queue.take(first)
        tokens = 100 if first.client == "long" else 10
        queue.charge(first.client, tokens)
        served[first.client] += tokens
        requests[first.client] += 1
    assert abs(served["long"] - served["short"]) <= 100 and requests["short"] > 8 * requests["long"]


def test_client_saves_up_nothing_while_it_is_idle() -> None:
    queue = FairQueue()
    prompt, params = np.ones(4, np.int32), submit(1).params

    def turn(number: int) -> str:
        first = queue.first()
        assert first is not None
        queue.take(first)
        queue.charge(first.client, 10)
        queue.push(Request(Submit(0, number, prompt, params, client=first.client), 4, arrival=(0, number)))
        return first.client

    for number, client in enumerate(("a", "b")):
        queue.push(Request(Submit(0, number, prompt, params, client=client), 4, arrival=(0, number)))
    for number in range(2, 50):
        turn(number)
    queue.push(Request(Submit(0, 50, prompt, params, client="late"), 4, arrival=(0, 50)))
    turns = [turn(number) for number in range(51, 63)]
    assert 3 <= turns.count("late") <= 5


def test_a_queue_forgets_aborted_requests_while_an_old_one_waits() -> None:
    """Clients and priorities are named by strangers: neither the heaps nor the maps may grow with them."""
    queue = FairQueue()
    prompt, params = np.ones(4, np.int32), submit(1).params

    def push(number: int, client: str, priority: int) -> Request:
        sent = Submit(0, number, prompt, params, client=client, priority=priority)
        queue.push(request := Request(sent, 4, arrival=(0, number)))
        return request

    old = push(0, "old", -1)
    for number in range(1, 4 * MAX_STALE):
        client = f"client {number}"
        queue.drop(push(number, client, number))
        queue.close(client)
    assert queue.first() is old and len(queue) == 1
    for container in (queue._by_age, queue._levels, queue._priorities):
        assert len(container) <= MAX_STALE + 3
    oldest = push(-1, "old", -1)
    queue.drop(old)
    assert queue.first() is oldest


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_request_is_aborted_wherever_it_is() -> None:
    engine_core = core(slots=2, blocks=15)
    for number in (1, 2, 3):
        engine_core.submit(patient(number, 16, n=2 if number == 1 else 1))
    engine_core.begin()
    engine_core.abort(0, 3)  # it waits
    engine_core.abort(0, 1)  # its first sample is in flight, the other waits for its prompt
    engine_core.finish()
    assert running(engine_core) == [1, 2]
    steps(engine_core, 1)
    assert running(engine_core) == [2] and not engine_core.got[0, 1, 0]
    engine_core.abort(0, 7)  # an unknown request
    engine_core.abort(0, 2)
    engine_core.drain()
    assert set(engine_core.ended.values()) == {"aborted"}


def test_abort_of_an_ended_sample_leaves_the_new_owner_of_its_slot() -> None:
    engine_core = core(slots=1)
    engine_core.submit(patient(1, most=2))
    engine_core.submit(patient(2))
    steps(engine_core, 4)
    assert running(engine_core) == [2]
    engine_core.stop((0, 1, 0))
    engine_core.stop((0, 2, 1))  # it has one sample
    steps(engine_core, 2)
    assert running(engine_core) == [2]
    engine_core.stop((0, 2, 0))
    steps(engine_core, 1)
    assert not running(engine_core)
    engine_core.drain()


def test_request_that_can_never_run_is_refused_with_the_numbers() -> None:
    engine_core = core()
    for wrong, status, why in (
        (submit(1, MAX_MODEL_LEN), 400, f"1 to {MAX_MODEL_LEN - 1} tokens, got {MAX_MODEL_LEN}"),
        (Submit(0, 1, np.zeros(0, np.int32), submit(1).params), 400, "got 0"),
        (Submit(0, 1, np.array([3, -1], np.int32), submit(1).params), 400, "ids from 0 to"),
        (submit(1, 12, inputs=image(1, 9, 9)), 400, "within a prompt of 12 tokens, got 9 at 9"),
        (
            Submit(0, 1, np.array([3], np.int32), SamplingParams(min_tokens=1, allowed_token_ids=(EOS,))),
            400,
            "allowed_token_ids that does not end the answer, as min_tokens is 1",
        ),
    ):
        with pytest.raises(RequestRefused, match=why) as refused:
            engine_core.scheduler.submit(wrong)
        assert refused.value.status == status
    engine_core.submit(submit(1))
    with pytest.raises(RequestRefused, match="is open already") as refused:
        engine_core.scheduler.submit(submit(1))
    assert (
        refused.value.status == 409 and engine_core.scheduler.open_requests == engine_core.scheduler.open_samples == 1
    )
    engine_core.drain()


def test_config_under_which_a_request_could_never_run_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 2 to 60, which fit, got 61"):
        Scheduler(BatchState(4, 15, 4), SchedulerConfig(max_model_len=61))
    with pytest.raises(ValueError, match="a token for each of 64 slots, got 63"):
        Scheduler(BatchState(64, 15, 4), SchedulerConfig(max_model_len=60, max_num_batched_tokens=63))


# ── LoRA adapters ────────────────────────────────────────────────────────────────────────────────────────────────────
ADAPTERS = [bytes([number]) * 32 for number in range(3)]


def test_batch_has_at_most_max_loras_adapters() -> None:
    engine_core = core(max_loras=2)
    engine_core.scheduler.adapter_errors |= dict.fromkeys(ADAPTERS, "")
    for number, adapter in enumerate((ADAPTERS[0], ADAPTERS[1], ADAPTERS[2], ADAPTERS[0])):
        engine_core.submit(patient(number, adapter=adapter))
    steps(engine_core, 1)
    assert running(engine_core) == [0, 1]  # the third would be one adapter too many, and the fourth is behind it
    engine_core.abort(0, 0)
    steps(engine_core, 2)
    assert sorted(running(engine_core)) == [1, 2]
    engine_core.abort(0, 1)
    engine_core.drain()


def test_request_for_an_unknown_adapter_is_refused() -> None:
    engine_core = core()
    engine_core.scheduler.adapter_errors |= {ADAPTERS[0]: "", ADAPTERS[1]: "the LoRA adapter 'sql' has other files"}
    for adapter, words in ((ADAPTERS[2], "no LoRA adapter of this content"), (ADAPTERS[1], "'sql' has other files")):
        with pytest.raises(RequestRefused, match=words):
            engine_core.submit(submit(0, adapter=adapter))
    engine_core.submit(submit(0, adapter=ADAPTERS[0]))


def test_no_salt_shares_blocks_with_an_adapter() -> None:
    def root(**fields: object) -> bytes:
        return build_request(submit(0, **fields), BLOCK_SIZE, 0, 0, True, None).chain[:HASH_NBYTES]  # type: ignore[arg-type]

    salts = [b"", ADAPTERS[0], ADAPTERS[0] + b"s", b"a" + ADAPTERS[0] + b"s"]
    roots = [*(root(salt=salt) for salt in salts), *(root(adapter=ADAPTERS[0], salt=salt) for salt in salts)]
    assert len(set(roots)) == 8 and root(adapter=ADAPTERS[0]) == root(adapter=ADAPTERS[0])
