"""The answer to one request: an async iterator of chunks, which the client fills as they arrive.

A `Delta` has columns of many requests; `split_delta` makes one chunk of each of its rows.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from penstock.engine._native import ChunkSender, TokenCounters
from penstock.engine.client.submitted_request import SubmittedRequest
from penstock.engine.protocol.messages import Delta, FinishReason, Floats, Logprobs, PromptLogprobs
from penstock.errors import Missing
from penstock.tensor import Handle, Scope, Store

MAX_KEPT_NBYTES = 4 << 20  # of unread chunks, above which the request is aborted
CHUNK_NBYTES = 256  # of an empty chunk


class EngineError(Exception):
    """The engine has not answered a request. `status` is the HTTP status for it."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class OutputChunk(msgspec.Struct, eq=False):
    """New tokens of one sample."""

    sample: int
    utf8: bytes  # text; or, if the request has a `ChunkFormat`, finished lines of that
    ids: list[int]
    reason: FinishReason | None = None  # None: more chunks will come
    stop: int | str | None = None  # the stop string or stop token id that ended the sample, if one did
    cached: int = 0  # prompt tokens found in the prefix cache; set in the first chunk of a sample
    logprobs: Logprobs | None = None  # of these ids
    vector_handle: Handle | None = None  # of a request to a pooling engine, in its only chunk
    reasoning: int = 0  # ids of the sample's reasoning; set in the last chunk of a sample
    calls: int = 0  # tool calls in the chunks of the sample; set in the last one

    @property
    def text(self) -> str:
        return self.utf8.decode(errors="replace")

    @property
    def nbytes(self) -> int:
        likely = 0 if self.logprobs is None else self.logprobs.ids.nbytes + self.logprobs.values.nbytes
        return CHUNK_NBYTES + len(self.utf8) + 4 * len(self.ids) + likely


class Placement(NamedTuple):
    """Where a request was sent to, and under which number."""

    request: int
    group: int
    incarnation: int


class IdleSocket(NamedTuple):
    """The socket of a connection without unsent bytes, to which the chunks of a stream may be written."""

    descriptor: int
    is_chunked: bool  # text is framed as a chunk of HTTP/1.1
    counters: TokenCounters
    last: float  # when the last token was passed on


class Delivery(Protocol):
    """Passes the chunks of a stream on while its reader waits."""

    def write(self, chunk: OutputChunk) -> bool:
        """Returns False if the reader must pass the chunk on."""

    def idle_socket(self, leave: Callable[[], None]) -> IdleSocket | None:
        """Returns the socket for the next chunks. `leave` is called before the socket is closed. None: there is none
        now."""

    def write_rest(self, text: bytes, sent: int) -> None:
        """Writes a text of which the socket has taken `sent` bytes, framing included."""

    def count(self, tokens: int, last: float) -> None:
        """Counts tokens that were written to the socket, the last one at `last`."""


class OutputStream:
    """`async for` yields the chunks of the answer; `async with` aborts the request at the end of its block.

    One task reads it. Successive unread chunks of one sample are joined, unless they have log-probabilities. Raises
    EngineError if the answer stays incomplete. `scope` holds the images of the prompt, and is released when the stream
    is over, however it ends. An unread stream ends, too. `submitted` keeps what another group needs to continue the
    answer, under another number; None: the loss of its group ends the request with an error.
    """

    def __init__(
        self,
        request: int,
        group: int,
        incarnation: int,
        prompt_tokens: int,
        samples: int,
        scope: Scope | None = None,
        submitted: SubmittedRequest | None = None,
        sender: ChunkSender | None = None,
    ) -> None:
        """`sender`: writes chunks to sockets; None: each chunk passes through the stream."""
        self.place = Placement(request, group, incarnation)  # the last one, while the request waits for a group
        self.submitted = submitted
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0  # without those since `count_sent`, while the sender writes chunks
        self.cached_tokens = 0
        self.reasoning_tokens = 0
        self.samples = samples
        self.prompt_logprobs: list[PromptLogprobs] = []  # some positions may be there twice, with equal values
        self._open_samples = samples
        self._scope = scope
        self._chunks: deque[OutputChunk] = deque()
        self._kept_nbytes = 0
        self._error: EngineError | None = None
        self._is_aborted = False
        self._waiter: asyncio.Future[None] | None = None
        self._delivery: Delivery | None = None
        self._sender = sender if samples == 1 else None
        self._has_socket = False  # the sender writes chunks
        self._alarm: asyncio.TimerHandle | None = None
        self._on_abort: Callable[[OutputStream], None] | None = None

    @property
    def request(self) -> int:
        return self.place.request

    @property
    def group(self) -> int:
        return self.place.group

    @property
    def is_over(self) -> bool:
        """Returns whether the last chunk has come, or the request has failed or was aborted."""
        return self._open_samples == 0 or self._error is not None or self._is_aborted

    def deliver_to(self, delivery: Delivery) -> None:
        """Passes each further chunk, but the last of a sample, to `delivery` as soon as it comes, if the stream
        `is_awaited`. The reader gets a chunk that `delivery` does not write. While the delivery has an idle socket,
        the sender writes chunks there, and the stream gets no chunk but the last one."""
        if not self.is_over:  # a stream that is over would hold its reader, which holds the stream
            self._delivery = delivery

    @property
    def is_awaited(self) -> bool:
        """Returns whether the reader waits for a chunk, and so has handled all chunks before."""
        return self._waiter is not None and not self._waiter.done()

    def abort(self) -> None:
        """Ends the request; chunks that have come can still be read."""
        if self.is_over:
            return
        self._is_aborted = True
        if self._on_abort is not None:
            self._on_abort(self)
        self._finish_if_over()

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> OutputChunk:
        while True:
            if self._chunks:
                chunk = self._chunks.popleft()
                self._kept_nbytes -= chunk.nbytes
                return chunk
            if self._error is not None:
                raise self._error
            if self.is_over:
                raise StopAsyncIteration
            if self._waiter is not None:
                raise RuntimeError("another task is already reading this answer")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    # ── for the client ──
    def begin(self, on_abort: Callable[[OutputStream], None], timeout: float | None, spent: float = 0.0) -> None:
        """`on_abort` is called when the stream is aborted. Of `timeout`, `spent` seconds have passed already."""
        self._on_abort = on_abort
        if timeout is not None and not self.is_over:
            self._alarm = asyncio.get_running_loop().call_later(timeout - spent, self._expire, timeout)

    def add(self, chunk: OutputChunk) -> None:
        if self.is_over:
            return
        self.leave_socket()
        self.completion_tokens += len(chunk.ids)
        if self.submitted is not None:
            self.submitted.add(chunk.sample, chunk.ids)
        if chunk.reason is not None:
            self.reasoning_tokens += chunk.reasoning
            self._open_samples -= 1
            if self.submitted is not None:
                self.submitted.finish(chunk.sample)
        if chunk.cached:
            self.cached_tokens = chunk.cached
        if self._delivery is not None and self.is_awaited and chunk.reason is None and self._delivery.write(chunk):
            self._enter_socket(self._delivery)
            return
        last = self._chunks[-1] if self._chunks else None
        if last is not None and last.sample == chunk.sample and last.logprobs is None and chunk.logprobs is None:
            last.utf8 += chunk.utf8
            last.ids += chunk.ids
            self._kept_nbytes += chunk.nbytes - CHUNK_NBYTES
            last.reason, last.stop, last.calls = chunk.reason, chunk.stop, chunk.calls
        else:
            self._chunks.append(chunk)
            self._kept_nbytes += chunk.nbytes
        if self._kept_nbytes > MAX_KEPT_NBYTES:
            self._chunks.clear()
            self._give_up(EngineError(503, f"the client has not read {MAX_KEPT_NBYTES} bytes of the answer"))
        self._finish_if_over()

    def write_rest(self, text: bytes, sent: int) -> None:
        """Writes a text that the sender has counted, and of which the socket has taken `sent` bytes. The stream leaves
        the socket."""
        self.leave_socket()
        if self._delivery is not None:
            self._delivery.write_rest(text, sent)

    def count_sent(self) -> None:
        """Counts the tokens that the sender has written since the last call."""
        if self._has_socket and self._sender is not None and (progress := self._sender.take(self.request)) is not None:
            ids, tokens, last = progress
            self.completion_tokens += tokens
            if self.submitted is not None:
                self.submitted.add(0, ids)
            if self._delivery is not None:
                self._delivery.count(tokens, last)

    def leave_socket(self) -> None:
        """Takes the stream from the sender: further chunks pass through the stream."""
        if self._has_socket and self._sender is not None:
            self.count_sent()
            self._sender.remove(self.request)
            self._has_socket = False

    def _enter_socket(self, delivery: Delivery) -> None:
        if self._sender is not None and (socket := delivery.idle_socket(self.leave_socket)) is not None:
            descriptor, is_chunked, counters, last = socket
            keeps_ids = self.submitted is not None
            self._sender.add(self.request, descriptor, is_chunked, keeps_ids, counters, last)
            self._has_socket = True

    def fail(self, error: EngineError) -> None:
        """Ends the stream with an error, which the reader gets after the chunks that have come."""
        if not self.is_over:
            self._error = error
            self._finish_if_over()

    def _expire(self, timeout: float) -> None:
        self._give_up(EngineError(504, f"the answer was not complete within {timeout:g} s"))
        self._finish_if_over()

    def _give_up(self, error: EngineError) -> None:
        self._error = error
        if self._on_abort is not None:
            self._on_abort(self)

    def _finish_if_over(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if not self.is_over:
            return
        self.leave_socket()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self.submitted = self._delivery = None
        if self._scope is not None:
            self._scope.release()
            self._scope = None


def take_vector(handle: Handle, store: Store | None) -> Floats | None:
    """Returns a copy of a vector that a worker has put under a key of its own, and gives the key up. None: the store
    has needed the room."""
    try:
        with handle.open(store) as lease:
            vector: Floats = np.array(lease.value(), np.float32)
    except Missing:
        return None
    if store is not None and handle.key is not None:
        store.remove(handle.key)
    return vector


# ── the rows of a Delta ──────────────────────────────────────────────────────────────────────────────────────────────
RowLeft = tuple[int, int, int, int, int, int, int]  # of `ChunkSender.send`


def split_delta(delta: Delta, left: Sequence[RowLeft]) -> Iterator[tuple[int, OutputChunk]]:
    """Yields the request number and the chunk of each row that the sender has left."""
    if not left:
        return iter(())
    text, numbers = bytes(delta.text), delta.numbers.tolist()
    splitter = None if delta.logprobs is None else _LogprobsSplitter(delta.logprobs, len(delta.ids))
    chunks: dict[int, tuple[int, OutputChunk]] = {}
    for row, request, sample, text_at, nbytes, at, count in left:
        chunk = OutputChunk(sample, text[text_at : text_at + nbytes], numbers[at : at + count])
        if splitter is not None:
            chunk.logprobs = splitter.part(at - 2 * delta.rows, count)
        chunks[row] = request, chunk
    if delta.finished is not None:
        finished = delta.finished
        for end, (row, reason) in enumerate(zip(finished.rows.tolist(), finished.reasons.tolist(), strict=True)):
            chunk = chunks[row][1]
            chunk.reason = FinishReason(reason)
            chunk.stop = None if finished.stops is None else finished.stops[end]
            chunk.reasoning = 0 if finished.reasoning is None else int(finished.reasoning[end])
            chunk.calls = 0 if finished.calls is None else int(finished.calls[end])
    if delta.began is not None:
        for row, cached in zip(delta.began.rows.tolist(), delta.began.cached.tolist(), strict=True):
            if row in chunks:
                chunks[row][1].cached = cached
    for (_, chunk), vector in zip(chunks.values(), delta.vectors, strict=False):
        chunk.vector_handle = vector
    return iter(chunks.values())


class _LogprobsSplitter:
    """Splits the log-probabilities of a Delta into those of its rows."""

    def __init__(self, whole: Logprobs, tokens: int) -> None:
        self._whole = whole
        self._each = whole.ids.size // tokens if whole.counts is None and tokens else 0
        self._ends = None if whole.counts is None else np.cumsum(whole.counts)

    def part(self, token: int, tokens: int) -> Logprobs | None:
        """Returns the log-probabilities of these tokens; None: their request asked for none."""
        whole, last = self._whole, token + tokens
        if self._ends is None:
            begin, end, counts = token * self._each, last * self._each, None
        else:
            begin, end = (int(self._ends[index - 1]) if index else 0 for index in (token, last))
            counts = None if whole.counts is None else whole.counts[token:last]
        if begin == end:
            return None
        return Logprobs(whole.ids[begin:end], whole.values[begin:end], whole.ranks[token:last], counts)
