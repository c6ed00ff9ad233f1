"""How answers go out, and what is counted of them, without a process or a socket."""

import asyncio
import functools
import gc
import json
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("starlette")

from penstock.engine.client.stream import EngineError, OutputChunk, OutputStream
from penstock.engine.cluster.counter import Counter
from penstock.engine.protocol.messages import FinishReason, Logprobs
from penstock.engine.text.detokenizer import Vocabulary
from penstock.server.chat.latency_recorder import LatencyRecorder
from penstock.server.chat.streaming import (
    CLIENT_CONNECTION,
    RequestStreams,
    SSEResponse,
    StreamedChoice,
    cancel_on_disconnect,
    collect,
)
from penstock.server.errors import Gone
from penstock.server.options import ServerOptions
from penstock.server.status.counters import ProcessCounters, Served
from tests.support.loops import in_a_loop


def row(engines: int = 1) -> ProcessCounters:
    return ProcessCounters(memoryview(bytearray(8 * ProcessCounters.total_words(engines))).cast("Q"))


class Connection:
    """A client, as a server process sees it: a ClientConnection that leaves all chunks to the task."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.watcher: Callable[[], None] | None = None
        self.scope = {"extensions": {CLIENT_CONNECTION: self}}

    def on_disconnect(self, call: Callable[[], None] | None) -> Callable[[], None] | None:
        before, self.watcher = self.watcher, call
        return before

    def go(self) -> None:
        if self.watcher is not None:
            asyncio.get_running_loop().call_soon(self.watcher)

    def write_chunk(self, body: bytes) -> bool:
        return False

    async def receive(self) -> dict[str, Any]:
        raise AssertionError("the body has come")

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(item.get("body", b"") for item in self.sent)


async def eventually(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def answer(
    *chunks: OutputChunk, error: EngineError | None = None, samples: int = 1
) -> tuple[OutputStream, list[OutputStream]]:
    aborted: list[OutputStream] = []
    stream = OutputStream(1, 0, 1, 5, samples)
    stream.begin(aborted.append, None)
    for chunk in chunks:
        stream.add(chunk)
    if error is not None:
        stream.fail(error)
    return stream, aborted


def batch_of(*streams: OutputStream, max_open: int = 8) -> RequestStreams:
    async def submitted(stream: OutputStream) -> OutputStream:
        return stream

    return RequestStreams([functools.partial(submitted, stream) for stream in streams], max_open)


def events_of(stream: OutputStream, includes_usage: bool = False, head: bytes = b"{") -> SSEResponse:
    return SSEResponse(batch_of(stream), head, includes_usage, LatencyRecorder(row(), 0.0), "abc")


# ── a client that goes ───────────────────────────────────────────────────────────────────────────────────────────────
async def sleep(was_cancelled: asyncio.Event) -> None:
    try:
        await asyncio.sleep(60)
    finally:
        was_cancelled.set()


@in_a_loop
async def test_cancel_on_disconnect_cancels_when_the_client_leaves() -> None:
    connection, was_cancelled = Connection(), asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, connection.go)
    with pytest.raises(Gone):
        await cancel_on_disconnect(connection.scope, sleep(was_cancelled))
    assert was_cancelled.is_set() and len(asyncio.all_tasks()) <= 2


@in_a_loop
async def test_task_goes_on_after_work_that_was_cancelled_in_its_last_pass() -> None:
    """The client goes in the pass of the event loop in which the work ends."""
    connection = Connection()

    async def work() -> str:
        connection.go()
        await asyncio.sleep(0)  # the cancellation comes, with the end of the pass
        return "well"

    with pytest.raises(Gone):
        await cancel_on_disconnect(connection.scope, work())
    for _ in range(3):
        await asyncio.sleep(0)


@in_a_loop
async def test_cancelled_task_cancels_its_work() -> None:
    connection, was_cancelled = Connection(), asyncio.Event()
    task = asyncio.ensure_future(cancel_on_disconnect(connection.scope, sleep(was_cancelled)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert was_cancelled.is_set()


@in_a_loop
async def test_cancel_on_disconnect_passes_on_the_result_or_error() -> None:
    connection = Connection()

    async def work(is_well: bool) -> str:
        await asyncio.sleep(0)
        if not is_well:
            raise EngineError(503, "it died")
        return "well"

    assert await cancel_on_disconnect(connection.scope, work(True)) == "well"
    with pytest.raises(EngineError, match="it died"):
        await cancel_on_disconnect(connection.scope, work(False))
    assert len(asyncio.all_tasks()) <= 2


class Writer:
    """A ClientConnection that writes, and perhaps has a socket."""

    def __init__(self, connection: Connection, socket: tuple[int, bool] | None = None) -> None:
        self.written: list[bytes] = []
        self.is_full = False
        self.socket = socket
        self._connection = connection
        self.on_disconnect = connection.on_disconnect

    def write_chunk(self, body: bytes) -> bool:
        if not self.is_full:
            self._connection.sent.append({"body": body})
            self.written.append(body)
        return not self.is_full

    def idle_socket(self, leave: Callable[[], None]) -> tuple[int, bool] | None:
        self.leave = leave
        return self.socket

    def write_rest(self, body: bytes, sent: int) -> None:
        self.written.append(body[sent:])


# ── as it comes ──────────────────────────────────────────────────────────────────────────────────────────────────────
@in_a_loop
async def test_finished_lines_are_passed_on_and_usage_and_an_end_follow() -> None:
    connection = Connection()
    stream, _ = answer(OutputChunk(0, b"data: 1\n\n", [1], FinishReason.STOP, None, 3))
    await events_of(stream, True, b'{"id":"x"')(connection.scope, connection.receive, connection.send)
    first, usage, done, rest = connection.body.split(b"\n\n")
    assert (first, done, rest) == (b"data: 1", b"data: [DONE]", b"")
    parsed = json.loads(usage.removeprefix(b"data: "))
    assert parsed["id"] == "x" and parsed["choices"] == [] and parsed["usage"]["total_tokens"] == 6
    assert parsed["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert (b"x-accel-buffering", b"no") in connection.sent[0]["headers"]  # a proxy passes events on as they come
    assert connection.sent[0]["status"] == 200 and connection.sent[-1]["more_body"] is False
    assert [message["type"] for message in connection.sent] == ["http.response.start", "http.response.body"]


@in_a_loop
async def test_chunks_after_the_first_are_written_without_the_task() -> None:
    connection, stream = Connection(), answer(OutputChunk(0, b"1", [1]))[0]
    events = events_of(stream)
    writer = Writer(connection)
    scope = {"extensions": {CLIENT_CONNECTION: writer}}
    answering = asyncio.ensure_future(events(scope, connection.receive, connection.send))
    await eventually(lambda: connection.body == b"1")
    await eventually(lambda: stream.is_awaited)
    for number in (b"2", b"3"):  # no other task runs between them
        stream.add(OutputChunk(0, number, [1]))
    assert writer.written == [b"2", b"3"]
    writer.is_full = True
    stream.add(OutputChunk(0, b"4", [1]))
    writer.is_full = False
    stream.add(OutputChunk(0, b"5", [1]))  # waits for the task, which has not sent the chunk before
    stream.add(OutputChunk(0, b"6", [1], FinishReason.STOP))
    await answering
    assert writer.written == [b"2", b"3"] and connection.body == b"123456data: [DONE]\n\n"
    assert stream.completion_tokens == 6


@in_a_loop
async def test_stream_that_is_over_is_freed_without_the_garbage_collector() -> None:
    connection, stream = Connection(), answer(OutputChunk(0, b"1", [1], FinishReason.STOP))[0]
    scope = {"extensions": {CLIENT_CONNECTION: Writer(connection)}}
    freed = weakref.ref(stream)
    gc.disable()
    try:
        await events_of(stream)(scope, connection.receive, connection.send)
        del stream
        await eventually(lambda: freed() is None)
    finally:
        gc.enable()


@in_a_loop
async def test_error_before_the_first_chunk_is_raised_and_a_later_is_an_event() -> None:
    connection = Connection()
    stream, _ = answer(error=EngineError(400, "too long"))
    with pytest.raises(EngineError, match="too long"):
        await events_of(stream)(connection.scope, connection.receive, connection.send)
    assert connection.sent == []
    stream, _ = answer(OutputChunk(0, b"data: 1\n\n", [1]), error=EngineError(503, "it died"))
    await events_of(stream, True)(connection.scope, connection.receive, connection.send)
    first, error, rest = connection.body.split(b"\n\n")
    assert (first, rest) == (b"data: 1", b"")
    assert json.loads(error.removeprefix(b"data: "))["error"]["message"] == "it died (request abc)"


@in_a_loop
async def test_a_client_that_goes_aborts_its_stream() -> None:
    connection = Connection()
    stream, aborted = answer(OutputChunk(0, b"data: 1\n\n", [1]))
    asyncio.get_running_loop().call_later(0.01, connection.go)
    with pytest.raises(Gone):
        await events_of(stream)(connection.scope, connection.receive, connection.send)
    assert aborted == [stream] and connection.body == b"data: 1\n\n"


@in_a_loop
async def test_at_most_so_many_prompts_of_a_request_are_open() -> None:
    open_now = most = 0

    class Watched(OutputStream):
        async def __aexit__(self, *error: object) -> None:
            nonlocal open_now
            open_now -= 1
            await super().__aexit__(*error)

    async def submit(number: int) -> OutputStream:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        stream = Watched(number, 0, 1, 3, 1)
        stream.begin(lambda _: None, None)
        asyncio.get_running_loop().call_later(0.001, stream.add, OutputChunk(0, b"%d" % number, [1], FinishReason.STOP))
        return stream

    batch = RequestStreams([functools.partial(submit, number) for number in range(20)], 3)
    choices = await collect(batch, 20, 1, LatencyRecorder(row(), 0.0))
    assert [choice.of_completion(0, None)["text"] for choice in choices] == [str(number) for number in range(20)]
    assert (most, open_now) == (3, 0)


@in_a_loop
async def test_when_one_prompt_fails_the_others_are_aborted() -> None:
    whole, aborted = answer(OutputChunk(0, b"data: 1\n\n", [1]))
    failed, _ = answer(error=EngineError(503, "it died"))
    with pytest.raises(EngineError, match="it died"):
        await collect(batch_of(whole, failed), 2, 1, LatencyRecorder(row(), 0.0))
    assert aborted == [whole] and len(asyncio.all_tasks()) <= 2


# ── whole ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@in_a_loop
async def test_pieces_are_gathered_by_sample() -> None:
    chunks = (
        OutputChunk(1, b"b", [2]),
        OutputChunk(0, "é".encode(), [1], FinishReason.STOP, "x"),
        OutputChunk(1, b"c", [3], FinishReason.LENGTH),
    )
    stream, _ = answer(*chunks, samples=2)
    first, second = await collect(batch_of(stream), 1, 2, LatencyRecorder(row(), 0.0))
    output = first.of_chat(0, None)
    assert output["message"] == {"role": "assistant", "content": "é"} and output["logprobs"] is None
    assert (output["finish_reason"], output["stop_reason"]) == ("stop", "x")
    output = second.of_completion(1, None)
    assert (output["text"], output["index"], output["finish_reason"]) == ("bc", 1, "length")


def test_log_probabilities_are_told_in_both_ways() -> None:
    vocabulary = Vocabulary([b"a", b"b", b"\xc3"])
    values = np.array([-1, -1, -2, -3, -np.inf], np.float32)
    ids = np.array([0, 0, 1, 2, 1], np.int32)
    result = Logprobs(ids, values, np.array([1, 2], np.int32), np.array([3, 2], np.uint16))
    choice = StreamedChoice()
    choice.add(OutputChunk(0, b"", [9], logprobs=None))
    choice.add(OutputChunk(0, b"ab", [0, 2], FinishReason.LENGTH, logprobs=result))
    first, second = choice.of_chat(0, vocabulary)["logprobs"]["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("a", -1.0, [97])
    assert [(item["token"], item["logprob"]) for item in first["top_logprobs"]] == [("a", -1.0), ("b", -2.0)]
    assert (second["token"], second["bytes"]) == ("\ufffd", [0xC3])
    assert second["top_logprobs"][0]["logprob"] == -9999.0
    output = choice.of_completion(0, vocabulary)["logprobs"]
    assert output["tokens"] == ["a", "\ufffd"] and output["token_logprobs"] == [-1.0, -3.0]
    assert output["top_logprobs"] == [{"a": -1.0, "b": -2.0}, {"\ufffd": -3.0, "b": -9999.0}]


# ── what is counted ──────────────────────────────────────────────────────────────────────────────────────────────────
def total(histogram: Counter, engine: Served) -> tuple[int, float]:
    return sum(histogram.counts(engine.words)), histogram.sum_of(engine.words)


def counted(*steps: tuple[float, OutputChunk]) -> tuple[Served, OutputStream]:
    """One stream of two samples, begun at 0, with chunks at these times."""
    stream, row_of_it = OutputStream(1, 1, 1, 5, 2), row(engines=2)
    latencies = LatencyRecorder(row_of_it, 0.0)
    for now, chunk in steps:
        with mock.patch("penstock.server.chat.latency_recorder.time.monotonic", lambda now=now: now):
            latencies.chunk(stream, chunk)
    assert sum(Served.FIRST_TOKEN.counts(row_of_it.engines[0].words)) == 0, "the other engine has done nothing"
    return row_of_it.engines[1], stream


def test_times_are_counted_for_each_sequence() -> None:
    engine, _ = counted(
        (0.25, OutputChunk(0, b"", [1])),
        (0.5, OutputChunk(1, b"", [1])),
        (0.625, OutputChunk(0, b"", [])),
        (1.25, OutputChunk(0, b"", [2, 3, 4, 5], FinishReason.STOP)),
        (2.0, OutputChunk(1, b"", [], FinishReason.LENGTH)),
    )
    assert total(Served.FIRST_TOKEN, engine) == (2, 0.75)
    assert total(Served.INTER_TOKEN, engine) == (
        4,
        1.0,
    )  # a token has its share of a chunk
    assert total(Served.PER_OUTPUT_TOKEN, engine) == (
        2,
        0.25,
    )  # 0 for a single token
    assert total(Served.REQUEST, engine) == (2, 3.25)
    assert (engine[Served.PROMPT_TOKENS], engine[Served.GENERATION_TOKENS]) == (10, 6)
    assert [engine[Served.FINISHED + index] for index in range(4)] == [1, 1, 0, 0]
    assert total(Served.PROMPT_LENGTHS, engine) == (2, 10.0)
    assert total(Served.GENERATED_LENGTHS, engine) == (2, 6.0)
    assert total(Served.LONGEST_LENGTHS, engine) == (1, 5.0)


@pytest.mark.parametrize(
    ("error", "reasons"),
    [
        (EngineError(503, "it died"), [1, 0, 0, 1]),
        (EngineError(400, "too long"), [1, 0, 0, 0]),
        (asyncio.CancelledError(), [1, 0, 1, 0]),
    ],
    ids=["error", "refused", "gone"],
)
def test_sequences_that_do_not_end_are_counted_by_what_ended_them(error: BaseException, reasons: list[int]) -> None:
    stream, own = OutputStream(1, 0, 1, 5, 2), row()
    batch = batch_of(stream)
    batch.streams[0] = stream
    latencies = LatencyRecorder(own, 0.0)

    def scene() -> None:
        with latencies.watching(batch.streams):
            latencies.chunk(stream, OutputChunk(1, b"", [1], FinishReason.STOP))
            raise error

    with pytest.raises(type(error)):
        scene()
    assert [own.engines[0][Served.FINISHED + index] for index in range(4)] == reasons


def test_options_that_make_no_sense_are_refused() -> None:
    for options in ({"port": 70000}, {"max_open_requests": 0}, {"api_keys": ("a", "")}, {"client_timeout": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            ServerOptions(**options)
