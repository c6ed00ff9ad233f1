"""Finds steps among the records of a timeline, with the replies that answer them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from penstock.tools.inspect import OwedReply, owed_to
from penstock.tools.trace.live_trace import StepNumber
from penstock.tools.trace.timeline import EndId, RecordId, RecordTake, Timeline, TracedRecord

MAX_IN_FLIGHT = 64  # of steps without numbers: with more of them between, a record does not answer another


@dataclass(frozen=True)
class AnsweredStep:
    """A step and the reply of one worker. The leader sent the step, and has taken the reply."""

    number: int
    sent_ns: int
    taken_ns: int
    replied_ns: int
    reply_taken_ns: int


@dataclass
class StepSeries:
    """The steps of one leader that one worker has answered, in order."""

    leader: int  # pids
    worker: int
    steps_end: EndId  # of the worker, and of the leader: where they wait for each other
    replies_end: EndId
    answered: list[AnsweredStep]


def find_series(timeline: Timeline) -> list[StepSeries]:
    series: dict[tuple[EndId, EndId, int, int], StepSeries] = {}
    for step, reply in [*numbered_pairs(timeline), *pairs_in_order(timeline)]:
        take = take_by(step, reply.pid)
        reply_take = take_by(reply, step.pid)
        if take is None or reply_take is None:
            continue
        key = take.end, reply_take.end, step.pid, reply.pid
        steps = series.setdefault(key, StepSeries(step.pid, reply.pid, take.end, reply_take.end, []))
        number = step.step.number if step.step is not None else step.id.sequence
        steps.answered.append(AnsweredStep(number, step.sent_ns, take.taken_ns, reply.sent_ns, reply_take.taken_ns))
    for steps in series.values():
        steps.answered.sort(key=lambda answered: answered.sent_ns)
    return sorted(series.values(), key=lambda steps: -len(steps.answered))


def find_open_steps(timeline: Timeline) -> list[OwedReply]:
    """Returns the steps without replies for which leaders waited when the trace ended."""
    views = [channel.after for channel in timeline.channels]
    waiting = [
        (view, end) for view in views for end in view["receivers"] if end["state"] == "live" and end["waiting_ns"]
    ]
    return [owed for view, end in waiting for owed in owed_to(view, end, views)]


def numbered_pairs(timeline: Timeline) -> list[tuple[TracedRecord, TracedRecord]]:
    """Returns records of the same leader and number, of which the second travels back to the sender of the first."""
    by_step: dict[StepNumber, list[TracedRecord]] = defaultdict(list)
    for record in timeline.records.values():
        if record.step is not None:
            by_step[record.step].append(record)
    pairs = []
    for records in by_step.values():
        first = min(records, key=lambda record: record.sent_ns)
        pairs += [(first, reply) for reply in records if is_answer(first, reply)]
    return pairs


def are_taken(step: TracedRecord, reply: TracedRecord) -> bool:
    """Returns whether each process has taken the record of the other. At the end of a trace a record is on its way."""
    return take_by(step, reply.pid) is not None and take_by(reply, step.pid) is not None


def is_answer(step: TracedRecord, reply: TracedRecord) -> bool:
    take = take_by(step, reply.pid)
    return take is not None and take.taken_ns <= reply.sent_ns and take_by(reply, step.pid) is not None


def take_by(record: TracedRecord, pid: int) -> RecordTake | None:
    return next((take for take in record.takes if take.pid == pid), None)


def pairs_in_order(timeline: Timeline) -> list[tuple[TracedRecord, TracedRecord]]:
    """Returns records of channels without numbers of which the n-th is answered by the n-th of a channel back.

    If a single time contradicts that, or there are ever too many in flight, none of these two channels is returned.
    """
    by_lane: dict[tuple[int, int], list[TracedRecord]] = defaultdict(list)
    for record in timeline.records.values():
        if timeline.channels[record.id.channel].is_plain:
            by_lane[record.id.channel, record.id.lane].append(record)
    pairs = []
    for (channel, _), replies in by_lane.items():
        for (steps_channel, steps_lane), steps in by_lane.items():
            if steps_channel == channel:
                continue
            ids = [RecordId(steps_channel, steps_lane, reply.id.sequence) for reply in replies]
            answers = [(timeline.records.get(id), reply) for id, reply in zip(ids, replies, strict=True)]
            last = len(answers) - MAX_IN_FLIGHT
            known = [
                (step, reply)
                for place, (step, reply) in enumerate(answers)
                if step is not None and (place < last or are_taken(step, reply))
            ]
            if len(known) * 2 < len(answers) or not all(is_answer(step, reply) for step, reply in known):
                continue
            if is_prompt(steps, known):
                pairs += known
    return pairs


def is_prompt(steps: list[TracedRecord], pairs: list[tuple[TracedRecord, TracedRecord]]) -> bool:
    """Returns whether no reply was sent after MAX_IN_FLIGHT more steps."""
    sent_ns = {step.id.sequence: step.sent_ns for step in steps}
    return all(
        reply.sent_ns < sent_ns.get(step.id.sequence + MAX_IN_FLIGHT, reply.sent_ns + 1) for step, reply in pairs
    )
