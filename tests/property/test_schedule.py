"""The schedule against dicts and lists: random traces with all that can happen on the wire, and broken steps."""

import copy
import random
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.codec import FrameDecoder
from penstock.codec.sequence import SequenceCheck
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.messages import Begin, SamplingParams, Step
from penstock.errors import DecodeError, OutOfStep
from tests import tiers
from tests.property.plain import (
    BLOCK_SIZE,
    BLOCKS,
    CATALOGUE,
    SLOTS,
    Life,
    Plain,
    Refused,
    Wire,
    decode,
    shown,
    small_schedule,
)

STEPS = 5_000


class Group:
    """A core and a worker behind a wire that loses, repeats, mutilates and keeps back what it likes."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.life, self.wire, self.decoder = Life(chance), Wire(), FrameDecoder(CATALOGUE)
        self.leader, self.number = chance.getrandbits(32), 0
        self.worker, self.sequence = small_schedule(), SequenceCheck()
        self.sequence.begin(Begin(self.leader, 0, SLOTS, BLOCKS, BLOCK_SIZE))
        self.had: list[bytes] = []  # what went over the wire not long ago

    def next_frame(self) -> bytes:
        self.life.decide()
        self.number += 1
        step = self.life.plan.build(self.leader, self.number)
        self.life.schedule.apply(step)
        return self.wire.frame(step)

    def arrivals(self, frame: bytes, foreign: bytes) -> tuple[str, list[bytes]]:
        """What the wire does, and what arrives when this is sent."""
        self.had = [*self.had[-20:], frame]
        what = self.chance.random()
        if what > 0.02:
            return "sent", [frame]
        return self.chance.choice(
            [
                ("lost", []),
                ("repeated", [frame, frame]),
                ("old", [self.chance.choice(self.had), frame]),
                ("foreign", [foreign, frame]),
                ("cut", [frame[: self.chance.randrange(len(frame))]]),
            ]
        )

    def take(self, frame: bytes) -> None:
        step = decode(frame, self.decoder)
        self.sequence.check(step)
        self.worker.apply(step)


@pytest.mark.parametrize("seed", range(tiers.SCHEDULE_SEEDS))
def test_worker_equals_its_core_or_is_out_of_step_at_the_next_step(seed: int) -> None:
    chance = random.Random(seed)
    group, happened, noticed = Group(chance), Counter[str](), Counter[str]()
    foreign = Wire().frame(Step(chance.getrandbits(32), 3))
    is_missing = False  # a step that the worker has not got
    for number in range(STEPS):
        what, frames = group.arrivals(group.next_frame(), foreign)
        happened[what] += 1
        try:
            for frame in frames:
                group.take(frame)
        except (OutOfStep, DecodeError) as error:
            assert what != "sent" or is_missing, f"step {number} was in step: {error}"
            noticed[what] += 1
            group, is_missing = Group(chance), False  # a group lives and dies as one
            continue
        is_missing = not frames
        assert is_missing or group.sequence._expected == (group.leader, group.number + 1), f"missed a step at {number}"
        if number % 16 == 0 and not is_missing:
            assert shown(group.worker) == shown(group.life.schedule) == group.life.plain.contents()
    assert len(happened) == 6 and noticed["sent"] and noticed["foreign"] and noticed["cut"], (happened, noticed)


# ── broken steps ─────────────────────────────────────────────────────────────────────────────────────────────────────
def arrays_of(message: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    paths = []
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if isinstance(value, np.ndarray):
            paths.append((*path, name))
        elif isinstance(value, msgspec.Struct) and not isinstance(value, SamplingParams):
            paths += arrays_of(value, (*path, name))
    return paths


def replaced(message: Any, path: tuple[str, ...], value: Any) -> Any:
    name, *rest = path
    if rest:
        value = replaced(getattr(message, name), tuple(rest), value)
    return msgspec.structs.replace(message, **{name: value})


def broken(column: Any, chance: random.Random) -> Any:
    """The column with one thing wrong, or right in another way."""
    values = column.tolist()
    kind = chance.randrange(6)
    at = chance.randrange(len(values)) if values else 0
    if kind == 0 and values:
        values[at] = chance.choice((0, 1, SLOTS - 1, SLOTS, 499, 500, 65535))
    elif kind == 1 and values:
        values[at] = chance.choice((-1, -(2**31), 2**31 - 1)) if column.dtype == np.int32 else 65535
    elif kind == 2 and values:
        del values[at]
    elif kind == 3:
        values.insert(at, chance.choice(values) if values else 0)
    elif kind == 4 and values:
        values[at] = max(0, values[at] + chance.choice((-1, 1)))
    else:
        chance.shuffle(values)
        if chance.random() < 0.2:
            return np.array(values, column.dtype).reshape(1, -1)
    return np.array(values, column.dtype)


def test_a_broken_step_is_refused_and_changes_nothing_or_does_what_it_says() -> None:
    chance = random.Random(4711)
    outcomes: Counter[str] = Counter()
    for _ in range(tiers.BROKEN_STEPS):
        life, number = Life(chance), 0
        for _ in range(60):
            number += 1
            before, state = life.plain.copy(), copied(life.schedule)
            life.decide()
            step = life.plan.build(1, number)
            paths = arrays_of(step)
            for _ in range(4 if paths else 0):
                path = chance.choice(paths)
                column = step
                for name in path:
                    column = getattr(column, name)
                wrong = replaced(step, path, broken(column, chance))
                outcomes[check_alike(before, copied(state), decode(Wire().frame(wrong)))] += 1
            life.schedule.apply(step)
    assert min(outcomes["refused"], outcomes["applied"]) > 1000 / 60 * tiers.BROKEN_STEPS, outcomes


def test_damaged_frame_is_refused_or_applied_as_decoded() -> None:
    chance = random.Random(4712)
    outcomes: Counter[str] = Counter()
    for _ in range(tiers.BROKEN_STEPS):
        life = Life(chance)
        for number in range(1, 60):
            before, state = life.plain.copy(), copied(life.schedule)
            life.decide()
            step = life.plan.build(1, number)
            frame = Wire().frame(step)
            for _ in range(4):
                flipped = bytearray(frame)
                for _ in range(chance.randint(1, 3)):
                    flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
                try:
                    wrong = decode(bytes(flipped))
                except DecodeError:
                    outcomes["no message"] += 1
                    continue
                if isinstance(wrong, Step):
                    outcomes[check_alike(before, copied(state), wrong)] += 1
            life.schedule.apply(step)
    assert min(outcomes.values()) > 100 / 40 * tiers.BROKEN_STEPS and len(outcomes) == 3, outcomes


def copied(schedule: BatchState) -> BatchState:
    copied = small_schedule()
    vars(copied).update({name: copy.copy(value) for name, value in vars(schedule).items()})
    return copied


def check_alike(before: Plain, schedule: BatchState, step: Step) -> str:
    try:
        then = before.apply(step)
    except Refused:
        then = None
    try:
        schedule.apply(step)
    except DecodeError as error:
        assert then is None, f"refused a good step: {error}"
        assert " at $" in str(error)
        assert shown(schedule) == before.contents(), "a refused step has left its traces"
        return "refused"
    assert then is not None, "applied a step that must be refused"
    assert shown(schedule) == then.contents()
    return "applied"


def test_a_thousand_different_parameters_travel_in_one_step() -> None:
    from penstock.engine.core.step_builder import StepBuilder

    schedule = BatchState(1024, 4096)
    plan = StepBuilder(schedule)
    for n in range(1000):
        plan.join(n, np.array([n], np.int32), SamplingParams(seed=n), [n])
    step = plan.build(1, 1)
    schedule.apply(step)
    other = BatchState(1024, 4096)
    other.apply(decode(Wire().frame(step)))
    assert shown(other) == shown(schedule)
    assert [params.seed for params in other.params[:1000] if params is not None] == list(range(1000))
