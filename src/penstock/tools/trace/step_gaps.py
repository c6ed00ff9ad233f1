"""Attributes the time of a series of steps: to the device, and between two steps to a process, a wake-up or a wait.

The device is busy with a step from when the worker has taken it, or has replied to the step before, until its reply.
What lies between that reply and the next step is a gap. Its parts follow each other: the reply travels to the leader,
the leader decides the next step, the step travels to the worker.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from penstock.tools.trace.step_series import AnsweredStep, StepSeries
from penstock.tools.trace.timeline import EndId, EndWait, Timeline

DEVICE = "device"


@dataclass(frozen=True)
class StepPart:
    """A piece of time and its cause: `device`, a process by name, its wake-up, or a wait and for which process."""

    begin_ns: int
    end_ns: int
    cause: str
    number: int  # of the step that the device computes, or that has been computed before this gap


@dataclass
class StepSummary:
    """Where the time of a series went."""

    leader: str
    worker: str
    steps: int
    total_ns: int
    by_cause: dict[str, int]  # the device first, then the largest


class Occupation(NamedTuple):
    """A piece of a process's time in which it computed nothing of its own."""

    since_ns: int
    until_ns: int
    cause: str
    end: EndId | None  # that waited


class ProcessTime:
    """The occupations of one process, found by time."""

    def __init__(self, occupations: list[Occupation]) -> None:
        self._occupations = sorted(occupations, key=lambda occupation: occupation.since_ns)
        self._latest_ns: list[int] = []  # when the longest of those so far is over
        for occupation in self._occupations:
            self._latest_ns.append(max(occupation.until_ns, self._latest_ns[-1] if self._latest_ns else 0))

    def between(self, begin_ns: int, end_ns: int) -> Iterator[Occupation]:
        for occupation in self._occupations[bisect_left(self._latest_ns, begin_ns) :]:
            if occupation.since_ns >= end_ns:
                return
            if occupation.until_ns > begin_ns:
                yield occupation


class GapFinder:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        occupations: dict[int, list[Occupation]] = defaultdict(list)
        for wait in timeline.waits:
            occupations[wait.pid].append(Occupation(wait.since_ns, wait.ns, self.wait_clause(wait), wait.end))
        for record in timeline.records.values():
            if record.wakes:
                cause = f"{timeline.name(record.pid)}, waking receivers"
                occupations[record.pid].append(Occupation(record.sent_ns, record.woken_ns, cause, None))
        self._times = {pid: ProcessTime(pieces) for pid, pieces in occupations.items()}

    def parts_of(self, series: StepSeries) -> list[StepPart]:
        """Returns the parts from the first reply of a series to its last, without a hole."""
        parts: list[StepPart] = []
        for step, following in zip(series.answered, series.answered[1:], strict=False):
            began_ns = max(following.taken_ns, step.replied_ns)
            parts += self._gap(series, step, following)
            parts.append(StepPart(began_ns, following.replied_ns, DEVICE, following.number))
        return [part for part in parts if part.end_ns > part.begin_ns]

    def _gap(self, series: StepSeries, step: AnsweredStep, following: AnsweredStep) -> Iterator[StepPart]:
        begin, end = step.replied_ns, following.taken_ns
        sent = min(max(begin, following.sent_ns), max(begin, end))
        back = min(max(begin, step.reply_taken_ns), sent)
        yield from self._process(series.leader, begin, back, series.replies_end, step.number)
        yield from self._process(series.leader, back, sent, None, step.number)
        yield from self._process(series.worker, sent, end, series.steps_end, step.number)

    def _process(self, pid: int, begin: int, end: int, own: EndId | None, number: int) -> Iterator[StepPart]:
        """Divides time of a process into what occupied it and the rest. `own`: an end for which a record has come."""
        name = self._timeline.name(pid)
        time = self._times.get(pid)
        for piece in time.between(begin, end) if time is not None else ():
            if piece.until_ns <= begin:
                continue
            if piece.since_ns > begin:
                yield StepPart(begin, piece.since_ns, name, number)
            cause = f"wake-up of {name}" if own is not None and piece.end == own else piece.cause
            yield StepPart(max(begin, piece.since_ns), min(end, piece.until_ns), cause, number)
            begin = min(end, piece.until_ns)
        if begin < end:
            yield StepPart(begin, end, name, number)

    def wait_clause(self, wait: EndWait) -> str:
        title = self._timeline.title(wait.end.channel)
        if wait.purpose == "memory":
            return f"wait for memory of {title}"
        return f"wait for {wait.purpose} of {title}, for {self._timeline.name(wait.blocker)}"


def summary_of(timeline: Timeline, series: StepSeries, parts: list[StepPart]) -> StepSummary:
    totals: dict[str, int] = defaultdict(int)
    for part in parts:
        totals[part.cause] += part.end_ns - part.begin_ns
    in_order = sorted(totals.items(), key=lambda entry: (entry[0] != DEVICE, -entry[1]))
    return StepSummary(
        timeline.name(series.leader),
        timeline.name(series.worker),
        len(series.answered) - 1,
        sum(totals.values()),
        dict(in_order),
    )
