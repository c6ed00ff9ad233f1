"""The history of a server: a page of shared memory with a point for each second of 15 minutes, and with events.

The launcher writes the points. The launcher and each server process write events, each into records of its own. A
record has a checksum, so the order in which bytes become visible is of no importance: a reader passes over a record
that is being written, and finds it a second later.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from penstock import lowlevel
from penstock.engine.cluster.logs import LOGGER
from penstock.tools.format import printable

POINTS = 900
EVENTS = 512  # of all writers
MAX_TEXT = 400  # bytes of an event's text; the rest is cut
HEAD = struct.Struct("<QII")  # of a record: its number, its length and the checksum of both and the body


class Point(NamedTuple):
    """A second of a server. Latencies are of the minute before; NaN: there was none."""

    time: float  # seconds since 1970
    open: float
    running: float
    waiting: float
    kv: float  # share of the blocks in use
    generated: float  # tokens per second
    prompts: float
    answered: float  # per second
    refused: float  # per second, with a status of REFUSED
    preempted: float  # sequences per second
    ttft_p50: float  # seconds
    ttft_p95: float
    ttft_p99: float
    itl_p50: float
    itl_p95: float
    itl_p99: float
    queue: float  # seconds, means: the parts of the time to the first token
    prefill: float
    pause: float  # of requests that an engine has lost
    device: float  # seconds of a step
    waits: float
    core: float


TIME = struct.Struct("<d")  # begins a point
POINT = struct.Struct(f"<{len(Point._fields)}d")


class ServerEvent(msgspec.Struct, frozen=True, array_like=True):
    time: float  # seconds since 1970
    kind: str  # of RECORDED
    process: str  # the writer
    name: str  # in the log
    text: str  # cause and effect


class HistoryView(msgspec.Struct, frozen=True):
    """The history as JSON. Points are rows of numbers, in the order of `fields`; null: there was none."""

    fields: tuple[str, ...]
    points: list[list[float | None]]
    events: list[ServerEvent]


class Records:
    """The last records of one writer, in slots of equal size."""

    def __init__(self, memory: memoryview[int], slots: int) -> None:
        self._memory = memory
        self._slots = slots
        self._size = len(memory) // slots
        self._last = 0  # of a writer, which reads it before its first record

    def write(self, body: bytes) -> None:
        if not self._last:  # a writer's next life goes on
            self._last = max((number for number, _ in self.read()), default=0)
        self._last += 1
        begin = self._last % self._slots * self._size
        record = HEAD.pack(self._last, len(body), _checksum(self._last, body)) + body
        self._memory[begin : begin + len(record)] = record

    def read(self) -> list[tuple[int, bytes]]:
        """Returns the numbers and bodies of all whole records, in their order."""
        return sorted(self._whole(bytes(self._memory)))

    def _whole(self, memory: bytes) -> Iterator[tuple[int, bytes]]:
        for begin in range(0, self._slots * self._size, self._size):
            number, nbytes, checksum = HEAD.unpack_from(memory, begin)
            body = memory[begin + HEAD.size : begin + min(HEAD.size + nbytes, self._size)]
            if number and len(body) == nbytes and checksum == _checksum(number, body):
                yield number, body


def _checksum(number: int, body: bytes) -> int:
    return zlib.crc32(body, number & 0xFFFFFFFF)


class ServerHistory:
    """Points of the launcher, and events of each writer: the launcher is writer 0, server i is writer i + 1."""

    def __init__(self, page: lowlevel.Segment, servers: int, *, writable: bool = False) -> None:
        memory = page.view(writable=writable)
        slots = EVENTS // (servers + 1)
        self._points = Records(memory[: POINTS * (HEAD.size + POINT.size)], POINTS)
        self.events = [
            Records(memory[begin : begin + slots * EVENT_NBYTES], slots)
            for begin in range(POINTS * (HEAD.size + POINT.size), len(memory), slots * EVENT_NBYTES)
        ]

    @staticmethod
    def create(servers: int) -> lowlevel.Segment:
        events = (servers + 1) * (EVENTS // (servers + 1)) * EVENT_NBYTES
        return lowlevel.Segment.create(POINTS * (HEAD.size + POINT.size) + events, name="history")

    def add(self, point: Point) -> None:
        self._points.write(POINT.pack(*point))

    def view(self, since: float = 0.0) -> HistoryView:
        """Returns the points and events after a time, the oldest first."""
        points = [body for _, body in self._points.read() if TIME.unpack_from(body)[0] > since]
        events = [DECODER.decode(body) for records in self.events for _, body in records.read()]
        return HistoryView(
            Point._fields,
            [[round(number, 6) for number in POINT.unpack(point)] for point in points],
            sorted((event for event in events if event.time > since), key=lambda event: event.time),
        )


EVENT_NBYTES = 1 << 9
DECODER = msgspec.msgpack.Decoder(ServerEvent)


class Recorded(NamedTuple):
    """How an event of the log is shown."""

    kind: str
    text: str  # of the fields of the event
    level: int = logging.INFO  # events below are ordinary


RECORDED = {
    "serving": Recorded("server", "{model} at {url}"),
    "cluster drains": Recorded("server", "no more requests; open ones have {timeout} s"),
    "cluster failed": Recorded("server", "{reason}"),
    "process ended": Recorded("death", "{child} (pid {child_pid}) {how}", logging.ERROR),
    "process is stopped": Recorded("death", "{child} is stopped, and is killed after {killed_after} s"),
    "group lost": Recorded("death", "{unit} #{incarnation}, by cause: {cause}"),
    "requests ended with their server": Recorded("death", "server {server}, open requests: {requests}"),
    "unit starts again": Recorded("restart", "{unit} after {after} s; failed starts: {failed_starts}"),
    "unit could not be started": Recorded("restart", "{unit}: {error}"),
    "process could not be started": Recorded("restart", "{child}: {error}"),
    "engine serves again": Recorded("restart", "engine {engine} #{incarnation}, away for {away:.1f} s"),
    "group is restarted": Recorded("migration", "{unit}, as planned"),
    "migration has ended": Recorded("migration", "all engines serve"),
    "migration has failed": Recorded("migration", "{reason}"),
    "requests are resumed": Recorded("migration", "{requests} of group {group} #{incarnation}, cause {cause}: {ids}"),
    "requests go on": Recorded(
        "migration",
        "{requests} of group {group} #{incarnation}, paused for {pause:.3g} s (median), {longest:.3g} s at most; "
        "given up: {given_up}",
    ),
    "requests refused": Recorded("refusal", "{statuses} in {seconds:.0f} s"),
    "request has made its group fail": Recorded("conviction", "{request_id} in group {group}: {reason}"),
    "request is in quarantine": Recorded("conviction", "{request_id}, for {seconds} s"),
}


class EventRecorder(logging.Handler):
    """Writes the events of RECORDED in the log of this process into the history. `with` attaches it to the log."""

    def __init__(self, records: Records, process: str) -> None:
        super().__init__(logging.INFO)
        self._records = records
        self._process = process

    def emit(self, record: logging.LogRecord) -> None:
        name = record.getMessage()
        recorded = RECORDED.get(name)
        if recorded is None or record.levelno < recorded.level:
            return
        text = recorded.text.format_map(Fields(getattr(record, "fields", {})))
        cut = printable(text).encode()[:MAX_TEXT].decode(errors="ignore")
        self._records.write(
            msgspec.msgpack.encode(ServerEvent(record.created, recorded.kind, self._process, name, cut))
        )

    def __enter__(self) -> EventRecorder:
        LOGGER.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        LOGGER.removeHandler(self)


class Fields(dict[str, Any]):
    """The fields of an event; those that it lacks are a dash."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        super().__init__(fields)

    def __missing__(self, name: str) -> str:
        return "–"
