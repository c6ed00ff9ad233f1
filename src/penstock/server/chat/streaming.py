"""Answers to a client: as server-sent events while they are generated, or whole.

The output processors write the lines of a stream, and the server passes them on.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from penstock.engine.client.stream import EngineError, OutputChunk, OutputStream
from penstock.engine.cluster.logs import event
from penstock.engine.protocol.messages import FinishReason, Logprobs
from penstock.engine.text.detokenizer import Vocabulary
from penstock.engine.text.sse_chunks import LEAST_LOGPROB
from penstock.server.errors import ApiError, Gone
from penstock.server.status.counters import ProcessCounters, Served
from penstock.tensor import Scope as ImageScope

T = TypeVar("T")

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx keeps the events back
]
DONE = b"data: [DONE]\n\n"
WRITE_CHUNK = "penstock.write_chunk"  # ASGI extension: `HttpExchange.write_chunk`


def engine_failed(error: EngineError, request_id: str) -> ApiError:
    """Returns the error for the client. An error of status 500 or above is also logged, with the same id."""
    if error.status >= 500:
        level = logging.ERROR if error.status == 500 else logging.WARNING
        event("request failed", level, request_id=request_id, status=error.status, error=error.reason)
    return ApiError.of(error, request_id)


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. Cancels it, and raises Gone, as soon as the client disconnects.

    `work` must not end the response: after that, `receive` reports every client as disconnected. It runs in the task of
    the caller: a task of its own would be a tenth of the time of a short request.
    """
    task = asyncio.current_task()
    assert task is not None, "a coroutine of the event loop"
    watching = asyncio.ensure_future(_until_gone(receive))
    is_working, cancels = True, 0

    def cancel(_: asyncio.Future[None]) -> None:
        nonlocal cancels
        if is_working:
            cancels += task.cancel()

    watching.add_done_callback(cancel)
    try:
        result = await work
    except (Exception, asyncio.CancelledError):
        if not watching.done():
            raise
    finally:
        is_working = False
        is_gone = watching.done()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    if not is_gone:
        return result
    if cancels and sys.version_info >= (3, 11):
        task.uncancel()
    raise Gone  # even if the work is done, too: a send to the client may end because it disconnected


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Times:
    """Times of one sequence: of its first and its last token, and numbers of tokens: of the first chunk, and later."""

    __slots__ = ("engine", "first", "first_tokens", "last", "later_tokens")

    def __init__(self, engine: Served, now: float, tokens: int) -> None:
        self.engine = engine
        self.first = self.last = now
        self.first_tokens, self.later_tokens = tokens, 0

    @property
    def mean(self) -> float:
        """Returns the mean seconds from a token to the next; 0 for a single token."""
        return (self.last - self.first) / max(self.later_tokens, 1)


class LatencyRecorder:
    """Records tokens, latencies and ends of an answer, for each of its sequences and by engine, as vLLM does.

    Times are those at which chunks are passed on: they include the delay of a client that reads slowly.
    """

    def __init__(self, row: ProcessCounters, began: float, logged_id: str | None = None) -> None:
        """`logged_id`: of the request, which is logged when it ends; None: it is not."""
        self._logged_id = logged_id
        self._row = row
        self._began = began
        self._times: dict[tuple[OutputStream, int], _Times] = {}  # by sample of a stream
        self._reasons: set[str] = set()
        self._ended: Counter[OutputStream] = Counter()  # samples of each stream
        self._longest: Counter[OutputStream] = Counter()  # tokens of a sample of each stream

    def chunk(self, stream: OutputStream, chunk: OutputChunk) -> None:
        now, many = time.monotonic(), len(chunk.ids)
        key = stream, chunk.sample
        times = self._times.get(key)
        if times is not None and many:
            times.engine.words[Served.GENERATION_TOKENS] += many
            Served.INTER_TOKEN.observe(times.engine.words, (now - times.last) / many, many)
            times.last = now
            times.later_tokens += many
        elif many:
            engine = self._row.engines[stream.group]
            times = self._times[key] = _Times(engine, now, many)
            engine.words[Served.GENERATION_TOKENS] += many
            Served.FIRST_TOKEN.observe(engine.words, now - self._began)
            engine[Served.PROMPT_TOKENS] += stream.prompt_tokens
            engine[Served.PROMPT_TOKENS_CACHED] += stream.cached_tokens
        if chunk.reason is not None:
            engine = self._row.engines[stream.group]
            self._ended[stream] += 1
            Served.REQUEST.observe(engine.words, now - self._began)
            Served.PER_OUTPUT_TOKEN.observe(engine.words, times.mean if times is not None else 0.0)
            self._count_lengths(stream, engine, 0 if times is None else times.first_tokens + times.later_tokens)
            reason = chunk.reason.name.lower()
            self._reasons.add(reason)
            engine.finish(reason)

    def _count_lengths(self, stream: OutputStream, engine: Served, tokens: int) -> None:
        longest = self._longest[stream] = max(self._longest[stream], tokens)
        Served.PROMPT_LENGTHS.observe(engine.words, stream.prompt_tokens)
        Served.GENERATED_LENGTHS.observe(engine.words, tokens)
        if self._ended[stream] == stream.samples:
            Served.LONGEST_LENGTHS.observe(engine.words, longest)

    @contextlib.contextmanager
    def watching(self, batch: RequestStreams) -> Iterator[None]:
        """Counts the sequences that do not end in the block, by an error of the engine or because the client left."""
        reason = ""
        try:
            yield
        except EngineError as error:
            reason = "error"
            if error.status >= 500:
                self._give_up(batch, "error")
            raise
        except BaseException:
            reason = "abort"
            self._give_up(batch, "abort")
            raise
        finally:
            if self._logged_id is not None:
                self._log(batch, self._logged_id, reason)

    def _log(self, batch: RequestStreams, request_id: str, reason: str) -> None:
        """`reason`: of the end; "": each sample has its own."""
        streams = batch.streams.values()
        first = min((times.first for times in self._times.values()), default=None)
        event(
            "request",
            request_id=request_id,
            prompt_tokens=sum(stream.prompt_tokens for stream in streams),
            cached_tokens=sum(stream.cached_tokens for stream in streams),
            completion_tokens=sum(stream.completion_tokens for stream in streams),
            first_token_s=None if first is None else round(first - self._began, 6),
            seconds=round(time.monotonic() - self._began, 6),
            reason=reason or "+".join(sorted(self._reasons)),
        )

    def _give_up(self, batch: RequestStreams, reason: str) -> None:
        for stream in batch.streams.values():
            self._row.engines[stream.group].finish(reason, stream.samples - self._ended[stream])


def usage_of(*streams: OutputStream) -> dict[str, Any]:
    prompt = sum(stream.prompt_tokens for stream in streams)
    completion = sum(stream.completion_tokens for stream in streams)
    cached = sum(stream.cached_tokens for stream in streams)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
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
        self._room = asyncio.Semaphore(max_open)

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
        pumps = [asyncio.ensure_future(self._pump(prompt, queue)) for prompt in range(len(self._submits))]
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

    async def _answer(self, prompt: int) -> AsyncGenerator[OutputChunk, None]:
        async with self._room, await self._submits[prompt]() as stream:
            self.streams[prompt] = stream
            async for chunk in stream:
                yield chunk

    async def _pump(self, prompt: int, queue: asyncio.Queue[tuple[int, OutputChunk | Exception | None]]) -> None:
        try:
            async with contextlib.aclosing(self._answer(prompt)) as chunks:
                async for chunk in chunks:
                    await queue.put((prompt, chunk))
            await queue.put((prompt, None))
        except Exception as error:
            await queue.put((prompt, error))


# ── as it comes ──────────────────────────────────────────────────────────────────────────────────────────────────────
class SSEResponse:
    """An answer of complete SSE lines. An engine error before the first chunk is raised; a later one is an event.

    A client that reads slowly holds up its own answer only: the stream keeps what it has not taken, up to a bound.
    """

    def __init__(
        self, batch: RequestStreams, head: bytes, includes_usage: bool, latencies: LatencyRecorder, request_id: str
    ) -> None:
        self.status_code = 200  # for the counters: an error after the head was sent changes it
        self._batch = batch
        self._head = head
        self._includes_usage = includes_usage
        self._latencies = latencies
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            write = scope.get("extensions", {}).get(WRITE_CHUNK)
            last = await cancel_on_disconnect(receive, self._send_chunks(send, write))
        finally:
            self._batch.release()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _deliver(self, stream: OutputStream, write: Callable[[bytes], bool], chunk: OutputChunk) -> bool:
        if chunk.utf8 and not write(chunk.utf8):
            return False
        self._latencies.chunk(stream, chunk)
        return True

    async def _send_chunks(self, send: Send, write: Callable[[bytes], bool] | None) -> bytes:
        """Sends all events but the last one, which it returns. `write` sends without this task; None: there is none."""
        has_begun = False
        try:
            with self._latencies.watching(self._batch):
                async with contextlib.aclosing(self._batch.chunks()) as chunks:
                    async for prompt, chunk in chunks:
                        self._latencies.chunk(self._batch.streams[prompt], chunk)
                        if not has_begun:
                            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                            has_begun = True
                            if write is not None and self._batch.is_single:
                                stream = self._batch.streams[prompt]
                                stream.deliver_to(functools.partial(self._deliver, stream, write))
                        if chunk.utf8:
                            await send({"type": "http.response.body", "body": chunk.utf8, "more_body": True})
        except EngineError as error:
            if not has_begun:
                raise
            self.status_code = error.status
            return b"data: %b\n\n" % engine_failed(error, self._request_id).body
        if not self._includes_usage:
            return DONE
        usage = msgspec.json.encode(usage_of(*self._batch.streams.values()))
        return b'data: %b,"choices":[],"usage":%b}\n\n' % (self._head, usage) + DONE


# ── whole ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class StreamedChoice:
    """One sample of an answer that is not streamed, assembled from its chunks."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._length = 0
        self._logprobs: list[tuple[int, list[tuple[int, float]]]] = []  # where its text begins, and what was likely
        self.reason: FinishReason | None = None
        self.stop: int | str | None = None

    def add(self, chunk: OutputChunk) -> None:
        if chunk.logprobs is not None:
            self._logprobs += [(self._length, row) for row in likely(chunk.logprobs)]
        text = chunk.text
        self._texts.append(text)
        self._length += len(text)
        if chunk.reason is not None:
            self.reason, self.stop = chunk.reason, chunk.stop

    def _finish(self) -> dict[str, Any]:
        return {"finish_reason": self.reason and self.reason.name.lower(), "stop_reason": self.stop}

    def of_chat(self, index: int, vocabulary: Vocabulary | None) -> dict[str, Any]:
        content = "".join(self._texts)
        return {
            "index": index,
            "message": {"role": "assistant", "content": content},
            "logprobs": None if vocabulary is None else {"content": self._content_logprobs(vocabulary)},
            **self._finish(),
        }

    def _content_logprobs(self, vocabulary: Vocabulary) -> list[dict[str, Any]]:
        content = []
        for _, row in self._logprobs:
            first, *others = (
                {
                    "token": _shown(vocabulary, token_id),
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
                "tokens": [_shown(vocabulary, row[0][0]) for row in rows],
                "token_logprobs": [row[0][1] for row in rows],
                "top_logprobs": [{_shown(vocabulary, token_id): value for token_id, value in row[1:]} for row in rows],
            }
        return {"index": index, "text": "".join(self._texts), "logprobs": logprobs, **self._finish()}


def _shown(vocabulary: Vocabulary, token_id: int) -> str:
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
    with latencies.watching(batch):
        async with contextlib.aclosing(batch.chunks()) as chunks:
            async for prompt, chunk in chunks:
                latencies.chunk(batch.streams[prompt], chunk)
                choices[prompt * samples + chunk.sample].add(chunk)
    return choices
