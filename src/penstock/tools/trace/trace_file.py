"""Writes a timeline in Chrome's trace format, for Perfetto (https://ui.perfetto.dev): one object of JSON.

A process has a track for each of its ends. On it are what it sends, takes and waits for; arrows lead from each send to
each receiver that took the record. A leader has one more track for each worker, with the parts of its steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

import penstock
from penstock.tools.inspect import OwedReply
from penstock.tools.trace.live_trace import TracedTime
from penstock.tools.trace.request_spans import Span
from penstock.tools.trace.step_gaps import GapFinder, StepPart
from penstock.tools.trace.step_series import StepSeries, find_open_steps
from penstock.tools.trace.timeline import UNKNOWN, EndChange, EndId, EndWait, Timeline, TracedRecord

LEAST_NS = 1  # of a slice; an arrow must begin and end within one
AT_ONCE = 10_000  # events that are encoded together

Event = dict[str, Any]


class TraceEvents:
    """The events of a timeline as objects of the format. Times are in microseconds from the start of the trace."""

    def __init__(self, timeline: Timeline, time: TracedTime) -> None:
        self._timeline = timeline
        self._began_ns, self._ended_ns = time.began_ns, time.ended_ns
        self._gaps = GapFinder(timeline)
        self._tracks: dict[tuple[int, EndId | str], int] = {}
        self._num_arrows = 0

    def all(self, series: list[tuple[StepSeries, list[StepPart]]]) -> Iterator[Event]:
        yield from self._names()
        for record in self._timeline.records.values():
            yield from self._record(record)
        for wait in self._timeline.waits:
            yield self._wait(wait)
        for change in self._timeline.changes:
            yield self._change(change)
        for steps, parts in series:
            yield from self._steps(steps, parts)
        for owed in find_open_steps(self._timeline):
            yield self._open_step(owed)
        yield from self._requests()
        yield from self._track_names()

    # ── processes and tracks ──
    def _names(self) -> Iterator[Event]:
        timeline = self._timeline
        pids = {record.pid for record in timeline.records.values()} | {wait.pid for wait in timeline.waits}
        pids |= {take.pid for record in timeline.records.values() for take in record.takes}
        for pid in sorted(pids):
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": timeline.name(pid)}}

    def _track(self, pid: int, what: EndId | str) -> int:
        return self._tracks.setdefault((pid, what), len(self._tracks) + 1)

    def _track_names(self) -> Iterator[Event]:
        for (pid, what), track in self._tracks.items():
            name, order = (what, 0) if isinstance(what, str) else (self._end_name(what), 1 + what.is_sender)
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": track, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": track, "args": {"sort_index": order}}

    def _end_name(self, end: EndId) -> str:
        return f"{'to' if end.is_sender else 'from'} {self._timeline.title(end.channel)}"

    # ── events ──
    def _at(self, ns: int) -> float:
        return (ns - self._began_ns) / 1e3

    def _slice(
        self, category: str, name: str, pid: int, what: EndId | str, begin_ns: int, end_ns: int, **args: Any
    ) -> Event:
        return {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": pid,
            "tid": self._track(pid, what),
            "ts": self._at(begin_ns),
            "dur": max(end_ns - begin_ns, LEAST_NS) / 1e3,
            "args": args,
        }

    def _record(self, record: TracedRecord) -> Iterator[Event]:
        about = {"record": record.id.sequence, "bytes": record.nbytes}
        if record.step is not None:
            about["step"] = record.step.number
        sent = self._slice(
            "send", "send", record.pid, record.end, record.sent_ns, record.woken_ns, **about, wake_ups=record.wakes
        )
        yield sent
        for take in record.takes:
            taken = self._slice(
                "take",
                "take",
                take.pid,
                take.end,
                take.began_ns,
                take.taken_ns,
                **about,
                sender=self._timeline.name(record.pid),
                after_us=(take.taken_ns - record.sent_ns) / 1e3,
            )
            yield taken
            self._num_arrows += 1
            arrow = {"cat": "record", "name": self._timeline.channels[record.id.channel].name, "id": self._num_arrows}
            yield {"ph": "s", **arrow, "pid": sent["pid"], "tid": sent["tid"], "ts": sent["ts"]}
            yield {"ph": "f", "bp": "e", **arrow, "pid": taken["pid"], "tid": taken["tid"], "ts": taken["ts"]}

    def _wait(self, wait: EndWait) -> Event:
        args: dict[str, Any] = {"slept": wait.has_slept, "for": self._timeline.name(wait.blocker)}
        if wait.record is not None:
            args["record"] = wait.record.sequence
            args["wake_up_us"] = (wait.ns - self._timeline.records[wait.record].sent_ns) / 1e3
        if wait.is_timed_out:
            args["timed_out"] = True
        if not wait.is_over:
            args["goes_on"] = True
        name = f"wait for {wait.purpose}"
        return self._slice("wait", name, wait.pid, wait.end, wait.since_ns, wait.ns, **args)

    def _change(self, change: EndChange) -> Event:
        return {
            "ph": "i",
            "s": "t",
            "cat": "end",
            "name": change.what,
            "pid": change.pid,
            "tid": self._track(change.pid, change.end),
            "ts": self._at(change.ns),
        }

    def _steps(self, series: StepSeries, parts: list[StepPart]) -> Iterator[Event]:
        worker = self._timeline.name(series.worker)
        for step in series.answered:
            ends = {
                "cat": "step",
                "name": f"step to {worker}",  # one for all: a viewer gives each name a track
                "pid": series.leader,
                "id": f"{series.worker}.{step.number}",
            }
            yield {"ph": "b", **ends, "ts": self._at(step.sent_ns), "args": {"step": step.number}}
            yield {"ph": "e", **ends, "ts": self._at(step.reply_taken_ns)}
        for part in parts:
            category = "device" if part.cause == "device" else "gap"
            track = f"steps of {worker}"
            yield self._slice(category, part.cause, series.leader, track, part.begin_ns, part.end_ns, step=part.number)

    def _open_step(self, owed: OwedReply) -> Event:
        track = f"steps of {self._timeline.name(owed.worker)}"
        about = {"step": owed.step, "finished": owed.finished, "unfinished": owed.unfinished, "goes_on": True}
        begin_ns = self._ended_ns - owed.since_ns
        return self._slice("open", "wait for a reply", owed.leader, track, begin_ns, self._ended_ns, **about)

    def _requests(self) -> Iterator[Event]:
        """Yields the spans of requests, on tracks of their server: a request takes the first track that is free."""
        free_at: dict[int, list[int]] = defaultdict(list)  # by server: the end of the last request on each track
        for request in self._timeline.requests:
            end_ns = max((span.end_ns for span in request.spans), default=request.begin_ns)
            ends = free_at[request.server]
            track = next((index for index, free_ns in enumerate(ends) if free_ns < request.begin_ns), len(ends))
            ends[track : track + 1] = [end_ns]
            pid, name = self._server_pid(request.server), f"requests {track}"
            spans = sorted(request.spans, key=lambda span: (span.begin_ns, -span.end_ns))
            for span in (Span(request.id, request.begin_ns, end_ns), *spans):
                about = {"id": request.id, "prompt": request.prompt, "tokens": request.tokens}
                yield self._slice("request", span.name, pid, name, span.begin_ns, span.end_ns, request=about)

    def _server_pid(self, server: int) -> int:
        """Returns the process that receives the answers of a server, or `UNKNOWN`."""
        views = [channel.after for channel in self._timeline.channels if channel.name == f"deltas {server}"]
        return next((view["receivers"][0]["pid"] for view in views), UNKNOWN)


def write_trace(path: Path, events: Iterable[Event], about: dict[str, Any]) -> int:
    """Writes the events to a file. Returns its size. Raises OSError."""
    encoder = msgspec.json.Encoder()
    head = encoder.encode({"displayTimeUnit": "ns", "otherData": {"penstock": penstock.__version__, **about}})
    with path.open("wb") as file:
        file.write(head[:-1] + b',"traceEvents":[')
        waiting: list[Event] = []
        separator = b"\n"
        for event in events:
            waiting.append(event)
            if len(waiting) == AT_ONCE:
                file.write(separator + b",\n".join(map(encoder.encode, waiting)))
                separator = b",\n"
                waiting.clear()
        if waiting:
            file.write(separator + b",\n".join(map(encoder.encode, waiting)))
        file.write(b"\n]}\n")
        return file.tell()
