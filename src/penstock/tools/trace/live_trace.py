"""Reads the events that the ends of live channels write while they are traced. `timeline` says what they mean."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from penstock import _native
from penstock.codec.catalogue import Schema
from penstock.codec.frame import WRONG, split
from penstock.errors import DecodeError, LayoutMismatch
from penstock.tools import inspect
from penstock.tools.capture.live_capture import AttachedChannel, LiveChannel, is_alive
from penstock.tools.inspect.segments import Json, harmless
from penstock.tools.trace.request_spans import RequestReader

# native/layout.h, TraceEvent and TraceKind
EVENT = np.dtype(
    [
        ("since_ns", "<u8"),
        ("ns", "<u8"),
        ("number", "<u8"),
        ("nbytes", "<u4"),
        ("kind", "u1"),
        ("how", "u1"),
        ("index", "u1"),
        ("unused", "u1"),
    ]
)
OPENED, CLOSED, SENT, TAKEN, WAITED = range(1, 6)
PAUSE = 0.005  # seconds between two reads; a ring of 2,048 events is full after that at 400,000 a second
EXTEND_S = 0.25  # seconds between two moves of the time until which ends write; native/trace.h: 2 s ahead
LOOK_S = 0.2  # seconds between two looks whether the processes live
MAX_READS = 64  # of 256 records, before the next channel
MAX_EVENTS = 4_000_000  # 128 MB, and a file of about 1 GB

RAW_LIST = msgspec.msgpack.Decoder(list[msgspec.Raw])
INTEGER = msgspec.msgpack.Decoder(int)


class StepNumber(NamedTuple):
    """What a message of a sequence says of itself, and a reply of the message that it answers."""

    leader: int
    number: int


class SequenceReader:
    """Reads the leader and the number of messages that have both, by the description that a channel carries."""

    def __init__(self, schema: bytes) -> None:
        self._places: dict[int, tuple[int, int]] = {}  # by message: where in its struct the two stand
        try:
            messages = Schema.decode(schema).messages if schema else ()
        except LayoutMismatch:
            return
        for message, described in enumerate(messages, 1):
            names = [name for name, _ in described.fields]
            if "leader" in names and "number" in names:
                self._places[message] = names.index("leader"), names.index("number")

    def has_numbers(self) -> bool:
        return bool(self._places)

    def read(self, frame: bytes) -> StepNumber | None:
        try:
            message, encoded, _ = split(frame)
            leader, number = self._places[message]
            raws = RAW_LIST.decode(encoded)
            return StepNumber(INTEGER.decode(raws[leader]), INTEGER.decode(raws[number]))
        except (*WRONG, DecodeError, KeyError, IndexError):
            return None


class TracedChannel:
    """A channel that is traced: its events so far, and the numbers of its messages. Raises OSError, PenstockError.

    `requests` gets the messages about requests.
    """

    def __init__(self, attached: AttachedChannel, requests: RequestReader | None = None) -> None:
        self.name, self.kind = attached.segment.name, attached.kind
        self.pids = attached.pids
        self.before: Json = attached.view
        self.after: Json = attached.view
        self.lanes = len(self.before["senders"])
        self._schema = bytes(attached.segment.schema)
        self.is_plain = not self._schema
        self._requests = requests if requests is not None and requests.has_requests(self._schema) else None
        self.steps: dict[tuple[int, int], StepNumber] = {}  # by lane and sequence
        self.missed_numbers = 0  # records that were overwritten before their numbers were read
        self.lapses = 0  # times at which tracing had ended by itself, as this process was too slow
        self._segment = attached.segment
        self._reader = _native.TraceReader(attached.segment)
        self._events: list[list[bytes]] = [[] for _ in range(self.lanes + len(self.before["receivers"]))]
        self._sequences = SequenceReader(self._schema)
        has_messages = self._sequences.has_numbers() or self._requests is not None
        self._tap = LiveChannel(attached) if has_messages else None

    def begin(self) -> None:
        """Begins to trace. The counters of its ends are read after that, so what they count has events."""
        self._reader.extend()
        self.before = self._snapshot()

    def extend(self) -> None:
        if not self._reader.extend():
            self.lapses += 1

    def read(self) -> int:
        """Reads what has come. Returns how many events that were."""
        nbytes = 0
        for end, events in self._reader.read():
            self._events[end].append(events)
            nbytes += len(events)
        if self._tap is not None:
            for _ in range(MAX_READS):
                entries = self._tap.read(0)
                for entry in entries:
                    self.missed_numbers += entry.missed
                    if entry.frame is None:
                        continue
                    if (step := self._sequences.read(entry.frame)) is not None:
                        self.steps[entry.lane, entry.sequence] = step
                    if self._requests is not None:
                        self._requests.read(self._schema, self.name, entry.committed_ns, entry.frame)
                if not entries:
                    break
        return nbytes // EVENT.itemsize

    def finish(self) -> None:
        self.after = self._snapshot()
        self.read()

    def _snapshot(self) -> Json:
        return dict(harmless(_native.snapshot(os.dup(self._segment.fd))))

    def events(self, end: int) -> npt.NDArray[Any]:
        """Returns the events of an end: the senders come first, then the receivers."""
        return np.frombuffer(b"".join(self._events[end]), EVENT)

    def records_without_events(self) -> int:
        """Returns how many records the ends counted, between the snapshots, of which they wrote no event."""
        lacking = 0
        for end, role in enumerate(["senders"] * self.lanes + ["receivers"] * (len(self._events) - self.lanes)):
            index = end if role == "senders" else end - self.lanes
            before, after = self.before[role][index], self.after[role][index]
            events = self.events(end)
            recorded = int(np.count_nonzero((events["kind"] == SENT) | (events["kind"] == TAKEN)))
            lacking += max(0, after["records"] - before["records"] - recorded)
        return 0 if self.missed or self.corrupt or self.lapses else lacking

    @property
    def missed(self) -> int:
        """Events that were overwritten before they were read."""
        return self._reader.missed

    @property
    def corrupt(self) -> int:
        return self._reader.corrupt


class TracedTime(NamedTuple):
    """When a trace began and ended, and whether it was cut short because there were too many events."""

    began_ns: int
    ended_ns: int
    is_cut: bool


def trace(channels: list[TracedChannel], seconds: float, is_interrupted: Callable[[], bool]) -> TracedTime:
    """Traces these channels for so many seconds, until it is interrupted, or until all their processes have ended."""
    pids = {pid for channel in channels for pid in channel.pids}
    for channel in channels:
        channel.begin()
    began = extended = looked = time.monotonic()
    began_ns = time.monotonic_ns()
    num_events = 0
    while True:
        num_events += sum(channel.read() for channel in channels)
        now = time.monotonic()
        if now >= began + seconds or num_events >= MAX_EVENTS or is_interrupted():
            break
        if now >= extended + EXTEND_S:
            extended = now
            for channel in channels:
                channel.extend()
        if now >= looked + LOOK_S:
            looked = now
            if not any(is_alive(pid) for pid in pids):
                break
        time.sleep(PAUSE)
    for channel in channels:
        channel.finish()
    return TracedTime(began_ns, time.monotonic_ns(), num_events >= MAX_EVENTS)


def process_names() -> dict[int, str]:
    return {pid: process.name for pid, process in inspect.all_processes().items()}
