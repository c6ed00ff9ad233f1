"""Requests over HTTP and over `Client`, and their answers, in a form in which two runs of them can be compared."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from penstock.engine.client.stream import EngineError
from penstock.engine.protocol.messages import FinishReason, Logprobs
from penstock.engine.protocol.sampling_params import SamplingParams
from penstock.server.chat.streaming import likely
from tests.crash.migrating import Migrating
from tests.e2e.test_server import AUTHORIZED

LOGPROB_TOLERANCE = 1e-4
SHOWN, SHOWN_CHARACTERS = 5, 400  # of answers that differ, and of each difference
ANSWERED_WITHIN = 240.0  # seconds: restarts on a busy machine included


@dataclass
class Choice:
    """What is delivered of one sample. `logprobs`: numbers that are compared with a tolerance."""

    text: str = ""
    ids: list[int] = field(default_factory=list)  # only a `Client` shows them
    reason: str | None = None
    stop: int | str | None = None
    events: list[Any] = field(default_factory=list)  # of a stream: without id and created, and without logprobs
    logprobs: list[float] = field(default_factory=list)
    tokens: list[Any] = field(default_factory=list)  # of its log-probabilities: ids or texts, and ranks


@dataclass
class Answer:
    status: int = 200
    error: str = ""
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    raw: bytes = b""  # of a stream with one choice and no log-probabilities: its bytes without id and created
    heads: set[tuple[str, int]] = field(default_factory=set)  # id and created, of all events of a stream
    first_at: float = 0.0  # when something of the answer was delivered
    ended_at: float = 0.0

    def choice(self, index: int) -> Choice:
        return self.choices.setdefault(index, Choice())


class Progress:
    """Counts what has been delivered, so that a strike can come after a share of it."""

    def __init__(self) -> None:
        self.deliveries = 0

    def add(self, answer: Answer) -> None:
        self.deliveries += 1
        if not answer.first_at:
            answer.first_at = time.monotonic()


@dataclass
class HttpRequest:
    path: str
    body: dict[str, Any]

    @property
    def is_streamed(self) -> bool:
        return bool(self.body.get("stream"))

    def __str__(self) -> str:
        shown = {name: value for name, value in self.body.items() if name not in ("prompt", "messages")}
        return f"POST {self.path} {shown}"

    async def ask(self, engine: Migrating, salt: str, progress: Progress) -> Answer:
        answer = Answer()
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
        try:
            body = json.dumps({**self.body, "cache_salt": salt} if salt else self.body).encode()
            head = f"POST {self.path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{AUTHORIZED}"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            received = await reader.readuntil(b"\r\n\r\n")
            answer.status = int(received.split()[1])
            is_chunked = b"transfer-encoding: chunked" in received.lower()
            pieces = []
            async for piece in _chunks(reader) if is_chunked else _whole(reader):
                progress.add(answer)
                pieces.append(piece)
            data = b"".join(pieces)
            if answer.status != 200:
                answer.error = data.decode(errors="replace")
            elif self.is_streamed:
                self._read_events(answer, data)
            else:
                self._read_whole(answer, json.loads(data, parse_float=_Float))
        except (OSError, asyncio.IncompleteReadError) as error:
            answer.error = f"cut off: {error!r}"
        finally:
            writer.transport.abort()
        answer.ended_at = time.monotonic()
        return answer

    def _read_whole(self, answer: Answer, body: dict[str, Any]) -> None:
        answer.usage = body["usage"]
        for fields in body["choices"]:
            choice = answer.choice(fields["index"])
            choice.text = fields["text"] if "text" in fields else fields["message"]["content"]
            choice.reason, choice.stop = fields["finish_reason"], fields["stop_reason"]
            choice.tokens = _without_floats(fields["logprobs"], choice.logprobs)

    def _read_events(self, answer: Answer, data: bytes) -> None:
        if not data.endswith(b"data: [DONE]\n\n"):
            answer.error = f"the stream ends with {data[-300:]!r}"
            return
        lines = data.split(b"\n\n")
        for line in lines[:-2]:  # [DONE], and nothing behind it
            if not line.startswith(b"data: {"):
                answer.error = f"not an event: {line!r}"
                return
            event = json.loads(line[6:], parse_float=_Float)
            if "error" in event:
                answer.error = event["error"]["message"]
                return
            answer.heads.add((event.pop("id"), event.pop("created")))
            if not event["choices"]:
                answer.usage = event["usage"]
                continue
            (fields,) = event["choices"]
            choice = answer.choice(fields["index"])
            choice.text += fields["text"] if "text" in fields else fields["delta"].get("content", "")
            choice.reason = fields["finish_reason"] or choice.reason
            choice.events.append(_without_floats(event, choice.logprobs))
        if len(answer.choices) == 1 and not self.body.get("logprobs"):
            answer.raw = b"\n\n".join(_HEAD.sub(b"", line, count=2) for line in lines if b'"choices":[]' not in line)


_HEAD = re.compile(rb'"id":"[^"]*",|"created":\d+,')


class _Float(float):
    """A number that JSON writes with a point: of log-probabilities only."""


def _without_floats(value: Any, floats: list[float]) -> Any:
    """Returns the value with None in place of each float, and appends the floats in order."""
    if isinstance(value, _Float):
        floats.append(float(value))
        return None
    if isinstance(value, dict):
        return {name: _without_floats(item, floats) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_floats(item, floats) for item in value]
    return value


async def _whole(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    yield await reader.read()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while nbytes := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(nbytes + 2))[:-2]
    await reader.readexactly(2)


@dataclass
class ClientRequest:
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    images: tuple[Any, ...] = ()

    is_streamed = True

    def __str__(self) -> str:
        params = {
            name: value
            for name, value in msgspec.structs.asdict(self.params).items()
            if value != getattr(SamplingParams(), name)
        }
        return f"Client, prompt of {len(self.prompt)}, {len(self.images)} images, {params}"

    async def ask(self, engine: Migrating, salt: str, progress: Progress) -> Answer:
        answer = Answer()
        try:
            stream = await engine.engine_client.submit(
                self.prompt, self.params, values=self.images, priority=self.priority, salt=salt.encode()
            )
            async with stream:
                async for piece in stream:
                    progress.add(answer)
                    choice = answer.choice(piece.sample)
                    assert choice.reason is None, "a chunk after the end of its sample"
                    choice.ids += piece.ids
                    choice.text += piece.utf8.decode(errors="surrogateescape")
                    choice.stop = piece.stop
                    choice.reason = None if piece.reason is None else FinishReason(piece.reason).name
                    if piece.logprobs is not None:
                        _keep_logprobs(choice, piece.logprobs)
        except EngineError as error:
            answer.status, answer.error = error.status, error.reason
        else:
            answer.usage = {
                "prompt_tokens": stream.prompt_tokens,
                "completion_tokens": stream.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": stream.cached_tokens},
            }
            assert stream.completion_tokens == sum(len(choice.ids) for choice in answer.choices.values())
        answer.ended_at = time.monotonic()
        return answer


def _keep_logprobs(choice: Choice, logprobs: Logprobs) -> None:
    choice.tokens += [[token_id for token_id, _ in row] for row in likely(logprobs)]
    choice.tokens += logprobs.ranks.tolist()
    choice.logprobs += [value for row in likely(logprobs) for _, value in row]


AnyRequest = HttpRequest | ClientRequest


# ── the comparison ───────────────────────────────────────────────────────────────────────────────────────────────────
def differences(undisturbed: Answer, disturbed: Answer) -> list[str]:
    """Returns what differs, in words; nothing if all that a client may rely on is equal."""
    if disturbed.error or undisturbed.error:
        return [f"status {disturbed.status}: {disturbed.error or 'answered'}; undisturbed: {undisturbed.error}"]
    differences_of = []
    if len(disturbed.heads) > 1:
        differences_of.append(f"id and created are not constant: {disturbed.heads}")
    if set(disturbed.choices) != set(undisturbed.choices):
        return [*differences_of, f"choices {set(disturbed.choices)} for {set(undisturbed.choices)}"]
    for index, choice in undisturbed.choices.items():
        actual = disturbed.choices[index]
        for name in ("ids", "text", "reason", "stop", "tokens", "events"):
            differences_of += _difference(f"choice {index}: {name}", getattr(choice, name), getattr(actual, name))
        if len(actual.logprobs) != len(choice.logprobs):
            differences_of.append(
                f"choice {index}: {len(actual.logprobs)} log-probabilities for {len(choice.logprobs)}"
            )
        elif choice.logprobs and (worst := float(np.abs(np.subtract(actual.logprobs, choice.logprobs)).max())) > (
            LOGPROB_TOLERANCE
        ):
            differences_of.append(f"choice {index}: log-probabilities differ by {worst:g}")
    differences_of += _difference("bytes", undisturbed.raw, disturbed.raw)
    (want_usage, want_cached), (got_usage, got_cached) = (_usage(each) for each in (undisturbed, disturbed))
    differences_of += _difference("usage", want_usage, got_usage)
    if not 0 <= got_cached <= got_usage["prompt_tokens"]:
        differences_of.append(
            f"cached_tokens are {got_cached}, undisturbed {want_cached}, of {got_usage['prompt_tokens']}"
        )
    return differences_of


def _usage(answer: Answer) -> tuple[dict[str, Any], int]:
    usage = dict(answer.usage)
    return usage, usage.pop("prompt_tokens_details")["cached_tokens"]


def _difference(name: str, expected: Any, actual: Any) -> list[str]:
    if expected == actual:
        return []
    if not isinstance(expected, (str, bytes, list)):
        return [f"{name}: {actual!r} for {expected!r}"]
    at = next((at for at, pair in enumerate(zip(expected, actual, strict=False)) if pair[0] != pair[1]), -1)
    at = min(len(expected), len(actual)) if at < 0 else at
    around = slice(max(0, at - 3), at + 6)
    return [
        f"{name}: differs at {at} of {len(expected)} ({len(actual)} came): {actual[around]!r} for {expected[around]!r}"
    ]


def require_equal(requests: Sequence[AnyRequest], undisturbed: Sequence[Answer], disturbed: Sequence[Answer]) -> None:
    """Fails with what differs, of the first requests of which something does."""
    wrong = [
        f"{request}\n    " + "\n    ".join(line[:SHOWN_CHARACTERS] for line in lines)
        for request, expected, actual in zip(requests, undisturbed, disturbed, strict=True)
        if (lines := differences(expected, actual))
    ]
    assert not wrong, f"{len(wrong)} of {len(requests)} answers differ:\n" + "\n".join(wrong[:SHOWN])


async def ask_all(engine: Migrating, requests: Sequence[AnyRequest], salt: str, progress: Progress) -> list[Answer]:
    tasks = [asyncio.ensure_future(request.ask(engine, salt, progress)) for request in requests]
    try:
        _, late = await asyncio.wait(tasks, timeout=ANSWERED_WITHIN)
        assert not late, f"{len(late)} of {len(tasks)} requests were not answered within {ANSWERED_WITHIN:g} s"
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
