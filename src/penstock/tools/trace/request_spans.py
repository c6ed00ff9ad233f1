"""Spans of requests in a trace of an engine: queue, prefill, decode, preemption and migration, by request id.

Taps read the messages to cores, to workers and to servers, so processes do nothing for it. `RequestReader` collects
what the messages say of requests, channel by channel; `requests_of` puts that in order of time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.codec.catalogue import Catalogue
from penstock.codec.frame import MessageCodec
from penstock.errors import DecodeError
from penstock.tools.format import counted, in_seconds

ANSWER_PREFIXES = ("chatcmpl-", "cmpl-")  # of the id in an answer: a request id follows
ENDS = ("aborted", "failed")  # marks without a duration
Key = tuple[int, int]  # server, and the number that it has given


class Note(NamedTuple):
    """What one message says. `group`: of an inbox or of steps; of deltas, the server."""

    ns: int
    group: int
    message: Any


class Span(NamedTuple):
    name: str
    begin_ns: int
    end_ns: int


@dataclass
class TracedRequest:
    """A request while it was traced. Without a `Submit` in the trace it has no id, and begins with its first message.

    A request that a group has lost goes on under another number, and is the same request.
    """

    server: int
    id: str
    begin_ns: int
    prompt: int = 0  # tokens
    samples: int = 1
    tokens: int = 0  # generated while it was traced
    longest_gap_ns: int = 0  # between two messages with tokens
    spans: list[Span] = field(default_factory=list)
    end_ns: int = 0  # 0: it has not ended
    open_samples: int = 1
    last_ns: int = 0  # of the last tokens
    preempted: set[int] = field(default_factory=set)  # slots
    _since: dict[str, int] = field(default_factory=dict)  # begin of each span that is open

    @property
    def title(self) -> str:
        return f"{self.id} of server {self.server}"

    def begin(self, name: str, ns: int) -> None:
        self._since.setdefault(name, ns)

    def finish(self, name: str, ns: int) -> bool:
        """Ends a span. Returns whether it was open."""
        since = self._since.pop(name, None)
        if since is not None:
            self.spans.append(Span(name, since, max(ns, since)))
        return since is not None

    def close(self, ns: int) -> None:
        """Ends all spans that are open."""
        for name in tuple(self._since):
            self.finish(name, ns)

    @property
    def seconds_by_phase(self) -> dict[str, float]:
        """Returns the time of each phase. A moment counts once: prefill and decode without preemption."""
        phases: dict[str, float] = {}
        paused = [span for span in self.spans if span.name == "preempted"]
        for span in self.spans:
            ns = span.end_ns - span.begin_ns
            if span.name in ("prefill", "decode"):
                ns -= sum(max(min(span.end_ns, p.end_ns) - max(span.begin_ns, p.begin_ns), 0) for p in paused)
            if span.name not in ENDS:
                phases[span.name] = phases.get(span.name, 0.0) + ns / 1e9
        return phases

    def lines(self) -> Iterator[str]:
        end = next((f", {span.name}" for span in self.spans if span.name in ENDS), "" if self.end_ns else ", not ended")
        ns = max((span.end_ns for span in self.spans), default=self.begin_ns) - self.begin_ns
        samples = f", {self.samples} samples" if self.samples > 1 else ""
        yield f"request {self.title}: {in_seconds(ns)}{end}, prompt of {counted(self.prompt, 'token')}{samples}"
        for name, seconds in self.seconds_by_phase.items():
            about = f"  {counted(self.tokens, 'token')}, longest gap {in_seconds(self.longest_gap_ns)}"
            yield f"  {in_seconds(seconds * 1e9):>8}  {name}{about if name == 'decode' else ''}"


class RequestReader:
    """Collects the messages of channels about requests. `watched`: the id of the request to watch for."""

    def __init__(self, watched: str | None = None) -> None:
        self.watched = None if watched is None else bare_id(watched)
        self.has_ended = False  # all samples of the watched request have
        self._notes: list[Note] = []
        self._open: dict[Key, int] = {}  # samples of the watched request, by server and `arrived_ns` of each prompt
        self._arrivals: dict[Key, Key] = {}  # of the watched request, by its numbers
        self._codecs: dict[bytes, MessageCodec] = {}
        try:  # the data plane may be installed without the engine
            from penstock.engine.protocol import messages
        except ImportError:
            return
        for union in (messages.INBOX, messages.STEPS, messages.DELTAS):
            codec = MessageCodec(Catalogue.of(union))
            self._codecs[codec.schema()] = codec

    def has_requests(self, schema: bytes) -> bool:
        return schema in self._codecs

    def read(self, schema: bytes, channel: str, ns: int, frame: bytes) -> None:
        try:
            message = self._codecs[schema].decode(frame)
            note = Note(ns, int(channel.rpartition(" ")[2]), message)
        except (DecodeError, ValueError):
            return
        self._notes.append(note)
        if self.watched is not None:
            self._watch(note)

    def _watch(self, note: Note) -> None:
        message, kind = note.message, type(note.message).__name__
        if kind == "Submit" and message.request_id == self.watched:
            arrival = self._arrivals[message.server, message.request] = message.server, message.arrived_ns
            self._open[arrival] = open_samples(message)
        elif kind == "Delta" and message.finished is not None:
            for row in message.finished.rows.tolist():
                self._close((note.group, int(message.requests[row])), 1)
        elif kind == "Abort" and message.samples is None:
            for number in message.requests.tolist():
                self._close((message.server, number))
        elif kind == "Failed" and is_final(message):
            self._close((note.group, message.request))
        self.has_ended = bool(self._open) and not any(self._open.values())

    def _close(self, key: Key, samples: int | None = None) -> None:
        """Notes that samples of a request have ended. None: all."""
        arrival = self._arrivals.get(key)
        if arrival is not None:
            self._open[arrival] -= self._open[arrival] if samples is None else samples

    def requests(self, ended_ns: int) -> list[TracedRequest]:
        """Returns all requests, or the watched one, in the order of their first message. `ended_ns`: of the trace."""
        requests = RequestSpans(sorted(self._notes, key=lambda note: note.ns)).requests
        for request in requests:
            request.close(request.end_ns or ended_ns)
        return [request for request in requests if self.watched in (None, request.id)]


class RequestSpans:
    """Follows requests through messages in order of time."""

    def __init__(self, notes: Iterable[Note]) -> None:
        self.requests: list[TracedRequest] = []
        self._by_key: dict[Key, TracedRequest] = {}
        self._by_arrival: dict[Key, TracedRequest] = {}  # by server and `arrived_ns`, which a resumed request keeps
        self._slots: dict[tuple[int, int], TracedRequest] = {}  # by group and slot
        handlers: dict[str, Any] = {
            "Submit": self._submit, "Abort": self._abort, "Begin": self._begin, "Step": self._step,
            "Delta": self._delta, "Failed": self._failed,
        }  # fmt: skip
        for note in notes:
            handler = handlers.get(type(note.message).__name__)
            if handler is not None:
                handler(note.ns, note.group, note.message)

    def _new(self, key: Key, id: str, ns: int) -> TracedRequest:
        request = self._by_key[key] = TracedRequest(key[0], id, ns)
        self.requests.append(request)
        return request

    def _submit(self, ns: int, group: int, submit: Any) -> None:
        key, arrival = (submit.server, submit.request), (submit.server, submit.arrived_ns)
        request = self._by_arrival.get(arrival)
        if request is None:
            request = self._by_arrival[arrival] = self._new(key, submit.request_id or f"#{submit.request}", ns)
            request.begin("queue", ns)
        else:  # its group was lost
            request.close(request.last_ns or ns)
            request.preempted.clear()
            request.begin("migration", request.last_ns or request.begin_ns)
            self._by_key[key] = request
        request.prompt, request.samples, request.open_samples = (
            submit.prompt.size,
            submit.params.n,
            open_samples(submit),
        )

    def _abort(self, ns: int, group: int, abort: Any) -> None:
        if abort.samples is None:
            for number in abort.requests.tolist():
                self._end((abort.server, number), ns, "aborted")

    def _failed(self, ns: int, server: int, failed: Any) -> None:
        if is_final(failed):
            self._end((server, failed.request), ns, "failed")

    def _end(self, key: Key, ns: int, name: str = "") -> None:
        request = self._by_key.pop(key, None)
        if request is not None:
            request.end_ns = ns
            request.close(ns)
            if name:
                request.spans.append(Span(name, ns, ns))

    def _begin(self, ns: int, group: int, begin: Any) -> None:
        self._slots = {place: request for place, request in self._slots.items() if place[0] != group}

    def _step(self, ns: int, group: int, step: Any) -> None:
        for slot in () if step.left is None else step.left.tolist():
            self._go_on(group, slot, ns)
            self._slots.pop((group, slot), None)
        for slot in () if step.preempted is None else step.preempted.tolist():
            if (group, slot) in self._slots:
                self._slots[group, slot].preempted.add(slot)
                self._slots[group, slot].begin("preempted", ns)
        for slot in () if step.resumed is None else step.resumed.slots.tolist():
            self._go_on(group, slot, ns)
        if step.joined is not None:
            numbers = step.joined.requests.tolist()
            servers = [0] * len(numbers) if step.joined.servers is None else step.joined.servers.tolist()
            for slot, key in zip(step.joined.slots.tolist(), zip(servers, numbers, strict=True), strict=True):
                request = self._by_key.get(key)
                if request is not None:
                    self._slots[group, slot] = request
                    if request.finish("queue", ns):
                        request.begin("prefill", ns)

    def _go_on(self, group: int, slot: int, ns: int) -> None:
        """A sample that may have been preempted is in the batch again, or has ended."""
        request = self._slots.get((group, slot))
        if request is not None:
            request.preempted.discard(slot)
            if not request.preempted:
                request.finish("preempted", ns)

    def _delta(self, ns: int, server: int, delta: Any) -> None:
        counts = [1] * delta.rows if delta.counts is None else delta.counts.tolist()
        for number, tokens in zip(delta.requests.tolist(), counts, strict=True):
            key = server, number
            request = self._by_key.get(key) or self._new(key, f"#{number}", ns)
            for name in ("queue", "prefill"):  # a bridge sends no steps: then the queue ends here
                request.finish(name, ns)
            if not request.finish("migration", ns) and request.last_ns:
                request.longest_gap_ns = max(request.longest_gap_ns, ns - request.last_ns)
            request.begin("decode", ns)
            request.tokens += tokens
            request.last_ns = ns
        if delta.finished is not None:
            for row in delta.finished.rows.tolist():
                key = server, int(delta.requests[row])
                request = self._by_key[key]
                request.open_samples -= 1
                if request.open_samples <= 0:
                    self._end(key, ns)


def is_final(failed: Any) -> bool:
    """Returns whether a failed request is not submitted again."""
    return failed.resume is None or failed.resume.name == "TRIAL_REFUSED"


def open_samples(submit: Any) -> int:
    """Returns how many samples of a request are not over when it is submitted."""
    counts = [] if submit.progress is None else submit.progress.counts.tolist()
    return int(submit.params.n - sum(count < 0 for count in counts))


def bare_id(request_id: str) -> str:
    """Returns the request id of an answer's id."""
    return next((request_id.removeprefix(p) for p in ANSWER_PREFIXES if request_id.startswith(p)), request_id)


def rows_of(requests: Iterable[TracedRequest]) -> list[dict[str, Any]]:
    """Returns the requests for JSON."""
    return [
        {
            "id": request.id,
            "server": request.server,
            "prompt": request.prompt,
            "tokens": request.tokens,
            "longest_gap_ns": request.longest_gap_ns,
            "has_ended": bool(request.end_ns),
            "seconds": request.seconds_by_phase,
        }
        for request in requests
    ]
