"""Where the time between two steps went: exact sums, and causes in their order."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.tools.trace.command import lines_of
from penstock.tools.trace.step_gaps import DEVICE, GapFinder, StepPart, summary_of
from penstock.tools.trace.step_series import AnsweredStep, StepSeries
from penstock.tools.trace.timeline import EndId, EndWait, RecordId, Timeline, TracedRecord

CORE, WORKER, OUTPUT = 1, 2, 3
STEPS, RESULTS, TOKENS = range(3)
STEPS_END, RESULTS_END, TOKENS_END = EndId(STEPS, False, 0), EndId(RESULTS, False, 0), EndId(TOKENS, True, 0)


def timeline(*waits: EndWait) -> Timeline:
    channels: Any = [SimpleNamespace(kind="ring", name=name) for name in ("steps", "results", "tokens")]
    return Timeline(channels, {CORE: "core", WORKER: "worker", OUTPUT: "output"}, waits=list(waits))


def wait(end: EndId, pid: int, since: int, until: int, blocker: int | None = None) -> EndWait:
    return EndWait(end, pid, since, until, True, "room" if end.is_sender else "records", blocker)


def series(*answered: tuple[int, int, int, int]) -> StepSeries:
    steps = [AnsweredStep(number, *times) for number, times in enumerate(answered, 1)]
    return StepSeries(CORE, WORKER, STEPS_END, RESULTS_END, steps)


def causes(parts: list[StepPart]) -> list[tuple[int, int, str]]:
    return [(part.begin_ns, part.end_ns, part.cause) for part in parts]


TWO_STEPS = series((0, 10, 100, 120), (150, 170, 300, 310))  # sent, taken, replied, reply taken


def test_a_gap_without_waits_belongs_to_the_leader_and_then_to_the_worker() -> None:
    parts = GapFinder(timeline()).parts_of(TWO_STEPS)
    assert causes(parts) == [(100, 120, "core"), (120, 150, "core"), (150, 170, "worker"), (170, 300, DEVICE)]


def test_waits_for_each_other_are_wake_ups() -> None:
    waits = wait(RESULTS_END, CORE, 5, 115, WORKER), wait(STEPS_END, WORKER, 101, 160, CORE)
    parts = GapFinder(timeline(*waits)).parts_of(TWO_STEPS)
    assert causes(parts) == [
        (100, 115, "wake-up of core"),
        (115, 120, "core"),
        (120, 150, "core"),
        (150, 160, "wake-up of worker"),
        (160, 170, "worker"),
        (170, 300, DEVICE),
    ]


def test_wait_for_another_channel_is_shown_with_its_process() -> None:
    parts = GapFinder(timeline(wait(TOKENS_END, CORE, 125, 140, OUTPUT))).parts_of(TWO_STEPS)
    assert (125, 140, "wait for room of ring 'tokens', for output") in causes(parts)
    assert (120, 125, "core") in causes(parts) and (140, 150, "core") in causes(parts)


def test_time_in_which_a_send_wakes_receivers_is_shown_as_that() -> None:
    scene = timeline()
    sent = TracedRecord(RecordId(RESULTS, 0, 1), EndId(RESULTS, True, 0), WORKER, 100, 165, 8, wakes=1)
    scene.records[sent.id] = sent
    parts = GapFinder(scene).parts_of(TWO_STEPS)
    assert causes(parts)[2:] == [(150, 165, "worker, waking receivers"), (165, 170, "worker"), (170, 300, DEVICE)]


def test_a_device_with_a_step_in_its_queue_has_no_gap() -> None:
    overlapped = series((0, 10, 100, 120), (20, 30, 200, 210), (125, 140, 300, 310))
    parts = GapFinder(timeline()).parts_of(overlapped)
    assert causes(parts) == [(100, 200, DEVICE), (200, 300, DEVICE)]


def test_step_taken_after_the_reply_waits_for_the_worker() -> None:
    parts = GapFinder(timeline()).parts_of(series((0, 10, 100, 120), (50, 130, 200, 210)))
    assert causes(parts) == [(100, 130, "worker"), (130, 200, DEVICE)]


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_are_the_whole_time_without_a_hole(seed: int) -> None:
    chance = random.Random(seed)
    answered, at = [], 0
    for _ in range(20):
        sent, taken, replied, reply_taken = (at := at + chance.randrange(1, 50) for _ in range(4))
        answered.append((sent, taken, replied, reply_taken))
        at = chance.choice([sent + 1, reply_taken])
    answered.sort(key=lambda item: item[2])
    waits = []
    for pid, end in ((CORE, RESULTS_END), (CORE, TOKENS_END), (WORKER, STEPS_END)):
        since = 0
        while since < at:
            since += chance.randrange(1, 80)
            until = since + chance.randrange(1, 80)
            waits.append(wait(end, pid, since, until))
            since = until
    parts = GapFinder(timeline(*waits)).parts_of(series(*answered))
    assert parts[0].begin_ns == answered[0][2] and parts[-1].end_ns == answered[-1][2]
    assert all(part.end_ns == after.begin_ns for part, after in itertools.pairwise(parts)), f"seed {seed}"


def test_a_summary_has_the_device_first_and_then_the_longest() -> None:
    scene = timeline(wait(TOKENS_END, CORE, 125, 140, OUTPUT))
    parts = GapFinder(scene).parts_of(TWO_STEPS)
    summary = summary_of(scene, TWO_STEPS, parts)
    assert (summary.leader, summary.worker, summary.steps, summary.total_ns) == ("core", "worker", 1, 200)
    assert list(summary.by_cause.items()) == [
        (DEVICE, 130), ("core", 35), ("worker", 20), ("wait for room of ring 'tokens', for output", 15)
    ]  # fmt: skip
    assert "65.0 %  device" in list(lines_of(summary))[1]
