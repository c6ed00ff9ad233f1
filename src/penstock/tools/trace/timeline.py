"""Joins the events of all ends: records with the receivers that took them, waits with what ended them, and processes.

All times are those of the monotonic clock, in nanoseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.tools.inspect import Json
from penstock.tools.trace.live_trace import CLOSED, OPENED, SENT, TAKEN, WAITED, StepNumber, TracedChannel
from penstock.tools.trace.request_spans import TracedRequest

SLEPT, TIMED_OUT, FOR_MEMORY = 1, 2, 4  # native/layout.h, WAIT_...
NO_INDEX = 0xFF
UNKNOWN = 0  # the pid of an event's process, if the event that it opened the end was missed


class EndId(NamedTuple):
    """An end of a channel, by the channel's place among those that are traced."""

    channel: int
    is_sender: bool
    number: int


class RecordId(NamedTuple):
    channel: int
    lane: int
    sequence: int


@dataclass(slots=True)
class RecordTake:
    """A receiver has taken a record: it has copied it, or has a lease of it."""

    end: EndId
    pid: int
    began_ns: int  # when the receiver was free to take it: the end of the wait for it, if it waited
    taken_ns: int


@dataclass(slots=True)
class TracedRecord:
    id: RecordId
    end: EndId
    pid: int
    sent_ns: int
    woken_ns: int  # when its sender had given the wake-ups
    nbytes: int
    wakes: int
    takes: list[RecordTake] = field(default_factory=list)
    step: StepNumber | None = None


@dataclass(slots=True)
class EndWait:
    """A wait of an end that was over, or was going on when the trace ended."""

    end: EndId
    pid: int
    since_ns: int
    ns: int
    has_slept: bool
    purpose: str  # "records", "room", "memory"
    blocker: int | None  # the process that it was for; None: any of several, or not known
    is_timed_out: bool = False
    is_over: bool = True
    record: RecordId | None = None  # that ended it


class EndChange(NamedTuple):
    """A process has opened an end, closed it, or died."""

    end: EndId
    pid: int
    ns: int
    what: str


@dataclass
class Timeline:
    channels: list[TracedChannel]
    names: dict[int, str]  # of processes
    records: dict[RecordId, TracedRecord] = field(default_factory=dict)
    waits: list[EndWait] = field(default_factory=list)
    changes: list[EndChange] = field(default_factory=list)
    requests: list[TracedRequest] = field(default_factory=list)

    def name(self, pid: int | None) -> str:
        return "any of several" if pid is None else self.names.get(pid, f"pid {pid}")

    def title(self, channel: int) -> str:
        return f"{self.channels[channel].kind} '{self.channels[channel].name}'"


class Owners:
    """The processes that an end has had, in order of time."""

    def __init__(self, view: Json) -> None:
        self._times = [0]
        self._pids: list[int | None] = [view["pid"] if view["state"] in ("live", "dead", "closed") else None]

    def add(self, ns: int, pid: int) -> None:
        self._times.append(ns)
        self._pids.append(pid)

    def at(self, ns: int) -> int | None:
        return self._pids[bisect_right(self._times, ns) - 1]


def build_timeline(channels: list[TracedChannel], commands: dict[int, str], ended_ns: int) -> Timeline:
    """Joins what these channels have recorded. `commands`: names of processes that are peers of none."""
    timeline = Timeline(channels, {**commands, UNKNOWN: "unknown process"})
    for channel in channels:
        for view in (channel.before, channel.after):
            timeline.names.update({peer["pid"]: peer["name"] for peer in view["peers"] if peer["name"]})
    for index, channel in enumerate(channels):
        ChannelEvents(timeline, index, channel).add(ended_ns)
    timeline.waits.sort(key=lambda wait: wait.since_ns)
    return timeline


class ChannelEvents:
    """Adds the events of one channel to a timeline."""

    def __init__(self, timeline: Timeline, index: int, channel: TracedChannel) -> None:
        self._timeline = timeline
        self._index = index
        self._channel = channel
        views = [*channel.before["senders"], *channel.before["receivers"]]
        self._ends = [EndId(index, end < channel.lanes, view["index"]) for end, view in enumerate(views)]
        self._events = [channel.events(end).tolist() for end in range(len(views))]
        self._owners = [Owners(view) for view in views]

    def add(self, ended_ns: int) -> None:
        for end, events in enumerate(self._events):
            self._add_changes(end, events)
        for end, events in enumerate(self._events):
            if end < self._channel.lanes:
                self._add_sends(end, events)
        for end, events in enumerate(self._events):
            if end >= self._channel.lanes:
                self._add_takes(end, events)
        self._add_waits_that_go_on(ended_ns)
        self._add_deaths(ended_ns)

    def _owner(self, end: int, ns: int) -> int:
        return self._owners[end].at(ns) or UNKNOWN

    def _sender_of(self, lane: int, ns: int) -> int | None:
        return self._owners[lane].at(ns)

    def _receiver_of(self, receiver: int, ns: int) -> int | None:
        return self._owners[self._channel.lanes + receiver].at(ns)

    def _add_changes(self, end: int, events: list[tuple[int, ...]]) -> None:
        for _, ns, pid, _, kind, *_ in events:
            if kind in (OPENED, CLOSED):
                self._timeline.changes.append(
                    EndChange(self._ends[end], pid, ns, "opens" if kind == OPENED else "closes")
                )
            if kind == OPENED:
                self._owners[end].add(ns, pid)

    def _add_sends(self, end: int, events: list[tuple[int, ...]]) -> None:
        for since_ns, ns, number, nbytes, kind, how, index, _ in events:
            pid = self._owner(end, ns)
            if kind == SENT:
                id = RecordId(self._index, end, number)
                self._timeline.records[id] = TracedRecord(
                    id, self._ends[end], pid, since_ns, ns, nbytes, how, step=self._channel.steps.get((end, number))
                )
            elif kind == WAITED:
                blocker = None if how & FOR_MEMORY or index == NO_INDEX else self._receiver_of(index, ns)
                purpose = "memory" if how & FOR_MEMORY else "room"
                self._timeline.waits.append(self._wait(end, since_ns, ns, how, purpose, blocker))

    def _wait(self, end: int, since_ns: int, ns: int, how: int, purpose: str, blocker: int | None) -> EndWait:
        has_slept, is_timed_out = bool(how & SLEPT), bool(how & TIMED_OUT)
        return EndWait(
            self._ends[end], self._owner(end, ns), since_ns, ns, has_slept, purpose, blocker, is_timed_out=is_timed_out
        )

    def _add_takes(self, end: int, events: list[tuple[int, ...]]) -> None:
        wait: EndWait | None = None  # the last one, until a record is taken after it
        for since_ns, ns, number, nbytes, kind, how, lane, _ in events:
            pid = self._owner(end, ns)
            if kind == TAKEN:
                record = self._record(RecordId(self._index, lane, number), since_ns, nbytes)
                began_ns = ns
                if wait is not None and not wait.is_timed_out and record.sent_ns <= wait.ns:
                    wait.record, wait.blocker, began_ns = record.id, record.pid, max(wait.ns, record.sent_ns)
                record.takes.append(RecordTake(self._ends[end], pid, min(began_ns, ns), ns))
                wait = None
            elif kind == WAITED:
                blocker = self._sender_of(0, ns) if self._channel.lanes == 1 else None
                wait = self._wait(end, since_ns, ns, how, "records", blocker)
                self._timeline.waits.append(wait)

    def _record(self, id: RecordId, sent_ns: int, nbytes: int) -> TracedRecord:
        """Returns the record. Its sender's event may lack: it was overwritten, or the sender died before it."""
        record = self._timeline.records.get(id)
        if record is None:
            step = self._channel.steps.get((id.lane, id.sequence))
            pid = self._owner(id.lane, sent_ns)
            record = TracedRecord(id, self._ends[id.lane], pid, sent_ns, sent_ns, nbytes, 0, step=step)
            self._timeline.records[id] = record
        return record

    def _add_waits_that_go_on(self, ended_ns: int) -> None:
        after = self._channel.after
        for end, view in zip(self._ends, [*after["senders"], *after["receivers"]], strict=True):
            is_sender = end.is_sender
            if view["state"] != "live" or not 0 < view["waiting_ns"] <= ended_ns:
                continue
            blocker = self._sender_of(0, ended_ns) if not is_sender and self._channel.lanes == 1 else None
            purpose = "records" if not is_sender else "memory" if view["waits_for_memory"] else "room"
            self._timeline.waits.append(
                EndWait(
                    end,
                    view["pid"],
                    ended_ns - view["waiting_ns"],
                    ended_ns,
                    True,
                    purpose,
                    blocker,
                    is_over=False,
                )
            )

    def _add_deaths(self, ended_ns: int) -> None:
        lived = {peer["pid"] for peer in self._channel.before["peers"] if peer["state"] not in ("dead", "left")}
        for peer in self._channel.after["peers"]:
            if peer["state"] == "dead" and peer["pid"] in lived:
                ends = [
                    end
                    for end, owners in zip(self._ends, self._owners, strict=True)
                    if owners.at(ended_ns) == peer["pid"]
                ]
                ns = max(0, ended_ns - peer["reaped_ago_ns"])
                self._timeline.changes += [EndChange(end, peer["pid"], ns, f"dies: {peer['how']}") for end in ends]
