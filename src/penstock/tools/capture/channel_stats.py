"""Statistics of one captured channel: sizes of messages and fields, repeated bytes, and times to decode and encode.

`frame_fields` splits a frame into fields, and `edit_distance` compares two frames.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, field

import msgspec

from penstock.errors import DecodeError
from penstock.tools.capture import frame_fields
from penstock.tools.capture.capture_file import CapturedChannel, CaptureEntry
from penstock.tools.capture.edit_distance import between
from penstock.tools.capture.frame_fields import FrameLayout

SAMPLES = 4096  # of a distribution; the mean counts everything
MAX_SHARE = 0.5  # of the time, for distances and timing while a channel is live; the rest is for keeping up

now = time.perf_counter_ns


class Distribution:
    """A distribution of numbers: count, mean, minimum and maximum are exact, the median is of a random sample."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0
        self.least = 0
        self.most = 0
        self._sample: list[int] = []
        self._chance = random.Random(0)

    def add(self, value: int) -> None:
        self.least = min(self.least, value) if self.count else value
        self.most = max(self.most, value)
        self.count += 1
        self.total += value
        if len(self._sample) < SAMPLES:
            self._sample.append(value)
        elif (index := self._chance.randrange(self.count)) < SAMPLES:
            self._sample[index] = value

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def median(self) -> float:
        return statistics.median(self._sample) if self._sample else 0.0


@dataclass
class FieldStats:
    nbytes: int = 0
    messages: int = 0  # with this field
    compared: int = 0  # messages with a predecessor that was captured, too
    unchanged: int = 0  # of the compared messages, those with the same field as their predecessor


@dataclass
class MessageStats:
    """Statistics of all messages of one class."""

    nbytes: Distribution = field(default_factory=Distribution)
    edits: Distribution = field(default_factory=Distribution)  # from one message to the next of the same sender
    compared_nbytes: int = 0  # of the messages in `edits`
    repeated_nbytes: int = 0  # of those, the bytes that the message before had, too
    upper_bounds: int = 0  # entries of `edits` that are only upper bounds, of long and very different messages
    decode_ns: Distribution = field(default_factory=Distribution)
    encode_ns: Distribution = field(default_factory=Distribution)
    fields: dict[str, FieldStats] = field(default_factory=dict)

    @property
    def repeated_share(self) -> float:
        return self.repeated_nbytes / self.compared_nbytes if self.compared_nbytes else 0.0


class ChannelStats:
    """Statistics of one channel. `is_live`: comparisons and timings are skipped if they would cause missed records."""

    def __init__(self, source: CapturedChannel, *, is_live: bool) -> None:
        self.source = source
        self.layout = FrameLayout(source.schema)
        self.classes: dict[str, MessageStats] = {}
        self.missed = 0  # overwritten before they were seen
        self.gone = 0  # long ones that were seen, but not in time to be copied
        self.undecodable = 0
        self.first_ns = self.last_ns = 0  # when the first and the last record that was seen were sent
        self._is_live = is_live
        self._began_ns = now()
        self._spent_ns = 0
        self._next: dict[int, int] = {}  # by lane: the sequence number that follows what was seen last
        self._last: dict[tuple[int, str], tuple[bytes, dict[str, bytes]]] = {}

    @property
    def records(self) -> int:
        return sum(message.nbytes.count for message in self.classes.values()) + self.undecodable + self.gone

    def add(self, entry: CaptureEntry) -> None:
        if entry.missed:
            self.missed += entry.missed
            return
        if self._next.get(entry.lane, entry.sequence) != entry.sequence:
            self._forget(entry.lane)  # what follows a gap is not compared: distances are of neighbours
        self._next[entry.lane] = entry.sequence + 1
        if not self.first_ns:
            self.first_ns = entry.committed_ns
        self.last_ns = max(self.last_ns, entry.committed_ns)
        if entry.frame is None:
            self.gone += 1
            self._forget(entry.lane)  # the class of the missing message is unknown
            return
        try:
            message = self.layout.take_apart(entry.frame)
        except DecodeError:
            self.undecodable += 1
            self._forget(entry.lane)
            return
        stats = self.classes.setdefault(message.name, MessageStats())
        stats.nbytes.add(len(entry.frame))
        pieces = dict(message.pieces)
        before = self._last.get((entry.lane, message.name))
        self._last[entry.lane, message.name] = entry.frame, pieces
        self._count_fields(stats, pieces, before[1] if before else None)
        if self._has_time():
            began = now()
            if before:
                self._compare(stats, before[0], entry.frame)
            if self.layout.schema is not None:
                self._time(stats, entry.frame)
            self._spent_ns += now() - began

    def _forget(self, lane: int) -> None:
        for key in [key for key in self._last if key[0] == lane]:
            del self._last[key]

    def _has_time(self) -> bool:
        return not self._is_live or self._spent_ns <= (now() - self._began_ns) * MAX_SHARE

    def _count_fields(self, stats: MessageStats, pieces: dict[str, bytes], before: dict[str, bytes] | None) -> None:
        for name, content in pieces.items():
            field_stats = stats.fields.setdefault(name, FieldStats())
            field_stats.nbytes += len(content)
            field_stats.messages += 1
            if before is not None:
                field_stats.compared += 1
                field_stats.unchanged += before.get(name) == content

    def _compare(self, stats: MessageStats, before: bytes, after: bytes) -> None:
        distance = between(before, after)
        stats.edits.add(distance.edits)
        stats.upper_bounds += not distance.is_exact
        stats.compared_nbytes += len(after)
        stats.repeated_nbytes += max(len(after) - distance.edits, 0)

    def _time(self, stats: MessageStats, frame: bytes) -> None:
        began = now()
        try:
            value = frame_fields.decode(frame)
            read = now()
            frame_fields.encode(value)
        except (msgspec.MsgspecError, ValueError, TypeError):
            return  # of a kind that only the classes can read
        written = now()
        stats.decode_ns.add(read - began)
        stats.encode_ns.add(written - read)
