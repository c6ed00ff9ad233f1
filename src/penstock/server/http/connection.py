"""One client's connection: bounds on what it sends besides bodies, and on how slowly it sends.

uvicorn implements HTTP, but its parser has no such bounds. `app` answers the requests.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from penstock.server.errors import ApiError

MAX_BESIDES_NBYTES = 64 << 10  # of a request: its head, and what follows its body
FRAMING = 8  # and so much more for each byte of a body: chunks may be of one byte each
MAX_AHEAD = 16  # requests that a client may send before the one that is being answered is …
MAX_AHEAD_NBYTES = 256 << 10  # … and bytes of them, while it is not
SLOWEST = 16 << 10  # bytes per second of a body; slower ones have been given up when the patience has ended
MAX_LINGERING = 64  # connections above the limit that end slowly, so that the client gets its refusal
LINGER = 2.0  # seconds without more of what is thrown away so that the refusal of it arrives …
MAX_THROWN_NBYTES = 64 << 20  # … and bytes of it: the longest of usual bodies


class LimitedConnection(HttpToolsProtocol):
    """uvicorn makes one for each connection that it takes."""

    def __init__(self, most: int, patience: float, **given: Any) -> None:
        """`most` connections of this process at a time; `patience` in seconds, for a client that sends slowly."""
        super().__init__(**given)
        self._most = most
        self._patience = patience
        self._running: RequestResponseCycle | None = None
        self._is_in_message = False
        self._is_over = False  # nothing that comes is read any more
        self._began = 0.0  # the message, or the wait for the first one
        self._raw_nbytes = 0  # of the message
        self._body_nbytes = 0
        self._ahead_nbytes = 0
        self._thrown_nbytes = 0
        self._alarm: asyncio.TimerHandle | None = None  # the client owes us the rest of a message, or its end

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # What answers requests sees of the transport. uvicorn would close it after the last answer, and unread bytes of
        # the request make the kernel take back what has not arrived.
        self._outlet = SimpleNamespace(write=transport.write, is_closing=transport.is_closing, close=self._part)
        if len(self.connections) > self._most:
            self._write(ApiError(503, f"{self._most} connections are open already"))
            # The request lies there unread, and an end at once would take the answer with it. But there is an end.
            if len(self.connections) <= self._most + MAX_LINGERING:
                self._end_slowly()
            else:
                self.transport.close()
            return
        self._begin()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unwatch()
        self._give_up()

    # ── what comes ──
    def data_received(self, data: bytes) -> None:
        if self._is_over:
            self._thrown_nbytes += len(data)
            if self._thrown_nbytes > MAX_THROWN_NBYTES:
                self.transport.close()
            return
        self._raw_nbytes += len(data)
        super().data_received(data)
        if self.transport.is_closing() or self._is_over:
            return
        self._ahead_nbytes = self._ahead_nbytes + len(data) if self.pipeline else 0
        if self.pipeline:  # uvicorn would read no more until an answer has ended, and not see its client go meanwhile
            self.flow.resume_reading()
        if len(self.pipeline) > MAX_AHEAD or self._ahead_nbytes > MAX_AHEAD_NBYTES:
            self.transport.abort()  # it would be told amid another answer
        elif not self._is_in_message:
            self._rest()
        elif self._raw_nbytes > MAX_BESIDES_NBYTES + (1 + FRAMING) * self._body_nbytes:
            self.refuse(ApiError(431, f"a request has at most {MAX_BESIDES_NBYTES} bytes besides its body"))
        elif self._alarm is None:
            self._watch()

    def on_message_begin(self) -> None:
        self._begin()
        self._is_in_message = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._is_over or len(self.pipeline) > MAX_AHEAD:  # then the connection ends when this piece has been read
            return
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts != 1 and self.parser.get_http_version() == "1.1":
            self.refuse(ApiError(400, f"expected one Host header in a request of HTTP/1.1, got {hosts}"))
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_nbytes += len(body)
        if not self._is_over:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_over:
            return
        self._is_in_message = False
        self._raw_nbytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self.refuse(ApiError(400, msg))

    def _unsupported_upgrade_warning(self) -> None:
        """Logs nothing: a request that offers an upgrade is answered without it."""

    # ── deadlines ──
    def _begin(self) -> None:
        self._began = self.loop.time()
        self._body_nbytes = 0

    def _rest(self) -> None:
        """All that has begun to come is there. Empty lines before the first request win no time."""
        if self._running is None:
            return
        self._unwatch()
        if self.cycle.response_complete and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    @property
    def _due(self) -> float:
        return self._began + self._patience + self._body_nbytes / SLOWEST

    def _watch(self) -> None:
        self._alarm = self.loop.call_at(self._due, self._look)

    def _unwatch(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _look(self) -> None:
        self._alarm = None
        if self.flow.read_paused or self._is_answering:  # reading is paused, or another request is before it
            self._began = self.loop.time()
        if self.loop.time() < self._due:
            self._watch()
        else:
            self.refuse(ApiError(408, f"a request came more slowly than within {self._patience:g} s"))

    # ── requests, one after the other ──
    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        cycle.transport = self._outlet  # type: ignore[assignment]
        self._ahead_nbytes = 0
        super()._start_asgi_task(cycle, app)

    @property
    def _is_answering(self) -> bool:
        """A request that has come as a whole."""
        running = self._running
        return running is not None and not running.response_complete and not running.more_body

    def on_response_complete(self) -> None:
        is_early = self.cycle.response_complete and self.cycle.more_body
        super().on_response_complete()
        if self._is_in_message or self._is_over:  # the next one has begun to come, and has our patience; or none will
            self._unset_keepalive_if_required()
        if is_early and not self.transport.is_closing() and not self._is_over:
            self._end_slowly()  # it has been refused before all of it was there: what is left of it is no request

    def refuse(self, error: ApiError) -> None:
        """Ends the connection; the client is told why where no answer is under way."""
        if self.transport.is_closing() or self._is_over:
            return
        running = self._running
        if running is not None and running.response_started and not running.response_complete:
            return self.transport.abort()
        self._write(error)
        self._give_up()
        self._end_slowly()

    def _write(self, error: ApiError) -> None:
        headers = {**(error.headers or {}), "content-type": "application/json", "connection": "close"}
        lines = [b"%b: %b\r\n" % (name.encode(), value.encode()) for name, value in headers.items()]
        length = b"content-length: %d\r\n\r\n" % len(error.body)
        self.transport.write(b"".join([STATUS_LINE[error.status], *lines, length, error.body]))

    def _give_up(self) -> None:
        """Marks all unanswered requests of this client as disconnected; uvicorn marks only the last one."""
        for cycle in (self._running, self.cycle, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()

    def _part(self) -> None:
        """The last answer has been given."""
        if self._is_in_message or self.pipeline:
            self._give_up()
            self._end_slowly()
        else:
            self.transport.close()

    def _end_slowly(self) -> None:
        self._is_over = True
        self._unwatch()
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        try:
            self.transport.write_eof()
        except OSError:  # the client has gone: what was just written has reset the connection
            return self.transport.abort()
        self._linger(self.loop.time() + self._patience)

    def _linger(self, until: float) -> None:
        when = min(self.loop.time() + LINGER, until)
        self._alarm = self.loop.call_at(when, self._end_unless_more, self._thrown_nbytes, until)

    def _end_unless_more(self, thrown_nbytes: int, until: float) -> None:
        if self._thrown_nbytes == thrown_nbytes or self.loop.time() >= until:
            self.transport.close()
        else:
            self._linger(until)
