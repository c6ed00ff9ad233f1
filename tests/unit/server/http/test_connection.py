"""HTTP/1.1 as a client sees it, with applications of a few lines: framing, order, back-pressure, ends."""

import asyncio
import contextlib
import itertools
import json
import logging
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest

pytest.importorskip("httptools")

from penstock.server.chat.streaming import CLIENT_CONNECTION
from penstock.server.http import connection
from penstock.server.http.connection import MAX_UNTAKEN_NBYTES
from penstock.server.http.http_server import HttpServer
from penstock.server.http.request_parser import MAX_BESIDES_NBYTES
from tests.support.loops import in_a_loop

WITHIN = 10.0  # seconds, on a busy machine
READ_NBYTES = 256 << 10  # what asyncio reads at a time
CLOSE = b"connection: close\r\n"
UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"

Application = Callable[[Any, Any, Any], Awaitable[None]]


async def take_body(receive: Any) -> bytes:
    body, has_more = b"", True
    while has_more:
        message = await receive()
        body, has_more = body + message["body"], message["more_body"]
    return body


async def respond(send: Any, body: bytes, status: int = 200, headers: Any = ()) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def begin_stream(send: Any, first: bytes = b"first") -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": first, "more_body": True})


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """What has arrived, as JSON."""
    body = await take_body(receive)
    headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]]
    observed = {
        "path": scope["path"],
        "query": scope["query_string"].decode(),
        "body": body.decode(),
        "headers": headers,
    }
    await respond(send, json.dumps(observed).encode())


async def stream(scope: Any, receive: Any, send: Any) -> None:
    await begin_stream(send, b"one")
    await asyncio.sleep(0.01)
    await send({"type": "http.response.body", "body": b"", "more_body": True})
    await send({"type": "http.response.body", "body": b"three", "more_body": True})
    await send({"type": "http.response.body"})


def get(path: str = "/", more: bytes = b"", version: str = "1.1", method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/{version}\r\nhost: x\r\n".encode() + more + b"\r\n"


def post(body: bytes, more: bytes = b"", version: str = "1.1") -> bytes:
    return get(more=more + b"content-length: %d\r\n" % len(body), version=version, method="POST") + body


class Server:
    def __init__(self, port: int, http: HttpServer) -> None:
        self.port = port
        self.http = http

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def talk(self, *pieces: bytes) -> bytes:
        """All that is answered until the connection ends. Each piece is sent when the one before has arrived."""
        reader, writer = await self.connect()
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.002)
        output = await asyncio.wait_for(reader.read(), WITHIN)
        writer.close()
        return re.sub(rb"date: [A-Z][a-z]{2}, [^\r]* GMT\r\n", b"", output)


@contextlib.asynccontextmanager
async def serving(app: Application, patience: float = 5.0, most: int = 100) -> AsyncIterator[Server]:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
    listener.bind(("127.0.0.1", 0))
    http = HttpServer(app, most, patience)
    await http.start(listener, 100)
    try:
        yield Server(listener.getsockname()[1], http)
    finally:
        await http.stop(WITHIN)


def talked(app: Application, *pieces: bytes, patience: float = 5.0) -> bytes:
    async def scene() -> bytes:
        async with serving(app, patience) as server:
            return await server.talk(*pieces)

    return asyncio.run(scene())


def answers(output: bytes) -> list[dict[str, Any]]:
    """What `echo` has found in each request."""
    return [json.loads(body) for body in re.findall(rb'\{"path".*?\]\]\}', output)]


# ── framing ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_response_with_a_length_is_written_as_it_is() -> None:
    output = talked(echo, get("/a%20b?c=d", CLOSE))
    head, _, body = output.partition(b"\r\n\r\n")
    assert head == b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close" % len(body)
    assert answers(output) == [
        {"path": "/a b", "query": "c=d", "body": "", "headers": [["host", "x"], ["connection", "close"]]}
    ]


def test_response_without_length_is_chunked_and_the_connection_goes_on() -> None:
    output = talked(stream, get() + get(more=CLOSE))
    body = b"3\r\none\r\n5\r\nthree\r\n0\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n"
    assert output == head + b"\r\n" + body + head + CLOSE + b"\r\n" + body


def test_a_client_of_http_1_0_gets_no_chunks_and_no_100() -> None:
    assert talked(stream, get(version="1.0")) == b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nonethree"
    output = talked(echo, post(b"abc", b"expect: 100-continue\r\nconnection: keep-alive\r\n", "1.0"))
    assert output.count(b"HTTP/1.1") == 1 and answers(output)[0]["body"] == "abc"


def test_a_head_has_the_header_of_a_get_and_no_body() -> None:
    output = talked(echo, get(method="HEAD") + get(method="HEAD", more=CLOSE))
    assert output.count(b"content-length: ") == 2 and b"{" not in output and output.endswith(b"\r\n\r\n")


def test_a_body_comes_whole_however_it_is_cut() -> None:
    chunked = get(method="POST", more=CLOSE + b"transfer-encoding: chunked\r\n")
    chunked += b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nx-trailer: 1\r\n\r\n"
    for request, body in ((post(b"abcde", CLOSE), "abcde"), (chunked, "abcde")):
        for pieces in ([request], [request[:50], request[50:]], [bytes([item]) for item in request]):
            (result,) = answers(talked(echo, *pieces))
            assert result["body"] == body
            assert "x-trailer" not in dict(result["headers"]), "a trailer is no header"


def test_request_offering_an_upgrade_is_answered_as_are_later_ones() -> None:
    """As Java's client offers HTTP/2 with each first request. httptools ends such a message at its head."""
    requests = post(b"first", UPGRADE) + get(more=UPGRADE) + post(b"third", CLOSE)
    bytewise = [bytes([byte]) for byte in requests[:300]]
    for pieces in ([requests], [requests[:70], requests[70:]], [*bytewise, requests[300:]]):
        result = answers(talked(echo, *pieces))
        assert [item["body"] for item in result] == ["first", "", "third"]
        assert ["http2-settings", "AAMAAABkAAQAAP__"] in result[0]["headers"]


def test_a_tunnel_is_refused() -> None:
    output = talked(echo, get("x:443", method="CONNECT"))
    assert output.startswith(b"HTTP/1.1 400 ") and b"CONNECT is for proxies" in output and CLOSE in output


@in_a_loop
async def test_100_is_said_when_the_body_is_wanted_and_not_there() -> None:
    async with serving(echo) as server:
        reader, writer = await server.connect()
        writer.write(get(method="POST", more=b"expect: 100-continue\r\ncontent-length: 3\r\n"))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        assert b" 200 OK" in await reader.readuntil(b"\r\n\r\n")
        writer.close()
        assert not (await server.talk(post(b"abc", CLOSE + b"expect: 100-continue\r\n"))).count(b"100 Continue")


# ── order and ends ───────────────────────────────────────────────────────────────────────────────────────────────────
@in_a_loop
async def test_first_requests_of_a_burst_are_answered_before_the_last_start() -> None:
    burst, events = 5 * connection.MAX_STARTED, list[tuple[str, str]]()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        events.append(("started", scope["path"]))
        for _ in range(3):  # passes of the event loop
            await asyncio.sleep(0)
        events.append(("answered", scope["path"]))
        await respond(send, b"")

    async with serving(slow) as server:
        clients = [await server.connect() for _ in range(burst)]
        for number, (_, writer) in enumerate(clients):
            writer.write(get(f"/{number}", CLOSE))
        for reader, writer in clients:
            assert b" 200 OK" in await reader.read()
            writer.close()
    started, answered = ([path for kind, path in events if kind == what] for what in ("started", "answered"))
    assert started == answered and len(answered) == burst
    assert events.index(("answered", started[0])) < events.index(("started", started[-1]))


@in_a_loop
async def test_large_burst_starts_a_share_of_the_waiting_in_a_pass() -> None:
    started = 0

    class Exchange:
        async def run(self, app: Any) -> None:
            nonlocal started
            started += 1

    state, waiting = connection.ServerState(echo, 1, 1.0), 100 * connection.BURST_SHARE
    for _ in range(waiting):
        state.start(cast(Any, Exchange()))
    counts = [0]
    while started < waiting:
        await asyncio.sleep(0)
        counts.append(started)
    passes = [after - before for before, after in itertools.pairwise(counts) if after > before]
    rest = waiting - connection.MAX_STARTED
    assert passes[:2] == [connection.MAX_STARTED, rest // connection.BURST_SHARE]
    assert min(passes[:-1]) == connection.MAX_STARTED


def test_nothing_after_the_last_request_is_answered() -> None:
    for more in (get(), b"\r\n", b"garbage\0", post(b"x" * 100_000)):
        output = talked(echo, get(more=CLOSE) + more, more)
        assert output.count(b"HTTP/1.1") == 1 and len(answers(output)) == 1


def test_a_response_before_the_end_of_the_body_says_that_it_is_the_last() -> None:
    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await respond(send, b"no", 401)

    head = get(method="POST", more=b"content-length: 100\r\n")
    assert talked(refuse, head + b"abc", get()) == (
        b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno"
    )


def test_a_head_that_is_too_long_is_refused_also_in_one_piece() -> None:
    long = b"a: " + b"b" * MAX_BESIDES_NBYTES + b"\r\n"
    for request in (get(more=long), get() + get(more=long), get("/" + "b" * MAX_BESIDES_NBYTES)):
        assert b"HTTP/1.1 431 " in talked(echo, request)
    assert len(answers(talked(echo, get(more=CLOSE + long[: MAX_BESIDES_NBYTES // 2] + b"\r\n")))) == 1
    assert len(answers(talked(echo, post(b"b" * 4 * MAX_BESIDES_NBYTES, CLOSE)))) == 1


@in_a_loop
async def test_last_bytes_of_a_response_follow_the_applications_return() -> None:
    """What it counts at its end is counted when a client has the response."""
    returned = []

    async def slow_to_return(scope: Any, receive: Any, send: Any) -> None:
        await respond(send, b"x")
        await asyncio.sleep(0.05)
        assert (await receive())["type"] == "http.disconnect"
        returned.append(scope["path"])

    async with serving(slow_to_return) as server:
        reader, writer = await server.connect()
        for path in ("/a", "/b"):
            writer.write(get(path))
            assert (await reader.readuntil(b"\r\n\r\nx")).endswith(b"x") and returned[-1] == path
        writer.close()


@in_a_loop
async def test_an_idle_connection_ends_also_when_it_sends_empty_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "KEPT", 0.2)
    async with serving(echo) as server:
        reader, writer = await server.connect()
        writer.write(get())

        async def drip() -> None:
            while True:
                await asyncio.sleep(0.02)
                writer.write(b"\r\n")

        dripping = asyncio.ensure_future(drip())
        with contextlib.suppress(ConnectionError):
            output = await asyncio.wait_for(reader.read(), WITHIN)
            assert len(answers(output)) == 1
        dripping.cancel()
        writer.transport.abort()


# ── clients that go ──────────────────────────────────────────────────────────────────────────────────────────────────
class Watched:
    """Streams until its client has gone, and notes that."""

    def __init__(self) -> None:
        self.begun = self.ended = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun += 1
        await take_body(receive)
        await begin_stream(send)
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.body", "body": b"nobody reads this", "more_body": True})
        self.ended += 1

    async def until(self, count: int) -> None:
        while self.ended < count:
            await asyncio.sleep(0.01)


@in_a_loop
async def test_a_client_that_goes_disconnects_its_request() -> None:
    def abort(writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    def end(writer: asyncio.StreamWriter) -> None:
        writer.write_eof()

    app = Watched()
    async with serving(app) as server:
        for number, (leave, more) in enumerate([(abort, b""), (end, b""), (abort, get() + get()), (end, get())]):
            reader, writer = await server.connect()
            writer.write(post(b"abc") + more)
            await reader.readuntil(b"first")
            leave(writer)
            await asyncio.wait_for(app.until(number + 1), WITHIN)
            writer.close()
        assert app.begun == 4, "a request behind the first one is not begun for a client that has gone"


@in_a_loop
async def test_disconnect_calls_the_last_watcher_of_a_request() -> None:
    calls: list[str] = []
    begun, ended = asyncio.Event(), asyncio.Event()

    async def watch(scope: Any, receive: Any, send: Any) -> None:
        await take_body(receive)
        exchange = scope["extensions"][CLIENT_CONNECTION]
        assert exchange.on_disconnect(first := lambda: calls.append("first")) is None
        assert exchange.on_disconnect(lambda: calls.append("second")) is first
        begun.set()
        while not calls:
            await asyncio.sleep(0.001)
        exchange.on_disconnect(lambda: calls.append("late"))
        exchange.on_disconnect(None)
        while len(calls) < 2:
            await asyncio.sleep(0.001)
        ended.set()

    async with serving(watch) as server:
        _, writer = await server.connect()
        writer.write(post(b"abc"))
        await asyncio.wait_for(begun.wait(), WITHIN)
        assert calls == []
        writer.transport.abort()
        await asyncio.wait_for(ended.wait(), WITHIN)
    assert calls == ["second", "late"]


@in_a_loop
async def test_client_that_does_not_read_blocks_its_application() -> None:
    sent = 0

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await take_body(receive)
        await begin_stream(send)
        watching = asyncio.ensure_future(receive())
        while not watching.done():
            await send({"type": "http.response.body", "body": b"x" * 4096, "more_body": True})
            await asyncio.sleep(0)
            sent += 1
        assert watching.result()["type"] == "http.disconnect"

    async with serving(endless) as server:
        with socket.socket() as listless:
            listless.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            listless.setblocking(False)
            await asyncio.get_running_loop().sock_connect(listless, ("127.0.0.1", server.port))
            await asyncio.get_running_loop().sock_sendall(listless, get())
            before = -1
            while sent == 0 or sent != before:
                before = sent
                await asyncio.sleep(0.3)
            assert 16 << 10 < sent * 4096 < 2 << 20


@in_a_loop
async def test_a_body_that_is_not_taken_stays_with_its_client() -> None:
    taken: list[int] = []
    may_go_on = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await may_go_on.wait()
        while True:
            message = await receive()
            taken.append(len(message["body"]))
            if not message["more_body"]:
                break
        await respond(send, b"%d" % sum(taken))

    async with serving(slow) as server:
        reader, writer = await server.connect()
        writer.write(post(b"x" * (16 << 20), CLOSE))
        before = -1
        while before != (before := writer.transport.get_write_buffer_size()):
            await asyncio.sleep(0.2)
        assert before > 1 << 20, "the server has read on"
        may_go_on.set()
        assert (await asyncio.wait_for(reader.read(), WITHIN)).endswith(b"%d" % (16 << 20))
        writer.close()
    assert max(taken) <= MAX_UNTAKEN_NBYTES + READ_NBYTES


# ── applications that fail ───────────────────────────────────────────────────────────────────────────────────────────
async def fail_early(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    raise ValueError("early")


async def fail_late(scope: Any, receive: Any, send: Any) -> None:
    await begin_stream(send)
    raise ValueError("late")


async def say_nothing(scope: Any, receive: Any, send: Any) -> None:
    pass


async def say_too_little(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"abc"})


async def say_too_much(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
    await send({"type": "http.response.body", "body": b"abc"})


async def split_its_response(scope: Any, receive: Any, send: Any) -> None:
    await respond(send, b"", headers=[(b"x-name", b"a\r\nset-cookie: b")])


@pytest.mark.parametrize("app", [fail_early, say_nothing, say_too_little, say_too_much, split_its_response])
def test_an_application_that_fails_before_its_response_is_an_error_500(
    app: Application, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        output = talked(app, get() + get())
    head, _, body = output.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500 ") and b"connection: close" in head and output.count(b"HTTP/1.1") == 1
    assert json.loads(body)["error"]["type"] == "server_error" and b"set-cookie" not in output


def test_response_is_visibly_incomplete_when_its_application_fails() -> None:
    output = talked(fail_late, get() + get())
    assert output == b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n"


# ── the server's end ─────────────────────────────────────────────────────────────────────────────────────────────────
@in_a_loop
async def test_stopping_server_answers_open_requests_and_closes_idle_connections() -> None:
    may_end = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await begin_stream(send)
        await may_end.wait()
        await send({"type": "http.response.body", "body": b"last"})

    async with serving(app) as server:
        open_reader, open_writer = await server.connect()
        open_writer.write(get())
        await open_reader.readuntil(b"first")
        idle_reader, idle_writer = await server.connect()
        await asyncio.sleep(0.05)
        stopping = asyncio.ensure_future(server.http.stop(WITHIN))
        assert await asyncio.wait_for(idle_reader.read(), WITHIN) == b""
        with pytest.raises(OSError):
            await server.connect()
        assert not stopping.done()
        may_end.set()
        assert (await asyncio.wait_for(open_reader.read(), WITHIN)).endswith(b"4\r\nlast\r\n0\r\n\r\n")
        await stopping
        open_writer.close()
        idle_writer.close()


@pytest.mark.parametrize("has_begun", [False, True])
@in_a_loop
async def test_stopping_server_cancels_requests_past_its_grace_period(has_begun: bool) -> None:
    cancelled = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if has_begun:
            await begin_stream(send)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async with serving(app) as server:
        reader, writer = await server.connect()
        writer.write(get())
        await asyncio.sleep(0.05)
        await server.http.stop(0.1)
        output = await asyncio.wait_for(reader.read(), WITHIN)
        assert cancelled and (output.endswith(b"first\r\n") if has_begun else output.startswith(b"HTTP/1.1 503 "))
        writer.close()
