"""A HTTP/1.1 client for a load generator: it keeps connections, and passes each part of an answer on as it arrives.

A thousand streams should cost one process little: between the socket and the `Taker` of an answer there is only a
parser in C, and no task is woken for an event. The `Taker` interprets the answer.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import Protocol
from urllib.parse import urlsplit

import httptools

LOOKS = 20  # checks for silent requests within the timeout
KEPT = 2.0  # seconds for which an idle connection is reused: servers close idle connections after 5 or more
CROSSED = 0.05  # seconds; a connection that closes sooner was closed before the server saw the request
MAX_HEAD = 1 << 16  # bytes of an answer before its body


class Failure(Exception):
    """A request has no complete answer. Failures are counted by `kind`; the text is of this one."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Taker(Protocol):
    """Receives an answer. Either method may raise Failure: then the connection is aborted."""

    def begin(self, status: int, headers: dict[str, str]) -> None: ...

    def take(self, data: bytes, at: float) -> bool:
        """Receives a part of the body, and the time at which it came (`time.perf_counter`). Returns whether it ends a
        silence."""


class Connection(asyncio.Protocol):
    """A connection to the server, for one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._taker: Taker | None = None
        self._done: asyncio.Future[None] | None = None
        self._begin_answer()
        self._heard_at = 0.0  # time of the last bytes
        self.told_at = 0.0  # time of the last event, or of the request
        self._has_heard = False  # whether a byte of the current answer has come
        self.is_used = False
        self.is_open = True

    def _begin_answer(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._has_length = False  # or chunks; otherwise the body ends with the connection
        self._keeps = False  # the server lets another request follow
        self._head_nbytes = 0
        self._is_body = False
        self._is_whole = False

    async def ask(self, request: bytes, taker: Taker) -> bool:
        """Sends a request, and waits for the end of its answer. Returns whether the connection can be reused.
        Raises Failure."""
        assert self._transport is not None, "a connection that was made"
        self._begin_answer()
        self._taker, self._has_heard = taker, False
        self._done = asyncio.get_running_loop().create_future()
        self.told_at = time.perf_counter()
        try:
            if not self.is_open:
                raise Failure("closed", "the server closed the connection before it answered")
            self._transport.write(request)
            await self._done
        except BaseException:
            self.abort()
            raise
        finally:
            self._taker = self._done = None
        self.is_used = True
        return self._can_be_kept

    @property
    def _can_be_kept(self) -> bool:
        return self.is_open and self._keeps

    @property
    def is_crossed(self) -> bool:
        """Returns whether the server may have closed the idle connection just when this request was sent."""
        return self.is_used and not self._has_heard and time.perf_counter() - self.told_at < CROSSED

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def fail(self, failure: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(failure)

    # ── of the transport ──
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a stream"
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._heard_at = time.perf_counter()
        if self._done is None or self._done.done():
            self.abort()  # bytes that answer no request
            return
        self._has_heard = True
        if not self._is_body:
            self._head_nbytes += len(data)
        try:
            self._parser.feed_data(data)
            if not self._is_body and self._head_nbytes > MAX_HEAD:
                raise Failure("not HTTP", f"the answer's head is longer than {MAX_HEAD} bytes")
        except Failure as failure:
            self.fail(failure)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            self.fail(cause if isinstance(cause, Failure) else error)
        except httptools.HttpParserError as error:
            self.fail(Failure("not HTTP", f"{error}: {data[:60]!r}"))
        if self._is_whole and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._done is None or self._done.done():
            return
        if error is None and self._is_body and not self._has_length:
            self._done.set_result(None)
        else:
            where = "in the middle of its answer" if self._is_body else "before it answered"
            self.fail(Failure("closed", f"the server closed the connection {where}{f': {error}' if error else ''}"))

    # ── of the parser ──
    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # more will come
            return
        self._is_body = True
        self._has_length = "content-length" in self._headers or "transfer-encoding" in self._headers
        self._keeps = self._has_length and bool(self._parser.should_keep_alive())
        assert self._taker is not None
        self._taker.begin(status, self._headers)
        self.told_at = self._heard_at

    def on_body(self, data: bytes) -> None:
        assert self._taker is not None
        if self._taker.take(data, self._heard_at):
            self.told_at = self._heard_at

    def on_message_complete(self) -> None:
        if self._is_body:
            self._is_whole = True
        else:
            self._headers = {}


class Wire:
    """All connections to one server. `async with` closes them at the end."""

    def __init__(self, url: str, api_key: str, timeout: float) -> None:
        """`timeout`: seconds without an event, or to connect. Raises ValueError unless the URL is http or https."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected a URL like http://127.0.0.1:8000, got {url!r}")
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        authorized = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = f"host: {parts.netloc.rpartition('@')[2]}\r\nuser-agent: penstock\r\n{authorized}".encode()
        self._timeout = timeout
        self._free: list[Connection] = []
        self._busy: set[Connection] = set()
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Wire:
        self._watch = asyncio.ensure_future(self._watch_the_silent())
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._watch is not None
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        for connection in (*self._free, *self._busy):
            connection.abort()
        await asyncio.sleep(0)  # in which they are closed

    async def get(self, path: str, taker: Taker) -> None:
        """Sends GET, and returns at the end of the answer. Raises Failure."""
        await self._ask(b"GET %b%b HTTP/1.1\r\n%b\r\n" % (self._path.encode(), path.encode(), self._head), taker)

    async def post(self, path: str, body: bytes, taker: Taker) -> None:
        """Sends POST with a JSON body, and returns at the end of the answer. Raises Failure."""
        head = b"POST %b%b HTTP/1.1\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        await self._ask(head % (self._path.encode(), path.encode(), self._head, len(body)) + body, taker)

    async def _ask(self, request: bytes, taker: Taker) -> None:
        while True:
            connection = self._idle_connection() or await self._connect()
            self._busy.add(connection)
            try:
                if await connection.ask(request, taker):
                    self._free.append(connection)
                else:
                    connection.abort()
                return
            except Failure as failure:
                if not (failure.kind == "closed" and connection.is_crossed):
                    raise
            finally:
                self._busy.discard(connection)

    def _idle_connection(self) -> Connection | None:
        """Returns an idle connection that the server has not closed and will not close soon; None: there is none."""
        while self._free:
            connection = self._free.pop()
            if connection.is_open and time.perf_counter() - connection.told_at < KEPT:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        connecting = loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        try:
            _, connection = await asyncio.wait_for(connecting, self._timeout)
        except (TimeoutError, asyncio.TimeoutError):
            raise Failure("not connected", f"no connection within {self._timeout:g} s") from None
        except OSError as error:
            raise Failure("not connected", str(error)) from None
        return connection

    async def _watch_the_silent(self) -> None:
        """Fails requests without an event for too long: one periodic check of all, and no timer for each."""
        while True:
            await asyncio.sleep(self._timeout / LOOKS)
            latest = time.perf_counter() - self._timeout
            for connection in self._busy:
                if connection.told_at < latest:
                    connection.fail(Failure("silent", f"no event came for {self._timeout:g} s"))
