"""Chunks that the client of the engine writes to sockets: what slow and fast HTTP clients read, and what is counted.

The client, the HTTP server and the channels are real; the test takes the place of the core.
"""

import asyncio
import contextlib
import itertools
import random
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("httptools")

import penstock
from penstock.engine._native import ChunkSender, TokenCounters
from penstock.engine.client.client import Client
from penstock.engine.client.stream import EngineError, IdleSocket, OutputChunk, OutputStream
from penstock.engine.client.submitted_request import SubmittedRequest
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.engine.protocol.config import EngineConfig, SimulatedDevice
from penstock.engine.protocol.messages import Delta, Failed, Finished, FinishReason, Resume, SamplingParams, Submit
from penstock.server.chat.latency_recorder import LatencyRecorder
from penstock.server.chat.streaming import RequestStreams, SSEResponse
from penstock.server.http.connection import HttpConnection
from penstock.server.http.exchange import HttpExchange
from penstock.server.http.http_server import HttpServer
from penstock.server.status.counters import ProcessCounters, Served
from tests.support.loops import in_a_loop

END = b"data: [DONE]\n\n"
SMALL_NBYTES = 4096  # of the buffers of slow connections


class Scene:
    """A server process. The test plays its engine."""

    def __init__(self, client: Client, core: penstock.Sender[Any], port: int, row: ProcessCounters) -> None:
        self.client = client
        self.port = port
        self.row = row
        self.submits: asyncio.Queue[Submit] = asyncio.Queue()
        self.core = core

    async def connect(self) -> "tuple[Reader, int]":
        """Returns an HTTP client, and the number of its request."""
        reader = Reader(self.port, random.Random(1), "1.1")
        await reader.connect()
        return reader, (await self.submits.get()).request

    async def send(self, texts: dict[int, bytes], ids: dict[int, list[int]], ended: tuple[int, ...] = ()) -> None:
        """Sends a Delta with a row for each request in `texts`."""
        lengths, tokens = map(len, texts.values()), itertools.chain(*ids.values())
        rows = np.array([row for row, request in enumerate(texts) if request in ended], np.uint16)
        finished = Finished(rows, np.full(rows.size, FinishReason.STOP, np.uint8)) if rows.size else None
        counts = np.array([len(each) for each in ids.values()], np.uint16)
        numbers = np.array([*texts, *lengths, *tokens], np.int32)
        self.core.send(Delta(len(texts), numbers, b"".join(texts.values()), counts, None, finished))
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Scene]:
    cluster = Cluster.open(EngineConfig(simulated=SimulatedDevice(), output_processors=0))
    board = StatusBoard(cluster.board, writable=True)
    board.row(0)[StatusBoard.SERVING] = 1
    row = ProcessCounters(memoryview(bytearray(8 * ProcessCounters.total_words(1))).cast("Q"))
    try:
        async with Client(cluster, 0) as client:
            inbox = cluster.groups[0].inbox.open_async_receiver(name="core 0.0 #1")
            me = str(ProcessId("core", 0, 0, 1))
            core = cluster.servers[0].open_sender(cluster.delta_lane(0), name=me)
            scene = Scene(client, core, 0, row)

            async def take_submits() -> None:
                while True:
                    message = await inbox.receive()
                    if isinstance(message, Submit):
                        scene.submits.put_nowait(message)

            async def answer(scope: Any, receive: Any, send: Any) -> None:
                latencies = LatencyRecorder(row, time.monotonic())
                batch = RequestStreams([lambda: client.submit([1, 2, 3])], 8)
                await SSEResponse(batch, b"{", False, latencies, "abc")(scope, receive, send)

            taking = asyncio.ensure_future(take_submits())
            listener = socket.create_server(("127.0.0.1", 0))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_NBYTES)  # connections inherit it
            scene.port = listener.getsockname()[1]
            http = HttpServer(answer, 100, 30.0)
            await http.start(listener, 100)
            try:
                yield scene
            finally:
                await http.stop(0.0)
                taking.cancel()
                core.close()
                inbox.close()
    finally:
        board.close()
        cluster.close()


class Reader:
    """An HTTP client; a slow one leaves its answer in the buffers of the kernel for a while."""

    def __init__(self, port: int, chance: random.Random, version: str) -> None:
        self._chance = chance
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_NBYTES)
        self._socket.setblocking(False)
        self._port = port
        self._version = version
        self.data = b""

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._socket, ("127.0.0.1", self._port))
        await loop.sock_sendall(self._socket, b"GET / HTTP/%b\r\nhost: x\r\n\r\n" % self._version.encode())

    async def read(self, until: bytes, pause: float = 0.0) -> None:
        while until not in self.data:
            part = await asyncio.get_running_loop().sock_recv(self._socket, self._chance.randrange(1, 60_000))
            assert part, "the answer is cut"
            self.data += part
            if pause:
                await asyncio.sleep(self._chance.random() * pause)

    def close(self) -> None:
        self._socket.close()

    def reset(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    @property
    def body(self) -> bytes:
        """Returns the body of the response, out of its chunks."""
        _, body = self.data.split(b"\r\n\r\n", 1)
        if self._version == "1.0":
            return body
        parts = []
        while body:
            length, rest = body.split(b"\r\n", 1)
            nbytes = int(length, 16)
            assert rest[nbytes : nbytes + 2] == b"\r\n"
            parts.append(rest[:nbytes])
            body = rest[nbytes + 2 :]
        return b"".join(parts)


@pytest.mark.parametrize("is_direct", [True, False])
@in_a_loop
async def test_slow_and_fast_clients_read_exact_answers(
    is_direct: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an idle descriptor, each chunk passes through its stream: both ways count the same."""
    if not is_direct:
        monkeypatch.setattr(HttpConnection, "idle_descriptor", None)
    rests = 0
    write_rest = HttpExchange.write_rest

    def count_rest(exchange: HttpExchange, body: bytes, sent: int) -> None:
        nonlocal rests
        rests += 1
        write_rest(exchange, body, sent)

    monkeypatch.setattr(HttpExchange, "write_rest", count_rest)
    chance = random.Random(seed)
    async with serving() as scene:
        readers = [Reader(scene.port, chance, "1.1" if number % 3 else "1.0") for number in range(6)]
        for reader in readers:
            await reader.connect()
        requests = [(await scene.submits.get()).request for _ in readers]
        # The readers and the requests come in the same order, as each connection was open before the next one.
        expected = dict.fromkeys(requests, b"")
        tokens = dict.fromkeys(requests, 0)
        reading = [
            asyncio.ensure_future(reader.read(END, 0.01 if number % 2 else 0.0))
            for number, reader in enumerate(readers)
        ]
        first: dict[int, int] = {}  # tokens of the first chunk of each request
        for number in range(200):
            chosen = [request for request in requests if number in (0, 199) or chance.random() < 0.6]
            nbytes = 1 if number == 199 else 20_000
            texts = {request: b"%c" % chance.randrange(97, 123) * chance.randrange(nbytes) for request in chosen}
            ids = {request: [1] * chance.randrange(1, 3) for request in chosen}
            await scene.send(texts, ids, tuple(requests) if number == 199 else ())
            for request in chosen:
                expected[request] += texts[request]
                tokens[request] += len(ids[request])
                first.setdefault(request, len(ids[request]))
            await asyncio.sleep(0.002)
        await asyncio.gather(*reading)
        for request, reader in zip(requests, readers, strict=True):
            assert reader.body == expected[request] + END
            reader.close()
        words = scene.row.engines[0].words
        assert words[Served.GENERATION_TOKENS] == sum(tokens.values())
        assert sum(Served.FIRST_TOKEN.counts(words)) == len(requests)
        assert sum(Served.INTER_TOKEN.counts(words)) == sum(tokens.values()) - sum(first.values())
        assert Served.GENERATED_LENGTHS.sum_of(words) == sum(tokens.values())
        assert scene.client.open_requests == 0
    assert (rests > 0) == is_direct, "sockets of slow clients take a part of a text"


@in_a_loop
async def test_texts_of_a_client_that_goes_never_reach_the_next_client() -> None:
    """The next connection has the descriptor of the one that was reset, and the core has not heard of the abort yet."""
    async with serving() as scene:
        for _ in range(20):
            first, gone = await scene.connect()
            second = Reader(scene.port, random.Random(1), "1.1")
            for text in (b"begin", b"socket"):
                await scene.send({gone: text}, {gone: [1]})
                await first.read(text)
            first.reset()
            await second.connect()
            while scene.submits.empty():
                await scene.send({gone: b"another's"}, {gone: [1]})
            request = scene.submits.get_nowait().request
            for number in range(5):
                await scene.send({gone: b"another's", request: b"%d" % number}, {gone: [1], request: [1]})
            await scene.send({request: b""}, {request: []}, (request,))
            await second.read(END)
            assert second.body == b"01234" + END
            second.close()


@in_a_loop
async def test_stream_that_its_group_loses_goes_on_with_all_ids_and_texts() -> None:
    async with serving() as scene:
        reader, request = await scene.connect()
        for number in range(6):
            await scene.send({request: b"%d" % number}, {request: [number, 10 + number]})
            await reader.read(b"%d\r\n" % number)
        scene.core.send(Failed(request, 503, "its output processor died", Resume.OUTPUT_DIED))
        again = await scene.submits.get()
        assert again.progress is not None
        assert again.progress.ids.tolist() == [0, 10, 1, 11, 2, 12, 3, 13, 4, 14, 5, 15]
        for number in range(6, 9):
            await scene.send({again.request: b"%d" % number}, {again.request: [number]})
        await scene.send({again.request: b"."}, {again.request: [9]}, (again.request,))
        await reader.read(END)
        assert reader.body == b"012345678." + END
        words = scene.row.engines[0].words
        assert words[Served.GENERATION_TOKENS] == 16 and Served.GENERATED_LENGTHS.sum_of(words) == 16
        reader.close()


@in_a_loop
async def test_malformed_message_costs_that_message_alone() -> None:
    async with serving() as scene:
        reader, request = await scene.connect()
        await scene.send({request: b"begin"}, {request: [1]})
        scene.core.send(Delta(1, np.array([request, 5, 9], np.int32), b"cut"))
        await scene.send({request: b"end"}, {request: [1]}, (request,))
        await reader.read(END)
        assert reader.body == b"beginend" + END
        reader.close()


def test_counters_beyond_the_row_are_refused() -> None:
    row = memoryview(bytearray(8 * 8)).cast("Q")
    TokenCounters(row, 0, 1, [0.1] * 5)
    for tokens, histogram in ((8, 1), (0, 2), (0, 9)):
        with pytest.raises(ValueError, match="beyond the row"):
            TokenCounters(row, tokens, histogram, [0.1] * 5)


@in_a_loop
async def test_client_that_goes_takes_its_stream_off_the_socket_at_once() -> None:
    """Its descriptor may be the next connection's in the same pass of the event loop."""
    carrier = mock.Mock(is_write_paused=False, idle_descriptor=5, date_line=b"")
    scope = {"http_version": "1.1", "method": "GET", "state": {}}
    exchange, leave = HttpExchange(carrier, scope, True, False), mock.Mock()
    assert exchange.idle_socket(leave) is None, "nothing has been written"
    await exchange.send({"type": "http.response.start", "status": 200})
    await exchange.send({"type": "http.response.body", "body": b"first", "more_body": True})
    assert exchange.idle_socket(leave) == (5, True)
    exchange.disconnect()
    leave.assert_called_once_with()
    assert exchange.idle_socket(leave) is None


def test_ids_and_tokens_that_a_socket_took_are_of_the_stream() -> None:
    """Whenever the stream leaves the socket, and in between."""
    sender, counted = ChunkSender(), []
    words = memoryview(bytearray(8 * ProcessCounters.total_words(1))).cast("Q")
    counters = ProcessCounters(words).engines[0].token_counters
    server, client = socket.socketpair()
    first = Submit(0, 0, np.zeros(3, np.int32), SamplingParams())

    class Direct:
        def write(self, chunk: OutputChunk) -> bool:
            return True

        def idle_socket(self, leave: Callable[[], None]) -> IdleSocket:
            return IdleSocket(server.fileno(), False, counters, time.monotonic())

        def write_rest(self, text: bytes, sent: int) -> None:
            raise AssertionError

        def count(self, tokens: int, last: float) -> None:
            counted.append(tokens)

    async def scene() -> None:
        submitted = SubmittedRequest(first)
        stream = OutputStream(7, 0, 1, 3, 1, None, submitted, sender)
        stream.begin(lambda _: None, None)
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        stream.deliver_to(Direct())
        stream.add(OutputChunk(0, b"a", [1]))
        assert len(sender) == 1
        for ids in ([2], [3, 4]):
            numbers, counts = np.array([7, 1, *ids], np.int32), np.array([len(ids)], np.uint16)
            assert sender.send(1, numbers, b"b", counts) == ([], [])
            stream.count_sent()
        assert submitted.generated[0].tolist() == [1, 2, 3, 4] and stream.completion_tokens == 4
        sender.send(1, np.array([7, 1, 5], np.int32), b"c")
        stream.fail(EngineError(503, "it died"))
        assert len(sender) == 0 and submitted.generated[0].tolist() == [1, 2, 3, 4, 5] and stream.completion_tokens == 5
        with pytest.raises(EngineError):
            await reading

    with server, client:
        asyncio.run(scene())
        assert client.recv(100) == b"bbc"
    assert counted == [1, 2, 1]
