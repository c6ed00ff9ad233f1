"""One client's connection: its requests are answered in their order, with bounds on how much and how slowly it sends.

`request_parser` finds the requests, an `HttpExchange` runs the application for each, `http_server` takes connections.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from email.utils import formatdate
from typing import cast

from starlette.types import ASGIApp, Scope

from penstock.server.errors import ApiError
from penstock.server.http.exchange import STATUS_LINES, HttpExchange
from penstock.server.http.request_parser import Address, RequestParser

RECEIVE_NBYTES = 256 << 10  # at once, as asyncio does
MAX_UNTAKEN_NBYTES = 64 << 10  # of a body, before reading pauses until the application takes it
MAX_AHEAD = 16  # requests that a client may send before the one that is being answered is …
MAX_AHEAD_NBYTES = 256 << 10  # … and bytes of them, while it is not
SLOWEST = 16 << 10  # bytes per second of a body; slower ones have been given up when the patience has ended
KEPT = 75.0  # seconds that an idle connection is kept: longer than proxies keep theirs, so that they close it first
MAX_LINGERING = 64  # connections above the limit that end slowly, so that the client gets its refusal
LINGER = 2.0  # seconds without more of what is thrown away so that the refusal of it arrives …
MAX_THROWN_NBYTES = 64 << 20  # … and bytes of it: the longest of usual bodies
MAX_STARTED = 16  # requests in one pass of the event loop: about 4 ms, after which earlier ones and streams go on
BURST_SHARE = 16  # of those that wait, 1/16 may start in a pass: tokens of more requests are written at once


class ServerState:
    """What the connections of one server share."""

    def __init__(self, app: ASGIApp, max_connections: int, client_timeout: float) -> None:
        """`client_timeout` in seconds, for a client that sends slowly."""
        self.app = app
        self.max_connections = max_connections
        self.client_timeout = client_timeout
        self.connections: set[HttpConnection] = set()
        self.tasks: set[asyncio.Task[None]] = set()  # of the application, one for each request
        self.is_stopping = False
        self.has_fewer = asyncio.Event()  # connections or tasks
        # For all connections: asyncio would allocate 256 KiB for each read and shrink it, and the heap ends in holes.
        self.receive_buffer = memoryview(bytearray(RECEIVE_NBYTES))
        self._waiting: deque[HttpExchange] = deque()  # to be started by later passes of the event loop
        self._started = 0  # in this pass
        self._second = 0
        self._date_line = b""

    @property
    def date_line(self) -> bytes:
        now = int(time.time())
        if now != self._second:
            self._second, self._date_line = now, b"date: %b\r\n" % formatdate(now, usegmt=True).encode("ascii")
        return self._date_line

    def start(self, exchange: HttpExchange) -> None:
        """Starts the application, or has a later pass of the event loop start it: each starts only some."""
        self._waiting.append(exchange)
        if not self._started:
            asyncio.get_running_loop().call_soon(self._next_pass)
        self._start_waiting(MAX_STARTED)

    def _next_pass(self) -> None:
        self._started = 0
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next_pass)
            self._start_waiting(max(MAX_STARTED, len(self._waiting) // BURST_SHARE))

    def _start_waiting(self, limit: int) -> None:
        while self._waiting and self._started < limit:
            self._started += 1
            task = asyncio.ensure_future(self._waiting.popleft().run(self.app))
            self.tasks.add(task)
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self.has_fewer.set()


class HttpConnection(asyncio.BufferedProtocol):
    """Requests are read while an earlier one is answered: otherwise the connection would not see its client go."""

    def __init__(self, state: ServerState) -> None:
        self.is_write_paused = False
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._exchanges: deque[HttpExchange] = deque()  # the first one is being answered, the last one may still come
        self._incoming: HttpExchange | None = None  # the one that still comes
        self._has_requested = False
        self._is_last = False  # the last request has come: the connection ends after its response
        self._is_over = False  # nothing that comes is parsed any more
        self._is_read_paused = False
        self._began = 0.0  # the message, or the wait for the first one
        self._idle_since = 0.0
        self._ahead_nbytes = 0
        self._thrown_nbytes = 0
        self._timer: asyncio.TimerHandle | None = None  # one for all deadlines

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.write = self._transport.write
        socket = transport.get_extra_info("socket")
        has_tls = transport.get_extra_info("sslcontext") is not None
        self._descriptor = None if socket is None or has_tls else socket.fileno()
        self._writable = asyncio.Event()
        scheme = "https" if has_tls else "http"
        self._parser = RequestParser(self, _address(transport, "sockname"), _address(transport, "peername"), scheme)
        connections, most = self._state.connections, self._state.max_connections
        connections.add(self)
        if self._state.is_stopping:
            self._transport.close()
        elif len(connections) > most:
            self._write_error(ApiError(503, f"{most} connections are open already"))
            # The request lies there unread, and an end at once would take the answer with it. But there is an end.
            if len(connections) <= most + MAX_LINGERING:
                self._end_slowly()
            else:
                self._transport.close()
        else:
            self._began = self._loop.time()
            self._set_timer(self._due)

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)
        self._state.has_fewer.set()
        self._is_over = True
        self._give_up()
        self._parser.close()
        if self._timer is not None:
            self._timer.cancel()

    def stop(self) -> None:
        """The server ends. Requests that have come are answered."""
        if self._exchanges:
            self._exchanges[-1].keep_alive = False
        else:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    @property
    def _is_ending(self) -> bool:
        return self._is_over or self._transport.is_closing()

    # ── what comes ──
    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns one buffer for all connections: the event loop fills it, and calls `buffer_updated` at once."""
        return self._state.receive_buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = self._state.receive_buffer[:nbytes]
        if self._is_ending or self._is_last:
            self._throw_away(data)
        else:
            self._parse(data)

    def _parse(self, data: memoryview) -> None:
        try:
            self._parser.feed(data)
        except ApiError as error:
            if self._is_last:  # what follows it is no request
                self._throw_away(data)
            else:
                self.refuse(error)
        if self._is_ending:
            return
        is_ahead = len(self._exchanges) > 1
        self._ahead_nbytes = self._ahead_nbytes + len(data) if is_ahead else 0
        if self._has_too_many_ahead or self._ahead_nbytes > MAX_AHEAD_NBYTES:
            self._transport.abort()  # a refusal would come amid another response
        elif self._parser.is_in_message:
            self._set_timer(self._due)

    def eof_received(self) -> None:
        """Disconnects the requests, as a client that has gone sends no more than this. The transport closes itself."""
        self._is_over = True
        self._give_up()

    def _throw_away(self, data: memoryview) -> None:
        self._thrown_nbytes += len(data)
        if self._thrown_nbytes > MAX_THROWN_NBYTES:
            self._transport.close()

    @property
    def _has_too_many_ahead(self) -> bool:
        return len(self._exchanges) > 1 + MAX_AHEAD

    def begin_message(self) -> None:
        self._began = self._loop.time()

    def begin_request(self, scope: Scope, keep_alive: bool, expects_continue: bool) -> None:
        if self._is_last or self._has_too_many_ahead:
            return
        self._has_requested = True
        keep_alive = keep_alive and not self._state.is_stopping
        self._incoming = HttpExchange(self, scope, keep_alive, expects_continue)
        self._exchanges.append(self._incoming)
        if len(self._exchanges) == 1:
            self._state.start(self._incoming)

    def add_body(self, body: bytes) -> None:
        if self._incoming is None:
            return
        untaken_nbytes = self._incoming.add_body(body)
        is_first = self._incoming is self._exchanges[0]
        if untaken_nbytes > MAX_UNTAKEN_NBYTES and is_first and not self._is_read_paused:
            self._is_read_paused = True
            self._transport.pause_reading()

    def end_request(self) -> None:
        if self._incoming is not None:
            self._incoming.end_body()
            self._is_last = not self._incoming.keep_alive
            self._incoming = None

    # ── deadlines ──
    @property
    def _due(self) -> float:
        """When the message must be there. Empty lines before the first one win no time."""
        return self._began + self._state.client_timeout + self._parser.body_nbytes / SLOWEST

    def _set_timer(self, when: float) -> None:
        """An earlier timer stays: it is set again when it finds that there is time left."""
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        if self._parser.is_in_message or not self._has_requested:
            if self._is_read_paused or (self._exchanges and self._exchanges[0].is_received):
                self._began = now  # reading is paused, or another request is before it
            if now < self._due:
                self._set_timer(self._due)
            else:
                patience = self._state.client_timeout
                self.refuse(ApiError(408, f"a request came more slowly than within {patience:g} s"))
        elif not self._exchanges:
            if now < self._idle_since + KEPT:
                self._set_timer(self._idle_since + KEPT)
            else:
                self._transport.close()

    # ── what goes ──
    @property
    def date_line(self) -> bytes:
        return self._state.date_line

    @property
    def idle_descriptor(self) -> int | None:
        """Returns the descriptor of a connection without unsent bytes and without TLS. None: it is not one."""
        is_idle = not self.is_write_paused and not self._is_ending and not self._transport.get_write_buffer_size()
        return self._descriptor if is_idle else None

    def pause_writing(self) -> None:
        self.is_write_paused = True
        self._writable.clear()

    def resume_writing(self) -> None:
        self.is_write_paused = False
        self._writable.set()

    async def drain(self) -> None:
        await self._writable.wait()

    def resume_reading(self) -> None:
        if self._is_read_paused:
            self._is_read_paused = False
            self._transport.resume_reading()

    def complete(self, exchange: HttpExchange) -> None:
        """The response has been written: the next request, or the end."""
        self._exchanges.popleft()
        if self._transport.is_closing():
            return
        if not exchange.keep_alive:
            self._end()
            return
        self.resume_reading()
        if self._exchanges:
            self._ahead_nbytes = 0
            self._state.start(self._exchanges[0])
        elif not self._parser.is_in_message:
            self._idle_since = self._loop.time()
            self._set_timer(self._idle_since + KEPT)

    def fail(self, exchange: HttpExchange, error: ApiError) -> None:
        """The application has ended without a complete response."""
        if exchange.is_complete or exchange.is_disconnected or self._transport.is_closing():
            return
        if not exchange.has_begun:
            self._write_error(error)
        exchange.disconnect()
        self._exchanges.popleft()
        self._end()

    def refuse(self, error: ApiError) -> None:
        """Ends the connection; the client gets the error where no response is under way."""
        if self._is_ending:
            return
        if self._exchanges and self._exchanges[0].has_begun:
            self._transport.abort()
            return
        self._write_error(error)
        self._give_up()
        self._end_slowly()

    def _write_error(self, error: ApiError) -> None:
        headers = {**(error.headers or {}), "content-type": "application/json", "connection": "close"}
        lines = [b"%b: %b\r\n" % (name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()]
        length = b"content-length: %d\r\n\r\n" % len(error.body)
        self.write(b"".join([STATUS_LINES[error.status], self.date_line, *lines, length, error.body]))

    def _give_up(self) -> None:
        """Disconnects all requests of this client that have no complete response."""
        for exchange in self._exchanges:
            exchange.disconnect()
        self._exchanges.clear()
        self._incoming = None
        self.resume_writing()

    def _end(self) -> None:
        """After the last response. Unread bytes of the client would make the kernel take back what has not arrived."""
        if self._parser.is_in_message or self._exchanges or self._thrown_nbytes:
            self._give_up()
            self._end_slowly()
        else:
            self._transport.close()

    def _end_slowly(self) -> None:
        self._is_over = True
        self.resume_reading()
        try:
            if self._transport.can_write_eof():  # TLS has no end of one direction
                self._transport.write_eof()
        except OSError:  # the client has gone: what was just written has reset the connection
            self._transport.abort()
        else:
            self._linger(self._loop.time() + self._state.client_timeout)

    def _linger(self, until: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        when = min(self._loop.time() + LINGER, until)
        self._timer = self._loop.call_at(when, self._end_unless_more, self._thrown_nbytes, until)

    def _end_unless_more(self, thrown_nbytes: int, until: float) -> None:
        if self._thrown_nbytes == thrown_nbytes or self._loop.time() >= until:
            self._transport.close()
        else:
            self._linger(until)


def _address(transport: asyncio.BaseTransport, name: str) -> Address:
    address = transport.get_extra_info(name)
    return (address[0], address[1]) if isinstance(address, tuple) else None
