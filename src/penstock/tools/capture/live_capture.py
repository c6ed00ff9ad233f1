"""Captures channels of running processes with native taps, which join no channel and change no counter.

`inspect` finds the channels.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

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


class LiveChannel:
    """The tap of one channel."""

    def __init__(self, segment: _native.Segment, kind: str, pids: list[int]) -> None:
        self.source = CapturedChannel(segment.name, kind, bytes(segment.schema))
        self.pids = pids  # of the processes that have it open
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
    """Opens the channels of a process and its descendants, or of a ticket. `name`: None for all.

    Raises MeasureError.
    """
    try:
        snapshot = inspect.look(target)
    except inspect.NotFound as error:
        raise MeasureError(str(error)) from None
    starts = {pid: process.start for pid, process in inspect.all_processes().items()}
    target_channels = [
        segment_view
        for segment_view in snapshot["segments"]
        if segment_view["asked"] and segment_view["kind"] in CHANNELS
    ]
    if not target_channels:
        others = ", ".join(
            sorted(
                {
                    f"{segment_view['kind']} '{segment_view['name']}'"
                    for segment_view in snapshot["segments"]
                    if segment_view["asked"]
                }
            )
        )
        raise MeasureError(f"{target} has no channel open, only {others}")
    selected = [segment_view for segment_view in target_channels if name in (None, segment_view["name"])]
    if not selected:
        names = ", ".join(sorted({f"'{segment_view['name']}'" for segment_view in target_channels}))
        raise MeasureError(f"{target} has no channel '{name}' open; there are {names}")
    watched = []
    reasons = []
    for segment_view in selected:
        holder = segment_view["held_by"][0]
        try:
            ticket = Ticket(
                holder["pid"],
                starts.get(holder["pid"], 0),
                holder["fd"],
                segment_view["inode"],
                int(segment_view["nonce"], 16),
            )
            pids = [each["pid"] for each in segment_view["held_by"]]
            with attached_segment(ticket) as segment:
                watched.append(LiveChannel(segment, segment_view["kind"], pids))
        except (OSError, PenstockError) as error:
            reasons.append(f"{segment_view['kind']} '{segment_view['name']}': {error}")
    if not watched:
        raise MeasureError("; ".join(reasons))
    return watched


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
