"""Passes HTTP requests on to an engine and streams the answers back: an ASGI application.

When a client leaves, the forwarder closes the connection to the engine, which aborts the request. The forwarder does
not read bodies and events.
"""

from __future__ import annotations

import asyncio
import contextlib
import urllib.parse
from collections.abc import AsyncIterator

import aiohttp
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from penstock.integrations.ray_serve.event_stream import ENDED, EventStream
from penstock.server.errors import RETRY_AFTER, ApiError

SHORT_NBYTES = 64 << 10  # of a body that is sent at once; a longer body is sent in parts
DROP_TIMEOUT, DROP_NBYTES = 10.0, 64 << 20  # for the rest of a refused body
CONNECT_TIMEOUT = 10.0  # seconds; the engine is on the local machine
# Headers of a connection, and not of the message.
HOP_BY_HOP = {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
NOT_FORWARDED = HOP_BY_HOP | {b"host", b"expect"}
NOT_RETURNED = HOP_BY_HOP | {b"date", b"server"}  # written by Serve's HTTP server
REQUEST_ID = b"x-request-id"  # Serve numbers each request, and writes the number into the answer
ADDED_BY_CLIENT = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")  # by aiohttp, if missing
REFUSAL_DELAY = 0.1  # seconds; an ending replica refuses slowly: fast refusals would attract the router's requests


class ClientLeft(Exception):
    """The client has disconnected before its request was complete."""


class Forwarder:
    """Passes requests on to the server at `url`. Created, used and closed in one event loop."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=ADDED_BY_CLIENT,
            auto_decompress=False,
        )
        self._open = 0
        self._has_fewer = asyncio.Event()
        self._refusal = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the engine has no WebSockets
            await receive()
            return await send({"type": "websocket.close", "code": 1000})
        if self._refusal:
            await asyncio.sleep(REFUSAL_DELAY)
            return await _refuse(self._refusal, scope, receive, send)
        self._open += 1
        try:
            await self._pass_on(scope, _Body(receive), send)
        finally:
            self._open -= 1
            self._has_fewer.set()

    def refuse(self, reason: str) -> None:
        """Answers all further requests with 503."""
        self._refusal = reason

    async def drain(self, timeout: float) -> None:
        """Waits until no request is open, for `timeout` seconds at most."""
        deadline = asyncio.get_running_loop().time() + timeout
        while self._open:
            self._has_fewer.clear()
            remaining = deadline - asyncio.get_running_loop().time()
            try:
                await asyncio.wait_for(self._has_fewer.wait(), max(0.0, remaining))
            except asyncio.TimeoutError:
                return

    async def close(self) -> None:
        await self._session.close()

    async def _pass_on(self, scope: Scope, body: _Body, send: Send) -> None:
        answer = asyncio.ensure_future(self._answer(scope, body, send))
        left = asyncio.ensure_future(body.wait_until_left())
        try:
            await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done() and not body.has_left:
                answer.result()
        finally:
            for task in (answer, left):
                task.cancel()
            await asyncio.gather(answer, left, return_exceptions=True)

    async def _answer(self, scope: Scope, body: _Body, send: Send) -> None:
        answer = _Answer(send)
        try:
            response = await self._request(scope, body)
            try:
                await answer.begin(response, scope)
                async for chunk in response.content.iter_any():
                    await answer.send(chunk)
            except BaseException:
                response.close()  # the engine aborts the request when its connection ends
                raise
            response.release()
            # A server in front resets a connection with unread bytes, and the client loses the answer.
            await body.drop_rest(DROP_TIMEOUT, DROP_NBYTES)
            await answer.end()
        except (aiohttp.ClientError, OSError) as error:
            if body.has_left:
                return
            reason = f"the engine of this replica has not answered: {type(error).__name__}: {error}"
            if not answer.has_begun:
                await asyncio.sleep(REFUSAL_DELAY)
                await _refuse(reason, scope, body.receive, send)
            elif not await answer.fail(reason):
                raise

    async def _request(self, scope: Scope, body: _Body) -> aiohttp.ClientResponse:
        first = await body.receive_first()
        is_short = body.is_complete and len(first) <= SHORT_NBYTES
        data = (first or None) if is_short else body.chunks()
        headers = [(_text(name), _text(value)) for name, value in scope["headers"] if name not in NOT_FORWARDED]
        url = URL(self._url + _target(scope), encoded=True)
        return await self._session.request(scope["method"], url, headers=headers, data=data, allow_redirects=False)


class _Body:
    """The body of a request, and then the notice that the client has left."""

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self.has_left = False
        self._first = b""
        self._complete = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        return self._complete.is_set()

    async def receive_first(self) -> bytes:
        """Most bodies are whole then. Raises ClientLeft."""
        self._first = await self._next()
        return self._first

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yields the whole body. Raises ClientLeft."""
        yield self._first
        while not self.is_complete:
            yield await self._next()

    async def _next(self) -> bytes:
        message = await self.receive()
        if message["type"] == "http.disconnect":
            self.has_left = True
            self._complete.set()
            raise ClientLeft
        if not message.get("more_body", False):
            self._complete.set()
        chunk: bytes = message.get("body", b"")
        return chunk

    async def drop_rest(self, timeout: float, nbytes: int) -> None:
        """Reads the rest of a refused body, up to DROP_TIMEOUT and DROP_NBYTES."""

        async def drop() -> None:
            dropped = 0
            while not self.is_complete and dropped < nbytes:
                dropped += len(await self._next())

        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(drop(), timeout)

    async def wait_until_left(self) -> None:
        await self._complete.wait()
        while not self.has_left:
            self.has_left = (await self.receive())["type"] == "http.disconnect"


class _Answer:
    """The answer of the engine, on its way to the client."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._stream: EventStream | None = None
        self.has_begun = False

    async def begin(self, response: aiohttp.ClientResponse, scope: Scope) -> None:
        dropped = NOT_RETURNED | {name for name, _ in scope["headers"] if name == REQUEST_ID}
        raw = [(name.lower(), value) for name, value in response.raw_headers]
        headers = [(name, value) for name, value in raw if name not in dropped]
        start = {"type": "http.response.start", "status": response.status, "headers": headers}
        self.has_begun, self._stream = True, EventStream(start)
        await self._send(start)

    async def send(self, chunk: bytes) -> None:
        assert self._stream is not None, "the answer has begun"
        self._stream.add(chunk)
        await self._send(_body(chunk, more_body=True))

    async def end(self) -> None:
        await self._send(_body(b"", more_body=False))

    async def fail(self, reason: str) -> bool:
        """Ends a stream of events with an error event. Returns False if an event is cut."""
        if self._stream is None or not self._stream.can_end:
            return False
        await self._stream.fail(reason, self._send)
        return True


def _body(chunk: bytes, *, more_body: bool) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": more_body}


async def _refuse(reason: str, scope: Scope, receive: Receive, send: Send) -> None:
    name, value = ENDED
    headers = {"Retry-After": str(RETRY_AFTER), name.decode(): value.decode()}
    await ApiError(503, reason, headers=headers).response()(scope, receive, send)


def _text(value: bytes) -> str:
    """Returns a header's name or value as text that aiohttp encodes (in UTF-8) to the received bytes."""
    return value.decode("utf-8", "replace")


def _target(scope: Scope) -> str:
    """Returns path and query without the prefix of the route, as they were encoded."""
    prefix = scope.get("root_path", "")
    path: str = scope["path"]
    raw: bytes = scope.get("raw_path") or urllib.parse.quote(path).encode()
    encoded = raw.decode("ascii", "replace")
    encoded_prefix = urllib.parse.quote(prefix)
    if encoded_prefix and encoded.startswith(encoded_prefix):
        encoded = encoded[len(encoded_prefix) :] or "/"
    query = scope.get("query_string", b"").decode("ascii", "replace")
    return f"{encoded}?{query}" if query else encoded
