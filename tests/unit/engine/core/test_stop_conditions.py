"""What ends a sample by its ids or its length."""

import random
from typing import Any

import numpy as np
import pytest

from penstock.engine.core.in_flight import BUCKETS, StopConditions
from penstock.engine.protocol.messages import FinishReason, SamplingParams

EOS, OTHER_EOS = 2, 7
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def endings(slots: int = 4, max_model_len: int = 100) -> StopConditions:
    return StopConditions(slots, max_model_len, (EOS, OTHER_EOS))


def find_ends(of: StopConditions, slots: list[int], ids: list[int]) -> list[tuple[int, int, int | None]]:
    """The ends, each with the row that it is of."""
    ended = of.check(np.array(slots, np.intp), np.array(ids, np.int32))
    return [(slots.index(end.slot), end.reason, end.stop) for end in ended]


def when(params: SamplingParams, ids: list[int], prompt_length: int = 10) -> tuple[int, int, int | None] | None:
    """After how many of these ids one sample ends, and why."""
    conditions = endings()
    conditions.join(1, params, prompt_length)
    for count, last in enumerate(ids, 1):
        for _, reason, stop in find_ends(conditions, [1], [last]):
            return count, reason, stop
    return None


def test_an_end_id_of_the_model_ends_a_sample_and_is_no_stop_of_its_own() -> None:
    assert when(SamplingParams(), [5, EOS, 5]) == (2, STOP, None)
    assert when(SamplingParams(), [5, 5, OTHER_EOS]) == (3, STOP, None)
    assert when(SamplingParams(stop_token_ids=(EOS,)), [EOS]) == (1, STOP, None)


def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"less than 100 tokens.*got 100"):
        endings().join(0, SamplingParams(), 100)


def test_ended_samples_and_free_slots_do_not_end_again() -> None:
    conditions = endings()
    conditions.join(0, SamplingParams(), 10)
    assert find_ends(conditions, [0, 3], [EOS, EOS]) == [(0, STOP, None)]
    assert find_ends(conditions, [0, 3], [EOS, EOS]) == []
    conditions.join(1, SamplingParams(), 10)
    conditions.end(1)
    assert find_ends(conditions, [1], [EOS]) == []


def test_next_sample_of_a_slot_has_none_of_the_former_conditions() -> None:
    conditions = endings()
    conditions.join(0, SamplingParams(max_tokens=3, stop_token_ids=(9,)), 10)
    assert find_ends(conditions, [0], [5]) == []
    conditions.leave(0)
    conditions.join(0, SamplingParams(max_tokens=3), 10)
    assert find_ends(conditions, [0], [9]) == [] and find_ends(conditions, [0], [5]) == []
    assert find_ends(conditions, [0], [5]) == [(0, LENGTH, None)]


@pytest.mark.parametrize("stop", [9 + BUCKETS, -1, 1 << 40])
def test_stop_ids_with_equal_low_bits_differ_and_impossible_ids_are_safe(stop: int) -> None:
    assert when(SamplingParams(stop_token_ids=(stop,)), [9, BUCKETS - 1, 0]) is None


@pytest.mark.parametrize("seed", range(20))
def test_many_slots_together_end_as_each_would_alone(seed: int) -> None:
    chance = random.Random(seed)
    every = [
        SamplingParams(
            max_tokens=chance.choice([None, 30, 60]),
            min_tokens=chance.choice([0, 0, 5, 20]),
            stop_token_ids=tuple(chance.sample(range(40), chance.choice([0, 0, 1, 3]))),
            ignore_eos=chance.random() < 0.3,
        )
        for _ in range(32)
    ]
    streams = [[chance.randrange(40) for _ in range(100)] for _ in every]
    together = endings(len(every))
    for slot, params in enumerate(every):
        together.join(slot, params, 10 + slot)
    ends: dict[int, tuple[int, int, int | None]] = {}
    for _ in range(100):
        slots = sorted(chance.sample(range(32), 20))
        ids = [streams[slot][together.generated[slot]] for slot in slots if together.generated[slot] < 100]
        slots = [slot for slot in slots if together.generated[slot] < 100]
        for row, reason, stop in find_ends(together, slots, ids):
            assert slots[row] not in ends
            ends[slots[row]] = int(together.generated[slots[row]]), reason, stop
    assert len(ends) > 16
    for slot, end in ends.items():
        assert end == when(every[slot], streams[slot], 10 + slot)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"allowed_token_ids": (50, -1)}, r"an id below 50 at \$.allowed_token_ids"),
        ({"allowed_token_ids": (EOS, OTHER_EOS), "min_tokens": 3}, "min_tokens is 3: all 2 are end ids"),
        ({"allowed_token_ids": (9, EOS), "stop_token_ids": (9,), "min_tokens": 1}, "that does not end the answer"),
        ({"allowed_token_ids": (9, 99), "stop_token_ids": (9,), "min_tokens": 1}, "that does not end the answer"),
    ],
)
def test_allowed_ids_that_all_end_before_min_tokens_are_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        SamplingParams(**fields).require_choice((EOS, OTHER_EOS), 50)


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 3, "stop_token_ids": (9,)},
        {"allowed_token_ids": (EOS, OTHER_EOS)},
        {"allowed_token_ids": (EOS,), "min_tokens": 3, "ignore_eos": True},
        {"allowed_token_ids": (9, 8), "stop_token_ids": (9,), "min_tokens": 3},
    ],
)
def test_allowed_ids_with_a_first_token_are_accepted(fields: dict[str, Any]) -> None:
    SamplingParams(**fields).require_choice((EOS, OTHER_EOS), 50)
