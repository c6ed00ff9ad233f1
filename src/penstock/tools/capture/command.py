"""The command `penstock measure`. Exit status 0: measured. 2: there is nothing to measure."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import LayoutMismatch, PenstockError
from penstock.memory import Ticket
from penstock.tools import tables
from penstock.tools.capture import channel_report, live_capture
from penstock.tools.capture.capture_file import CapturedChannel, CaptureEntry, CaptureFile, CaptureWriter
from penstock.tools.capture.channel_stats import ChannelStats
from penstock.tools.capture.measure_error import MeasureError, required


@dataclass(frozen=True)
class CaptureOptions:
    target: int | Ticket | Path
    channel: str | None = None
    seconds: float | None = None
    record: Path | None = None
    plot: Path | None = None
    is_json: bool = False


def run(options: CaptureOptions) -> int:
    try:
        required("rapidfuzz.distance", "the edit distance")
        if not options.is_json:
            required("rich.console", "a table")
        all_stats = of_file(options) if isinstance(options.target, Path) else of_processes(options, options.target)
        if options.is_json:
            tables.print_rows(row for stats in all_stats for row in channel_report.rows_of(stats))
        else:
            tables.print_tables(table for stats in all_stats for table in channel_report.tables_of(stats))
        if options.plot is not None:
            channel_report.draw(all_stats, options.plot)
    except (MeasureError, PenstockError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"penstock measure: {error}", file=sys.stderr)
        return 2
    return 0


def of_file(options: CaptureOptions) -> list[ChannelStats]:
    assert isinstance(options.target, Path)
    if options.record is not None:
        raise MeasureError(f"{options.target} is a recording already: --record is for live channels")
    recording = CaptureFile(options.target)
    chosen = chosen_of(recording.sources, options.channel, str(options.target))
    all_stats = {index: ChannelStats(recording.sources[index], is_live=False) for index in chosen}
    with interruptible() as is_interrupted:
        for entry in recording:
            if entry.source in all_stats:
                all_stats[entry.source].add(entry)
            if is_interrupted():
                break
    if recording.left_over:
        print(
            f"penstock measure: {options.target} was cut off: its last {recording.left_over} bytes are no whole record",
            file=sys.stderr,
        )
    return list(all_stats.values())


def chosen_of(sources: list[CapturedChannel], name: str | None, where: str) -> list[int]:
    indices = [index for index, source in enumerate(sources) if name in (None, source.name)]
    if not indices:
        names = ", ".join(sorted({f"'{source.name}'" for source in sources})) or "none"
        raise MeasureError(f"{where} has no channel '{name}'; there are {names}")
    return indices


def of_processes(options: CaptureOptions, target: int | Ticket) -> list[ChannelStats]:
    watched = live_capture.channels_of(target, options.channel)
    if options.seconds is None and sys.stderr.isatty():
        names = ", ".join(f"{channel.source.kind} '{channel.source.name}'" for channel in watched)
        print(f"looking at {names}; Ctrl-C ends it, with the table", file=sys.stderr)
    sources = [channel.source for channel in watched]
    all_stats = [ChannelStats(source, is_live=True) for source in sources]
    with interruptible() as is_interrupted, open_writer(options.record, sources) as write:
        count(live_capture.entries(watched, options.seconds), all_stats, write, is_interrupted)
    for channel in watched:
        if channel.corrupt:
            print(
                f"penstock measure: {channel.source.kind} '{channel.source.name}': {channel.corrupt}", file=sys.stderr
            )
    return all_stats


def count(
    entries: Iterable[CaptureEntry | None],
    all_stats: list[ChannelStats],
    write: Callable[[CaptureEntry], None],
    is_interrupted: Callable[[], bool],
) -> None:
    for entry in entries:
        if entry is not None:
            write(entry)
            all_stats[entry.source].add(entry)
        if is_interrupted():
            return


@contextlib.contextmanager
def open_writer(path: Path | None, sources: list[CapturedChannel]) -> Iterator[Callable[[CaptureEntry], None]]:
    if path is None:
        yield lambda entry: None
        return
    with contextlib.closing(CaptureWriter(path, sources)) as writer:
        yield writer.write


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """In the block, the first Ctrl-C (or SIGTERM) only sets the result of the yielded function, so that the statistics
    so far are printed."""
    signals: list[int] = []

    def handle(number: int, frame: object) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(signals)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def target_of(text: str) -> int | Ticket | Path:
    """A process, a ticket or a file (`./12` for one that is called like a process). Raises LayoutMismatch."""
    if text.isdecimal():
        return int(text)
    if text.startswith("penstock:"):
        return Ticket.parse(text)
    if os.path.exists(text) or os.sep in text or "." in text:
        return Path(text)
    raise LayoutMismatch(f"neither a process number, nor a ticket (penstock:PID:…), nor a file: {text!r}")
