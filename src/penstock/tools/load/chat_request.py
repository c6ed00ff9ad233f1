"""One request of the load: sends it, and records the times of its events. `latency_stats` makes figures of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from penstock.tools.load.http_client import Failure, Wire
from penstock.tools.load.sse_events import SseParser, error_of, event_of, shown

MAX_WHOLE = 1 << 22  # bytes of an answer that is not streamed
MAX_REFUSAL = 1 << 16  # bytes kept of an answer that should be a stream and is not; later bytes do not count as events


@dataclass
class Outcome:
    """The outcome of a request. Times are those of `time.perf_counter`."""

    due: float  # when it was to be sent
    sent: float = 0.0
    stamps: list[float] = field(default_factory=list)  # times of the events with text
    counts: list[int] = field(default_factory=list)  # tokens so far at each of these, if the server reports usage
    done: float = 0.0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None  # None: the server has reported no usage
    has_silent_end: bool = False  # the last token ended the answer without text
    failure: Failure | None = None


class Stream:
    """Receives a streamed answer, and records its events in an outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._parser = SseParser()
        self._status = 0
        self._is_stream = False
        self._whole = bytearray()  # the body of an answer that is not a stream
        self._has_ended = False

    def begin(self, status: int, headers: dict[str, str]) -> None:
        self._status = status
        self._is_stream = status == 200 and headers.get("content-type", "").startswith("text/event-stream")

    def take(self, data: bytes, at: float) -> bool:
        if not self._is_stream:
            self._whole += data[: MAX_REFUSAL - len(self._whole)]
            return len(self._whole) < MAX_REFUSAL
        try:
            events = self._parser.feed(data)
        except ValueError as error:
            raise Failure("no events", str(error)) from None
        for event in events:
            self._event(event, at)
        return bool(events)

    def end(self) -> None:
        """Checks an answer that has ended. Raises Failure if it is an error or incomplete."""
        if self._status != 200:
            raise Failure(f"status {self._status}", self._refusal() or "no reason is given")
        if not self._is_stream:
            raise Failure("no stream", f"the answer is no stream of events: {shown(bytes(self._whole))}")
        if not self._has_ended:
            raise Failure("cut off", "the stream ended before its answer did")

    def _refusal(self) -> str:
        try:
            return error_of(event_of(bytes(self._whole))) or shown(bytes(self._whole))
        except ValueError:
            return shown(bytes(self._whole))

    def _event(self, data: bytes, at: float) -> None:
        if data == b"[DONE]":
            self._has_ended = True
            return
        try:
            event = event_of(data)
        except ValueError as error:
            raise Failure("not JSON", str(error)) from None
        if (problem := error_of(event)) is not None:
            raise Failure("error event", problem)
        outcome = self._outcome
        usage = event.usage
        if usage is not None:
            outcome.prompt_tokens = usage.prompt_tokens
            outcome.completion_tokens = usage.completion_tokens
        brings_text = False
        for choice in event.choices or ():
            brings_text = brings_text or choice.brings_text
            if choice.finish_reason is not None:
                self._has_ended = True
                outcome.has_silent_end = choice.finish_reason == "stop" and not choice.brings_text
        if brings_text:
            outcome.stamps.append(at)
            if usage is not None and usage.completion_tokens is not None:
                outcome.counts.append(usage.completion_tokens)


class Whole:
    """Receives an answer that is not streamed."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()

    def begin(self, status: int, headers: dict[str, str]) -> None:
        self.status = status

    def take(self, data: bytes, at: float) -> bool:
        self.body += data[: MAX_WHOLE - len(self.body)]
        return len(self.body) < MAX_WHOLE


async def ask(wire: Wire, path: str, body: bytes, outcome: Outcome) -> None:
    """Sends a request, and records its outcome, also a Failure. If cancelled, the outcome has no `done`."""
    stream = Stream(outcome)
    outcome.sent = time.perf_counter()
    try:
        await wire.post(path, body, stream)
        stream.end()
    except Failure as failure:
        outcome.failure = failure
    outcome.done = time.perf_counter()
