"""The schedule against dicts and lists: random traces with all that can happen to a follower, and broken steps."""

import random
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.codec import FrameDecoder, Interned
from penstock.codec.follow import Follower, Leader, Verdict
from penstock.engine.protocol.batch_state import Schedule
from penstock.engine.protocol.messages import SamplingParams, Step, Whole
from penstock.errors import DecodeError
from tests.property.plain import (
    CATALOGUE,
    SLOTS,
    Life,
    Plain,
    Refused,
    Wire,
    decode,
    flat,
    shown,
    small_schedule,
    without_counts,
)

SEEDS, STEPS = 20, 5_000  # 10^5 steps in all
STEP = 1  # the number of its class, in the first byte of a frame


class Worker:
    """A follower behind a wire that loses, repeats and keeps back what it likes; it may crash, and come back."""

    def __init__(self, random: random.Random, number: int) -> None:
        self.random = random
        self.number = number
        self.had: list[bytes] = []  # what went over the wire not long ago, and the last picture
        self.happened: Counter[str] = Counter()
        self.start()

    def start(self) -> None:
        self.decoder = FrameDecoder(CATALOGUE)
        self.follower: Follower[Step, Whole] = Follower(small_schedule(), f"worker {self.number}", patience=16)
        self.is_pictured = True

    def frames(self, frame: bytes, foreign: bytes) -> list[bytes]:
        """What arrives when this is sent."""
        self.had = [*(self.had[:1] if frame[0] & 0x7F == STEP else [frame]), *self.had[1:][-20:], frame]
        what = self.random.random()
        if what < 0.004:
            return []
        if what < 0.008:
            return [frame, frame]
        if what < 0.012:
            return [frame, self.random.choice([self.had[0], *self.had])]
        if what < 0.014:
            return [self.random.choice([self.had[0]] * 9 + self.had), frame]
        if what < 0.016:
            return [foreign, frame]
        if what < 0.018:
            return [frame, foreign]
        if what < 0.020:
            at = self.random.randrange(len(frame))
            return [frame[:at]]
        return [frame]

    def take(self, frame: bytes) -> bool:
        """Whether the leader must be told."""
        try:
            message = decode(frame, self.decoder)
        except DecodeError:
            self.happened["undecodable"] += 1
            return False
        verdict = self.follower.take(message)
        self.happened[verdict.name] += 1
        if verdict in (Verdict.TAKEN, Verdict.APPLIED):
            self.is_pictured = verdict is Verdict.TAKEN
        return verdict is Verdict.LOST

    def check(self, leader: Leader[Step, Whole], plain: Plain) -> None:
        follower = self.follower
        if follower.is_in_step and (follower.leader, follower.number) == (leader.identity, leader.number):
            assert isinstance(follower.state, Schedule)
            ours, told = shown(follower.state), plain.told()
            if self.is_pictured:  # what the last step computes is no part of a picture
                ours, told = without_counts(ours), without_counts(told)
            assert ours == told


@pytest.mark.parametrize("seed", range(SEEDS))
def test_followers_have_what_they_would_have_if_they_were_told_everything_in_every_step(seed: int) -> None:
    chance = random.Random(seed)
    life, wire = Life(chance), Wire()
    leader = Leader(life.schedule, chance.getrandbits(32))
    workers = [Worker(chance, number) for number in range(2)]
    is_picture_due = True
    foreign = Wire().frame(Step(chance.getrandbits(32), 3))
    for number in range(STEPS + 40):
        is_quiet = number >= STEPS  # in the end the wires behave, and all must come back
        if chance.random() < 0.002 and not is_quiet:  # the leader dies, and another begins with nothing
            life, wire = Life(chance), Wire()
            leader, is_picture_due = Leader(life.schedule, chance.getrandbits(32)), True
        if chance.random() < 0.002 and not is_quiet:
            chance.choice(workers).start()
            is_picture_due |= chance.random() < 0.5  # the channel says that somebody came; or it must ask
        frames = []
        if is_picture_due:
            frames += [wire.whole_frame(one) for one in leader.pictures()]
            is_picture_due = False
        life.decide()
        step = life.plan.finish(leader.identity, leader.next_number)
        frames.append(wire.frame(step))
        leader.sent(step)
        for worker in workers:
            was = worker.follower.losses
            for frame in frames:
                for arrived in [frame] if is_quiet else worker.frames(frame, foreign):
                    if worker.take(arrived) and worker.follower.lost is not None:
                        is_picture_due |= leader.must_answer(worker.follower.lost)
            if number % 16 == 0 or worker.follower.losses != was or is_quiet:
                worker.check(leader, life.plain)
        if number % 16 == 0 or is_quiet:
            assert shown(life.schedule) == life.plain.told()
    everything = {"undecodable", *(verdict.name for verdict in Verdict)}
    happened = set(workers[0].happened) | set(workers[1].happened)
    assert everything == happened, f"the trace left out {everything - happened}"
    for worker in workers:
        assert worker.follower.is_in_step and worker.follower.number == leader.number, worker.follower.lost
        worker.check(leader, life.plain)


# ── broken steps ─────────────────────────────────────────────────────────────────────────────────────────────────────
def arrays_of(message: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if isinstance(value, np.ndarray):
            found.append((*path, name))
        elif isinstance(value, msgspec.Struct) and not isinstance(value, SamplingParams):
            found += arrays_of(value, (*path, name))
    return found


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
    for _ in range(60):
        life, number = Life(chance), 0
        for _ in range(60):
            number += 1
            before, picture = life.plain.copy(), life.schedule.picture(1, 0)
            life.decide()
            step = life.plan.finish(1, number)
            paths = arrays_of(step)
            for _ in range(4 if paths else 0):
                path = chance.choice(paths)
                column = step
                for name in path:
                    column = getattr(column, name)
                wrong = replaced(step, path, broken(column, chance))
                outcomes[check_alike(before, picture, decode(Wire().frame(wrong)))] += 1
            life.schedule.apply(step)
    assert min(outcomes["refused"], outcomes["applied"]) > 1000, outcomes


def test_a_frame_with_flipped_bits_is_refused_and_changes_nothing_or_does_what_it_says() -> None:
    chance = random.Random(4712)
    outcomes: Counter[str] = Counter()
    for _ in range(40):
        life = Life(chance)
        for number in range(1, 60):
            before, picture = life.plain.copy(), life.schedule.picture(1, 0)
            life.decide()
            step = life.plan.finish(1, number)
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
                    outcomes[check_alike(before, picture, wrong)] += 1
            life.schedule.apply(step)
    assert min(outcomes.values()) > 100 and len(outcomes) == 3, outcomes


def check_alike(before: Plain, picture: Whole, step: Step) -> str:
    schedule = small_schedule()
    schedule.become(picture)
    assert without_counts(shown(schedule)) == without_counts(before.told())
    try:
        then = before.apply(step)
    except Refused:
        then = None
    try:
        schedule.apply(step)
    except DecodeError as error:
        assert then is None, f"refused a good step: {error}"
        assert " at $" in str(error)
        assert without_counts(shown(schedule)) == without_counts(before.told()), "a refused step has left its traces"
        return "refused"
    assert then is not None, "applied a step that must be refused"
    assert shown(schedule) == then.told()
    return "applied"


def test_a_broken_picture_is_refused_and_changes_nothing_or_does_what_it_says() -> None:
    chance = random.Random(4713)
    outcomes: Counter[str] = Counter()
    for _ in range(100):
        life = Life(chance)
        for number in range(1, chance.randint(2, 60)):
            life.decide()
            life.schedule.apply(life.plan.finish(1, number))
        picture = decode(Wire().frame(life.schedule.picture(1, 9)))
        for path in arrays_of(picture):
            column = picture
            for name in path:
                column = getattr(column, name)
            wrong = decode(Wire().frame(replaced(picture, path, broken(column, chance))))
            schedule = small_schedule()
            schedule.become(picture)
            try:
                schedule.become(wrong)
                outcomes["taken"] += 1
                again = small_schedule()
                again.become(decode(flat(Wire().frame(schedule.picture(1, 9)))))
                assert shown(again) == shown(schedule)
            except DecodeError:
                outcomes["refused"] += 1
                assert without_counts(shown(schedule)) == without_counts(life.plain.told())
    assert min(outcomes.values()) > 100 and len(outcomes) == 2, outcomes


def test_more_parameters_than_can_be_interned_in_one_message_travel_all_the_same() -> None:
    from penstock.engine.core.step_builder import Plan

    schedule = Schedule(1024, 4096)
    plan = Plan(schedule)
    for n in range(1000):
        plan.join(n, np.array([n], np.int32), Interned(SamplingParams(seed=n)), [n])
    step = plan.finish(1, 1)
    schedule.apply(step)
    for message in (step, schedule.picture(1, 1)):
        other = Schedule(1024, 4096)
        received = decode(Wire().frame(message))
        other.apply(received) if isinstance(received, Step) else other.become(received)
        assert without_counts(shown(other)) == without_counts(shown(schedule))
        assert [one.value.seed for one in other.params[:1000] if one is not None] == list(range(1000))
