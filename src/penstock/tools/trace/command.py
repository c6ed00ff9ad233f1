"""The command `penstock trace`. Exit status 0: traced. 2: there is nothing to trace."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError
from penstock.memory import Ticket
from penstock.tools.capture.command import interruptible
from penstock.tools.capture.live_capture import attached_channels
from penstock.tools.capture.measure_error import MeasureError
from penstock.tools.format import counted, in_seconds, in_units
from penstock.tools.trace.live_trace import MAX_EVENTS, TracedChannel, TracedTime, process_names, trace
from penstock.tools.trace.request_spans import RequestReader, rows_of
from penstock.tools.trace.step_gaps import GapFinder, StepSummary, summary_of
from penstock.tools.trace.step_series import find_open_steps, find_series
from penstock.tools.trace.timeline import Timeline, build_timeline
from penstock.tools.trace.trace_file import TraceEvents, write_trace

LONG_WAIT_NS = 500_000_000  # of a step that is printed


@dataclass(frozen=True)
class TraceOptions:
    target: int | Ticket
    output: Path
    seconds: float
    channel: str | None = None
    is_json: bool = False
    request: str | None = None  # the id of the request to trace; None: all


def run(options: TraceOptions) -> int:
    try:
        with options.output.open("ab"):  # before anything is traced: it can be written
            pass
        attached, reasons = attached_channels(options.target, options.channel)
        requests = RequestReader(options.request)
        channels = [TracedChannel(channel, requests) for channel in attached]
        commands = process_names()
        with interruptible() as is_interrupted:
            time = trace(channels, options.seconds, lambda: requests.has_ended or is_interrupted())
        timeline = build_timeline(channels, commands, time.ended_ns)
        timeline.requests = requests.requests(time.ended_ns)
        report(options, timeline, time, reasons)
        if options.request is not None and not timeline.requests:
            cause = "it was refused, or came before the trace"
            raise MeasureError(f"request {options.request!r} came to no engine within {options.seconds:g} s: {cause}")
    except (MeasureError, PenstockError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"penstock trace: {error}", file=sys.stderr)
        return 2
    return 0


def report(options: TraceOptions, timeline: Timeline, time: TracedTime, not_attached: list[str]) -> None:
    gaps = GapFinder(timeline)
    series = [(steps, gaps.parts_of(steps)) for steps in find_series(timeline)]
    summaries = [summary_of(timeline, steps, parts) for steps, parts in series if parts]
    losses = [*not_attached, *losses_of(timeline, time)]
    about = {"seconds": (time.ended_ns - time.began_ns) / 1e9, "began_ns": time.began_ns, "lacking": losses}
    nbytes = write_trace(options.output, TraceEvents(timeline, time).all(series), about)
    for loss in losses:
        print(f"penstock trace: {loss}", file=sys.stderr)
    if options.is_json:
        print(json.dumps(row_of(timeline, about, summaries)), flush=True)
        return
    if options.request is not None:
        for request in timeline.requests:
            print("\n".join(request.lines()))
        return
    pids = {wait.pid for wait in timeline.waits} | {record.pid for record in timeline.records.values()}
    processes = f"{len(pids)} process{'es' * (len(pids) != 1)}"
    print(
        f"{options.output}: {in_units(nbytes)}, {counted(len(timeline.records), 'record')} on "
        f"{counted(len(timeline.channels), 'channel')} of {processes} "
        f"in {in_seconds(time.ended_ns - time.began_ns)}; open it at https://ui.perfetto.dev"
    )
    for summary in summaries:
        print("\n".join(lines_of(summary)))
    for owed in find_open_steps(timeline):
        if owed.since_ns >= LONG_WAIT_NS:
            print(f"{timeline.name(owed.leader)} waits for a reply since {in_seconds(owed.since_ns)}: {owed.clause}")


def row_of(timeline: Timeline, about: dict[str, Any], summaries: list[StepSummary]) -> dict[str, Any]:
    return {
        **about,
        "records": len(timeline.records),
        "waits": len(timeline.waits),
        "channels": len(timeline.channels),
        "steps": [asdict(summary) for summary in summaries],
        "open": [asdict(owed) for owed in find_open_steps(timeline)],
        "requests": rows_of(timeline.requests),
    }


def lines_of(summary: StepSummary) -> Iterator[str]:
    mean = in_seconds(summary.total_ns / summary.steps)
    yield f"\n{counted(summary.steps, 'step')} of {summary.leader}, answered by {summary.worker}: {mean} each, of them"
    for cause, ns in summary.by_cause.items():
        yield f"  {in_seconds(ns / summary.steps):>8}  {100 * ns / summary.total_ns:5.1f} %  {cause}"


def losses_of(timeline: Timeline, time: TracedTime) -> Iterator[str]:
    """Yields what the trace lacks, a sentence each."""
    if time.is_cut:
        yield (
            f"cut after {in_seconds(time.ended_ns - time.began_ns)}: {MAX_EVENTS:,} events are the most; "
            "trace fewer seconds, or one channel"
        )
    for index, channel in enumerate(timeline.channels):
        title = timeline.title(index)
        if channel.missed:
            yield f"{title}: {counted(channel.missed, 'event')} were overwritten before they were read"
        if channel.corrupt:
            yield f"{title}: {counted(channel.corrupt, 'event')} were no events: a process wrote where it must not"
        if channel.missed_numbers:
            numbers = f"the numbers of {counted(channel.missed_numbers, 'record')}"
            yield f"{title}: {numbers} were overwritten before they were read: steps and requests of them lack"
        if channel.lapses:
            yield f"{title}: was not traced for a while, {counted(channel.lapses, 'time')}: this process was too slow"
        if lacking := channel.records_without_events():
            yield f"{title}: {counted(lacking, 'record')} left no event: a process could not map the part for them"
