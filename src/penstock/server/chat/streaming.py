"""Answers to a client: as server-sent events while they are generated, or whole.

The output processors write the lines of a stream, and the server passes them on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.engine.client.stream import EngineError, IdleSocket, OutputChunk, OutputStream
from penstock.engine.cluster.logs import event
from penstock.engine.protocol.messages import AnswerFormat, FinishReason, Logprobs
from penstock.engine.text.detokenizer import Vocabulary
from penstock.engine.text.sse_chunks import LEAST_LOGPROB
from penstock.server.chat.answer_formats import build_message
from penstock.server.chat.latency_recorder import LatencyRecorder
from penstock.server.errors import ApiError, Gone
from penstock.tensor import Scope as ImageScope

T = TypeVar("T")

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx keeps the events back
]
DONE = b"data: [DONE]\n\n"
CLIENT_CONNECTION = "penstock.client_connection"  # ASGI extension: a ClientConnection


def engine_failed(error: EngineError, request_id: str) -> ApiError:
    """Returns the error for the client. An error of status 500 or above is also logged, with the same id."""
    if error.status >= 500:
        level = logging.ERROR if error.status == 500 else logging.WARNING
        event("request failed", level, request_id=request_id, status=error.status, error=error.reason)
    return ApiError.of(error, request_id)


async def cancel_on_disconnect(scope: Scope, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. Cancels it, and raises Gone, as soon as the client of the request disconnects.

    `work` runs in the task of the caller, and no task waits for the client: either task would be a tenth of the time of
    a short request.
    """
    task = asyncio.current_task()
    assert task is not None, "a coroutine of the event loop"
    connection: ClientConnection = scope["extensions"][CLIENT_CONNECTION]
    is_working, is_gone, cancels = True, False, 0

    def cancel() -> None:
        nonlocal is_gone, cancels
        if is_working and not is_gone:
            is_gone = True
            cancels += task.cancel()

    before = connection.on_disconnect(cancel)
    try:
        result = await work
    except (Exception, asyncio.CancelledError):
        if not is_gone:
            raise
    finally:
        is_working = False
        connection.on_disconnect(before)
    if not is_gone:
        return result
    if cancels and sys.version_info >= (3, 11):
        task.uncancel()
    raise Gone  # even if the work is done, too: a send to the client may end because it disconnected


def usage_of(*streams: OutputStream) -> dict[str, Any]:
    prompt = sum(stream.prompt_tokens for stream in streams)
    completion = sum(stream.completion_tokens for stream in streams)
    cached = sum(stream.cached_tokens for stream in streams)
    reasoning = sum(stream.reasoning_tokens for stream in streams)
    details = {"completion_tokens_details": {"reasoning_tokens": reasoning}} if reasoning else {}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        **details,
    }


# ── the prompts of a request ─────────────────────────────────────────────────────────────────────────────────────────
class RequestStreams:
    """The streams of one request's prompts, at most `max_open` of them open at a time: other slots are for others."""

    def __init__(
        self,
        submits: Sequence[Callable[[], Awaitable[OutputStream]]],
        max_open: int,
        scopes: Sequence[ImageScope] = (),
    ) -> None:
        """`scopes` hold the images of all prompts, also of those that are never submitted."""
        self.streams: dict[int, OutputStream] = {}  # of the prompts that have been submitted, by their numbers
        self._submits = submits
        self._scopes = scopes
        self._max_open = max_open

    @property
    def is_single(self) -> bool:
        return len(self._submits) == 1

    def release(self) -> None:
        for scope in self._scopes:
            scope.release()

    async def chunks(self) -> AsyncGenerator[tuple[int, OutputChunk], None]:
        """Yields the number of a prompt and a chunk of its answer. Aborts all streams when it ends, however it ends.

        Raises EngineError.
        """
        if self.is_single:  # as most requests are: each chunk goes through one generator less
            async with await self._submits[0]() as stream:
                self.streams[0] = stream
                async for chunk in stream:
                    yield 0, chunk
            return
        queue: asyncio.Queue[tuple[int, OutputChunk | Exception | None]] = asyncio.Queue(1)
        room = asyncio.Semaphore(self._max_open)
        pumps = [asyncio.ensure_future(self._pump(prompt, queue, room)) for prompt in range(len(self._submits))]
        left = len(pumps)
        try:
            while left:
                prompt, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield prompt, item
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self, prompt: int, queue: asyncio.Queue[tuple[int, OutputChunk | Exception | None]], room: asyncio.Semaphore
    ) -> None:
        try:
            async with room, await self._submits[prompt]() as stream:
                self.streams[prompt] = stream
                async for chunk in stream:
                    await queue.put((prompt, chunk))
            await queue.put((prompt, None))
        except Exception as error:
            await queue.put((prompt, error))


# ── past all middleware ──────────────────────────────────────────────────────────────────────────────────────────────
class ClientConnection(Protocol):
    """Says when the client goes, and writes parts of a body that has begun: past all middleware and without a task.
    `HttpExchange` is one."""

    def on_disconnect(self, call: Callable[[], None] | None) -> Callable[[], None] | None:
        """Has the event loop call `call` when the client disconnects, or if it has. Returns the one before."""

    def write_chunk(self, body: bytes) -> bool:
        """Returns False if the application must send the chunk."""

    def idle_socket(self, leave: Callable[[], None]) -> tuple[int, bool] | None:
        """Returns the descriptor of a connection without unsent bytes, and whether a chunk is framed. Calls `leave`
        before the connection is closed. None: there is none."""

    def write_rest(self, body: bytes, sent: int) -> None:
        """Writes a chunk of which the socket has taken `sent` bytes, framing included."""


class ChunkDelivery:
    """Passes the chunks of a stream on while its reader waits."""

    def __init__(self, stream: OutputStream, writer: ClientConnection, latencies: LatencyRecorder) -> None:
        self._stream = stream
        self._writer = writer
        self._latencies = latencies

    def write(self, chunk: OutputChunk) -> bool:
        if chunk.utf8 and not self._writer.write_chunk(chunk.utf8):
            return False
        self._latencies.chunk(self._stream, chunk)
        return True

    def idle_socket(self, leave: Callable[[], None]) -> IdleSocket | None:
        counters = self._latencies.socket_counters(self._stream)
        socket = None if counters is None else self._writer.idle_socket(leave)
        return None if socket is None or counters is None else IdleSocket(*socket, *counters)

    def write_rest(self, text: bytes, sent: int) -> None:
        self._writer.write_rest(text, sent)

    def count(self, tokens: int, last: float) -> None:
        self._latencies.count_sent(self._stream, tokens, last)


# ── as it comes ──────────────────────────────────────────────────────────────────────────────────────────────────────
class SSEResponse:
    """An answer of complete SSE lines. An engine error before the first chunk is raised; a later one is an event.

    A client that reads slowly holds up its own answer only: the stream keeps what it has not taken, up to a bound.
    """

    def __init__(
        self,
        batch: RequestStreams,
        head: bytes,
        includes_usage: bool,
        latencies: LatencyRecorder,
        request_id: str,
        first: bytes = b"",
    ) -> None:
        """`first`: chunks before those of the engine."""
        self._first = first
        self.status_code = 200  # for the counters: an error after the head was sent changes it
        self._batch = batch
        self._head = head
        self._includes_usage = includes_usage
        self._latencies = latencies
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            last = await cancel_on_disconnect(scope, self._send_chunks(send, scope["extensions"][CLIENT_CONNECTION]))
        finally:
            self._batch.release()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    # ── what a subclass writes otherwise ──
    is_verbatim = True  # the bytes of a chunk are its text

    def begin(self) -> bytes:
        """Returns the bytes before the first chunk, which has come."""
        return self._first

    def translate(self, chunk: OutputChunk) -> bytes:
        return chunk.utf8

    def end(self) -> bytes:
        """Returns the bytes behind a complete answer."""
        if not self._includes_usage:
            return DONE
        usage = msgspec.json.encode(usage_of(*self._batch.streams.values()))
        return b'data: %b,"choices":[],"usage":%b}\n\n%b' % (self._head, usage, DONE)

    def fail(self, error: ApiError) -> bytes:
        """Returns the bytes behind an incomplete answer."""
        return b"data: %b\n\n" % error.body

    # ── events ──
    async def _send_chunks(self, send: Send, writer: ClientConnection) -> bytes:
        """Sends all events but the last ones, which it returns: one write less for each answer. `writer` sends without
        this task."""
        has_begun, last = False, b""
        try:
            with self._latencies.watching(self._batch.streams):
                async with contextlib.aclosing(self._batch.chunks()) as chunks:
                    async for prompt, chunk in chunks:
                        stream = self._batch.streams[prompt]
                        self._latencies.chunk(stream, chunk)
                        if not has_begun:
                            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                            if first := self.begin():
                                await send({"type": "http.response.body", "body": first, "more_body": True})
                            has_begun = True
                            if self._batch.is_single and self.is_verbatim:
                                stream.deliver_to(ChunkDelivery(stream, writer, self._latencies))
                        body = self.translate(chunk)
                        if self._batch.is_single and stream.is_over:
                            last += body
                        elif body:
                            await send({"type": "http.response.body", "body": body, "more_body": True})
            return last + self.end()
        except EngineError as error:
            if not has_begun:
                raise
            self.status_code = error.status
            return last + self.fail(engine_failed(error, self._request_id))


# ── whole ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class StreamedChoice:
    """One sample of an answer that is not streamed, assembled from its chunks."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._length = 0
        self.ids: list[int] = []
        self._logprobs: list[tuple[int, list[tuple[int, float]]]] = []  # where its text begins, and what was likely
        self.reason: FinishReason | None = None
        self.stop: int | str | None = None

    def add(self, chunk: OutputChunk) -> None:
        if chunk.logprobs is not None:
            self._logprobs += [(self._length, row) for row in likely(chunk.logprobs)]
        text = chunk.text
        self.ids += chunk.ids
        self._texts.append(text)
        self._length += len(text)
        if chunk.reason is not None:
            self.reason, self.stop = chunk.reason, chunk.stop

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def _finish(self) -> dict[str, Any]:
        return {"finish_reason": self.reason and self.reason.name.lower(), "stop_reason": self.stop}

    def of_chat(
        self, index: int, vocabulary: Vocabulary | None, answer_format: AnswerFormat | None = None
    ) -> dict[str, Any]:
        """`answer_format`: None where all text is content. A chat has one prompt, so the index is the sample's."""
        message, finish = build_message(answer_format, self.text, index), self._finish()
        if "tool_calls" in message and self.reason == FinishReason.STOP:
            finish["finish_reason"] = "tool_calls"
        return {
            "index": index,
            "message": message,
            "logprobs": None if vocabulary is None else {"content": self._content_logprobs(vocabulary)},
            **finish,
        }

    def _content_logprobs(self, vocabulary: Vocabulary) -> list[dict[str, Any]]:
        content = []
        for _, row in self._logprobs:
            first, *others = (
                {
                    "token": token_text(vocabulary, token_id),
                    "logprob": value,
                    "bytes": list(vocabulary.token_bytes(token_id)),
                }
                for token_id, value in row
            )
            content.append({**first, "top_logprobs": others})
        return content

    def of_completion(self, index: int, vocabulary: Vocabulary | None) -> dict[str, Any]:
        logprobs = None
        if vocabulary is not None:
            rows = [row for _, row in self._logprobs]
            logprobs = {
                "text_offset": [offset for offset, _ in self._logprobs],
                "tokens": [token_text(vocabulary, row[0][0]) for row in rows],
                "token_logprobs": [row[0][1] for row in rows],
                "top_logprobs": [{token_text(vocabulary, token_id): value for token_id, value in row} for row in rows],
            }
        return {"index": index, "text": self.text, "logprobs": logprobs, **self._finish()}


def token_text(vocabulary: Vocabulary, token_id: int) -> str:
    return vocabulary.token_bytes(token_id).decode(errors="replace")


def likely(logprobs: Logprobs) -> Iterator[list[tuple[int, float]]]:
    """Yields the (id, log-probability) pairs of each sampled token: itself first, then the likeliest."""
    tokens = logprobs.ranks.size
    counts = [logprobs.ids.size // tokens] * tokens if logprobs.counts is None else logprobs.counts.tolist()
    values = [max(value, LEAST_LOGPROB) for value in logprobs.values.tolist()]
    pairs = list(zip(logprobs.ids.tolist(), values, strict=True))
    at = 0
    for count in counts:
        yield pairs[at : at + count]
        at += count


async def collect(
    batch: RequestStreams, prompts: int, samples: int, latencies: LatencyRecorder
) -> list[StreamedChoice]:
    """Returns the choices of all prompts, in order. Raises EngineError if one stays incomplete."""
    choices = [StreamedChoice() for _ in range(prompts * samples)]
    with latencies.watching(batch.streams):
        async with contextlib.aclosing(batch.chunks()) as chunks:
            async for prompt, chunk in chunks:
                latencies.chunk(batch.streams[prompt], chunk)
                choices[prompt * samples + chunk.sample].add(chunk)
    return choices


def json_response(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
