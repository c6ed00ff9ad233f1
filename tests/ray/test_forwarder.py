"""Replicas forward bodies and streams byte for byte; requests end when their client or engine goes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp comes with the extra ray: pip install '.[engine,ray]'")

from penstock.integrations.ray_serve.forwarder import Forwarder
from tests.support.loops import in_a_loop, until

Handler = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
WITHIN = 10.0  # seconds; for anything
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    lines = b"".join(b"\r\n" + header for header in headers)
    return b"HTTP/1.1 %b%b\r\ncontent-length: %d\r\n\r\n%b" % (status, lines, len(body), body)


class Engine:
    """Answers each request by a function, and remembers heads and bodies."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.heads: list[bytes] = []
        self.connections = self.open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                await self._handler(head, reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.transport.abort()


class Client:
    """One request, as an ASGI server hands it to the application, and what has been sent to it."""

    def __init__(self, *chunks: bytes, method: str = "POST", path: str = "/v1/completions", **scope: Any) -> None:
        self.scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": [], **scope}
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[dict[str, Any]] = []
        for number, chunk in enumerate(chunks or (b"",)):
            self.push(chunk, more=number + 1 < len(chunks))

    def push(self, chunk: bytes, *, more: bool) -> None:
        self._incoming.put_nowait({"type": "http.request", "body": chunk, "more_body": more})

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def receive(self) -> dict[str, Any]:
        return await self._incoming.get()

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def run(self, forwarder: Forwarder) -> Client:
        await asyncio.wait_for(forwarder(self.scope, self.receive, self.send), WITHIN)
        return self

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        headers: list[tuple[bytes, bytes]] = self.sent[0]["headers"]
        return headers

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def is_complete(self) -> bool:
        return len(self.sent) > 1 and not self.sent[-1].get("more_body", False)


@contextlib.asynccontextmanager
async def forwarding(handler: Handler) -> AsyncIterator[tuple[Engine, Forwarder]]:
    engine = Engine(handler)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    forwarder = Forwarder(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield engine, forwarder
    finally:
        await forwarder.close()
        server.close()
        await until(lambda: engine.open == 0)


async def body_of(head: bytes, reader: asyncio.StreamReader) -> bytes:
    headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
    if b"content-length" in headers:
        return await reader.readexactly(int(headers[b"content-length"]))
    body = b""
    while b"transfer-encoding" in headers:
        size = int(await reader.readline(), 16)
        body += (await reader.readexactly(size + 2))[:-2]
        if size == 0:
            break
    return body


async def echo(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(whole(head.split(b"\r\n")[0] + b"|" + await body_of(head, reader)))


@in_a_loop
async def test_a_request_is_passed_on_as_it_came() -> None:
    async with forwarding(echo) as (engine, forwarder):
        headers = [(b"host", b"example.org"), (b"content-length", b"4"), (b"authorization", b"Bearer k\xc3\xa9y"),
                   (b"connection", b"close"), (b"expect", b"100-continue"), (b"accept-encoding", b"zstd"),
                   (b"x-twice", b"1"), (b"x-twice", b"2")]  # fmt: skip
        client = await Client(b"body", headers=headers, query_string=b"a=%20b&c").run(forwarder)
        assert (client.status, client.body) == (200, b"POST /v1/completions?a=%20b&c HTTP/1.1|body")
        assert client.is_complete
        lines = engine.heads[0].lower().split(b"\r\n")
        assert b"authorization: bearer k\xc3\xa9y" in lines and b"accept-encoding: zstd" in lines
        assert b"x-twice: 1" in lines and b"x-twice: 2" in lines
        names = {line.partition(b":")[0] for line in lines[1:] if line}
        assert names == {b"host", b"content-length", b"authorization", b"accept-encoding", b"x-twice"}
        assert b"host: example.org" not in lines


@in_a_loop
async def test_a_body_that_comes_in_pieces_is_passed_on_while_it_comes() -> None:
    begun = asyncio.Event()

    async def handler(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.readexactly(3)
        begun.set()
        writer.write(whole(first + await reader.readexactly(3)))

    async with forwarding(handler) as (engine, forwarder):
        client = Client(headers=[(b"content-length", b"6")])
        client._incoming.get_nowait()
        client.push(b"abc", more=True)
        request = asyncio.ensure_future(client.run(forwarder))
        await asyncio.wait_for(begun.wait(), WITHIN)
        client.push(b"def", more=False)
        assert (await request).body == b"abcdef"
        assert b"transfer-encoding" not in engine.heads[0].lower()


@in_a_loop
async def test_a_long_body_in_one_piece_is_passed_on_whole() -> None:
    async with forwarding(echo) as (engine, forwarder):
        body = bytes(range(256)) * (3 << 12)
        client = await Client(body, headers=[(b"content-length", b"%d" % len(body))]).run(forwarder)
        assert client.body.partition(b"|")[2] == body
        assert b"transfer-encoding" not in engine.heads[0].lower()


@in_a_loop
async def test_rest_of_a_refused_body_is_read_before_the_answer_ends() -> None:
    async def handler(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(b"{}", b"connection: close", status=b"413 Too Large"))
        await writer.drain()
        raise ConnectionResetError

    async with forwarding(handler) as (_, forwarder):
        client = Client(headers=[(b"content-length", b"9")])
        client._incoming.get_nowait()
        client.push(b"abc", more=True)
        request = asyncio.ensure_future(client.run(forwarder))
        await until(lambda: len(client.sent) > 1)
        assert client.status == 413 and not client.is_complete
        client.push(b"def", more=True)
        client.push(b"ghi", more=False)
        assert (await request).is_complete and client.body == b"{}"


@in_a_loop
async def test_a_body_without_a_length_is_passed_on_in_chunks() -> None:
    async with forwarding(echo) as (_, forwarder):
        assert (await Client(b"abc", b"", b"def").run(forwarder)).body.endswith(b"|abcdef")


@pytest.mark.parametrize(
    ("scope", "line"),
    [
        ({"path": "/v1/models/a/b", "raw_path": b"/v1/models/a%2Fb"}, b"GET /v1/models/a%2Fb HTTP/1.1|"),
        ({"path": "/v1/models/a b"}, b"GET /v1/models/a%20b HTTP/1.1|"),
        ({"path": "/shapes/v1/models", "root_path": "/shapes"}, b"GET /v1/models HTTP/1.1|"),
        ({"path": "/shapes", "root_path": "/shapes"}, b"GET / HTTP/1.1|"),
    ],
)
@in_a_loop
async def test_path_is_forwarded_encoded_and_without_its_route_prefix(scope: dict[str, Any], line: bytes) -> None:
    async with forwarding(echo) as (_, forwarder):
        assert (await Client(method="GET", **scope).run(forwarder)).body == line


@in_a_loop
async def test_answer_is_returned_unchanged_except_headers_of_the_front_server() -> None:
    async def handler(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            whole(b"{}", b"Date: now", b"Server: it", b"Keep-Alive: 5", b"X-Request-Id: 7", b"Set-Cookie: a=1",
                  b"Set-Cookie: b=2", b"content-encoding: gzip", b"location: /elsewhere", status=b"307 Elsewhere")
        )  # fmt: skip

    async with forwarding(handler) as (engine, forwarder):
        client = await Client(method="GET", headers=[(b"x-request-id", b"7")]).run(forwarder)
        assert client.status == 307 and client.body == b"{}"
        assert sorted(client.headers) == [
            (b"content-encoding", b"gzip"), (b"content-length", b"2"), (b"location", b"/elsewhere"),
            (b"set-cookie", b"a=1"), (b"set-cookie", b"b=2"),
        ]  # fmt: skip
        assert (b"x-request-id", b"7") in (await Client(method="GET").run(forwarder)).headers
        assert engine.connections == 1 and not any(b"cookie" in head.lower() for head in engine.heads)


@in_a_loop
async def test_a_stream_comes_piece_by_piece() -> None:
    go_on = asyncio.Event()

    async def handler(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(EVENTS + chunk(b"data: 1\n\n"))
        await go_on.wait()
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with forwarding(handler) as (_, forwarder):
        client = Client()
        request = asyncio.ensure_future(client.run(forwarder))
        await until(lambda: len(client.sent) > 1 and client.body == b"data: 1\n\n")
        assert not client.is_complete
        go_on.set()
        assert (await request).body == b"data: 1\n\ndata: [DONE]\n\n"
        assert client.is_complete


@pytest.mark.parametrize("cancelled", [False, True], ids=["told", "cancelled"])
@in_a_loop
async def test_the_engine_is_left_when_the_client_leaves(cancelled: bool) -> None:
    """Serve cancels the application, or tells it that the client has left, or both."""

    async def handler(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(EVENTS + chunk(b"data: 1\n\n"))
        await reader.readexactly(1)  # ends when the connection does

    async with forwarding(handler) as (engine, forwarder):
        client = Client()
        request = asyncio.ensure_future(client.run(forwarder))
        await until(lambda: len(client.sent) > 1)
        if cancelled:
            request.cancel()
        else:
            client.leave()
        await asyncio.wait({request}, timeout=WITHIN)
        assert request.cancelled() == cancelled and not client.is_complete
        await until(lambda: engine.open == 0)


@in_a_loop
async def test_client_that_leaves_within_its_request_occupies_no_engine() -> None:
    async with forwarding(echo) as (engine, forwarder):
        client = Client(headers=[(b"content-length", b"6")])
        client._incoming.get_nowait()
        client.push(b"abc", more=True)
        request = asyncio.ensure_future(client.run(forwarder))
        await until(lambda: len(engine.heads) == 1)
        client.leave()
        await asyncio.wait({request}, timeout=WITHIN)
        assert request.done() and not client.is_complete
        await until(lambda: engine.open == 0)
        early = Client()
        early._incoming.get_nowait()
        early.leave()
        assert (await early.run(forwarder)).sent == [] and len(engine.heads) == 1


@in_a_loop
async def test_an_engine_that_goes_before_it_has_answered_is_a_503() -> None:
    async def handler(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise ConnectionResetError

    async with forwarding(handler) as (_, forwarder):
        client = await Client().run(forwarder)
        assert client.status == 503 and (b"retry-after", b"1") in client.headers and client.is_complete
        assert "has not answered" in json.loads(client.body)["error"]["message"]


@in_a_loop
async def test_a_stream_whose_engine_goes_ends_with_an_event_that_says_so() -> None:
    async def handler(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(EVENTS + chunk(b"data: 1\n\n"))
        await writer.drain()
        raise ConnectionResetError

    async with forwarding(handler) as (_, forwarder):
        client = await Client().run(forwarder)
        first, error, rest = client.body.split(b"\n\n")
        assert first == b"data: 1" and rest == b"" and client.is_complete
        assert json.loads(error.removeprefix(b"data: "))["error"]["type"] == "server_error"


@pytest.mark.parametrize("head", [EVENTS, EVENTS.replace(b"text/event-stream", b"application/json")])
@in_a_loop
async def test_an_answer_that_is_cut_amid_a_piece_is_no_whole_answer(head: bytes) -> None:
    async def handler(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head + chunk(b'data: {"choi'))
        await writer.drain()
        raise ConnectionResetError

    async with forwarding(handler) as (_, forwarder):
        client = Client()
        with pytest.raises(Exception, match=r"payload|closed|Connection"):
            await client.run(forwarder)
        assert client.status == 200 and not client.is_complete


@in_a_loop
async def test_ended_engine_refuses_requests_and_open_ones_are_awaited() -> None:
    go_on = asyncio.Event()

    async def handler(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        writer.write(whole(b"{}"))

    async with forwarding(handler) as (engine, forwarder):
        request = asyncio.ensure_future(Client().run(forwarder))
        await until(lambda: len(engine.heads) == 1)
        forwarder.refuse("the engine has ended")
        refused = await Client().run(forwarder)
        assert refused.status == 503 and b"the engine has ended" in refused.body
        await forwarder.drain(0.01)
        assert not request.done()
        go_on.set()
        await forwarder.drain(WITHIN)
        assert (await request).status == 200


@in_a_loop
async def test_a_websocket_is_closed() -> None:
    async with forwarding(echo) as (engine, forwarder):
        client = Client(type="websocket")
        await client.run(forwarder)
        assert client.sent == [{"type": "websocket.close", "code": 1000}] and not engine.heads
