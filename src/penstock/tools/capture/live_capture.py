"""Captures channels of running processes with native taps, which join no channel and change no counter.

`inspect` finds the channels.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from penstock import _native
from penstock.errors import CorruptRecord, PenstockError
from penstock.memory import Ticket
from penstock.memory.segment import attached_segment
from penstock.tools import inspect
from penstock.tools.capture.capture_file import CapturedChannel, CaptureEntry
from penstock.tools.capture.measure_error import MeasureError

CHANNELS = ("ring", "broadcast", "inbox")
AT_ONCE = 256  # records of one channel that are read before the next channel
MIN_PAUSE, MAX_PAUSE = 0.0005, 0.02  # seconds between two reads of idle channels


class AttachedChannel(NamedTuple):
    """A channel of a running process, attached without joining it."""

    segment: _native.Segment
    view: inspect.Json  # of its segment, as `inspect` shows it

    @property
    def kind(self) -> str:
        return str(self.view["kind"])

    @property
    def pids(self) -> list[int]:
        """Returns the processes that have it open."""
        return [holder["pid"] for holder in self.view["held_by"]]


class LiveChannel:
    """The tap of one channel."""

    def __init__(self, attached: AttachedChannel) -> None:
        segment = attached.segment
        self.source = CapturedChannel(segment.name, attached.kind, bytes(segment.schema))
        self.pids = attached.pids
        self._tap = _native.Tap(segment)
        self._missed = 0
        self.corrupt = ""  # the error of the last corrupt record

    def read(self, index: int) -> list[CaptureEntry]:
        """Returns the records since the last call, and an entry with the number of missed ones; empty: none came."""
        try:
            records = self._tap.read(AT_ONCE)
        except CorruptRecord as error:
            self.corrupt = str(error)
            return [CaptureEntry(index, 0, 0, 0, None, missed=1)]
        entries = [CaptureEntry(index, lane, sequence, at, frame) for lane, sequence, at, frame in records]
        missed = self._tap.missed - self._missed
        if missed:
            self._missed += missed
            entries.append(CaptureEntry(index, 0, 0, 0, None, missed=missed))
        return entries


def channels_of(target: int | Ticket, name: str | None) -> list[LiveChannel]:
    """Returns taps of the channels of a process and its descendants, or of a ticket. Raises MeasureError."""
    attached, _ = attached_channels(target, name)
    return [LiveChannel(channel) for channel in attached]


def attached_channels(target: int | Ticket, name: str | None) -> tuple[list[AttachedChannel], list[str]]:
    """Attaches the channels of a process and its descendants, or of a ticket. `name`: None for all.

    Returns them, and why others cannot be attached. Raises MeasureError if none can.
    """
    try:
        snapshot = inspect.look(target)
    except inspect.NotFound as error:
        raise MeasureError(str(error)) from None
    starts = {pid: process.start for pid, process in inspect.all_processes().items()}
    segments = [view for view in snapshot["segments"] if view["asked"]]
    channels = [view for view in segments if view["kind"] in CHANNELS]
    if not channels:
        others = ", ".join(sorted({f"{view['kind']} '{view['name']}'" for view in segments}))
        raise MeasureError(f"{target} has no channel open, only {others}")
    selected = [view for view in channels if name in (None, view["name"])]
    if not selected:
        names = ", ".join(sorted({f"'{view['name']}'" for view in channels}))
        raise MeasureError(f"{target} has no channel '{name}' open; there are {names}")
    attached = []
    reasons: list[str] = list(snapshot["unreadable"])
    for view in selected:
        holder = view["held_by"][0]
        pid, fd = holder["pid"], holder["fd"]
        try:
            ticket = Ticket(pid, starts.get(pid, 0), fd, view["inode"], int(view["nonce"], 16))
            with attached_segment(ticket) as segment:
                attached.append(AttachedChannel(segment, view))
        except (OSError, PenstockError) as error:
            reasons.append(f"{view['kind']} '{view['name']}': {error}")
    if not attached:
        raise MeasureError("; ".join(reasons))
    return attached, reasons


def entries(watched: list[LiveChannel], seconds: float | None) -> Iterator[CaptureEntry | None]:
    """Yields the records of these channels, for so many seconds or until all processes that had them open have ended.

    Yields None while no record comes, so that the caller can do other work.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    pause = MIN_PAUSE
    looked_at = time.monotonic()
    while True:
        new_entries = [entry for index, channel in enumerate(watched) for entry in channel.read(index)]
        yield from new_entries
        if deadline is not None and time.monotonic() >= deadline:
            return
        if new_entries:
            pause = MIN_PAUSE
            continue
        yield None
        if time.monotonic() - looked_at > 0.2:
            looked_at = time.monotonic()
            if not any(is_alive(pid) for channel in watched for pid in channel.pids):
                return
        time.sleep(pause)
        pause = min(pause * 2, MAX_PAUSE)


def is_alive(pid: int) -> bool:
    process = inspect.process_of(pid)
    return process is not None and process.state != "Z"
