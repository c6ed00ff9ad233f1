"""One request and its response, as ASGI has them: the application receives and sends through an `HttpExchange`.

`connection` parses requests and puts the responses to one client in order.
"""

from __future__ import annotations

import asyncio
import logging
import re
import traceback
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Protocol

from starlette.types import ASGIApp, Message, Scope

from penstock.engine.cluster.logs import event
from penstock.server.chat.streaming import CLIENT_CONNECTION
from penstock.server.errors import ApiError

STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode("ascii")) for status in HTTPStatus
}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
BODILESS = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)

_CONTROL_CHARACTER = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")  # in a header it would begin another one


class Carrier(Protocol):
    """What an exchange needs of its connection."""

    @property
    def is_write_paused(self) -> bool: ...
    @property
    def date_line(self) -> bytes: ...
    @property
    def write(self) -> Callable[[bytes], None]: ...
    @property
    def idle_descriptor(self) -> int | None: ...
    async def drain(self) -> None: ...
    def resume_reading(self) -> None: ...
    def complete(self, exchange: HttpExchange) -> None: ...
    def fail(self, exchange: HttpExchange, error: ApiError) -> None: ...


class HttpExchange:
    """A response is written from its first body message on, as ASGI asks: an error before it still has its status.

    Its last bytes are written when the application has returned: when a client has a response, its request is counted.
    """

    __slots__ = (
        "_body",
        "_carrier",
        "_expects_continue",
        "_head",
        "_is_chunked",
        "_is_http_1_0",
        "_last",
        "_leave_socket",
        "_news",
        "_on_disconnect",
        "_unsent_nbytes",
        "has_begun",
        "is_complete",
        "is_disconnected",
        "is_received",
        "keep_alive",
        "scope",
    )

    def __init__(self, carrier: Carrier, scope: Scope, keep_alive: bool, expects_continue: bool) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        self.is_received = False  # the whole request
        self.has_begun = False  # bytes of the response have been written
        self.is_complete = False  # the application has sent the whole response
        self.is_disconnected = False
        self._carrier = carrier
        self._is_http_1_0 = scope["http_version"] == "1.0"
        self._expects_continue = expects_continue and not self._is_http_1_0
        self._body = bytearray()  # received, and not taken by the application
        self._news = asyncio.Event()  # more of the body, its end, or a disconnect
        self._head: bytes | None = None
        self._last = b""
        self._is_chunked = False
        self._unsent_nbytes: int | None = None  # of a body with a length
        self._leave_socket: Callable[[], None] | None = None
        self._on_disconnect: Callable[[], None] | None = None

    # ── from the connection ──
    def add_body(self, body: bytes) -> int:
        """Returns how many bytes the application has not taken."""
        self._body += body
        self._news.set()
        return len(self._body)

    def end_body(self) -> None:
        self.is_received = True
        self._news.set()

    def disconnect(self) -> None:
        """What the application still sends is dropped."""
        self.is_disconnected = True
        self._news.set()
        if self._leave_socket is not None:
            self._leave_socket()
        if self._on_disconnect is not None:
            asyncio.get_running_loop().call_soon(self._on_disconnect)

    # ── the application ──
    async def run(self, app: ASGIApp) -> None:
        """An exception of the application ends the connection; the client gets a 500 where no response has begun."""
        extensions = self.scope.setdefault("extensions", {})
        extensions[CLIENT_CONNECTION] = self
        try:
            await app(self.scope, self.receive, self.send)
            if not self.is_complete and not self.is_disconnected:
                raise RuntimeError("the application returned without a complete response")
        except asyncio.CancelledError:
            self._carrier.fail(self, ApiError(503, "the server ends"))
        except Exception as error:
            request_id = self.scope["state"].get("request_id", "")
            what, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
            event("request failed", logging.ERROR, request_id=request_id, error=what, trace=trace)
            self._carrier.fail(self, ApiError(500, f"the server has failed; its log says how, of request {request_id}"))
        finally:
            del extensions[CLIENT_CONNECTION]  # or scope and exchange would wait for the garbage collector
            self._leave_socket = None
        if self.is_complete and not self.is_disconnected:
            if self._last:
                self._carrier.write(self._last)
            self._carrier.complete(self)

    async def receive(self) -> Message:
        if not self.is_disconnected and not self.is_complete:
            if self._expects_continue and not self.is_received:
                self._carrier.write(CONTINUE)
            self._expects_continue = False
            self._carrier.resume_reading()
            await self._news.wait()
            self._news.clear()
        if self.is_disconnected or self.is_complete:
            return {"type": "http.disconnect"}
        body = bytes(self._body)
        self._body.clear()
        return {"type": "http.request", "body": body, "more_body": not self.is_received}

    async def send(self, message: Message) -> None:
        if self._carrier.is_write_paused and not self.is_disconnected:
            await self._carrier.drain()
        if self.is_disconnected:
            return
        kind = message["type"]
        if self._head is None and kind == "http.response.start":
            self._head = self._frame(message["status"], message.get("headers", ()))
        elif self._head is not None and kind == "http.response.body" and not self.is_complete:
            self._send_body(message.get("body", b""), message.get("more_body", False))
        else:
            raise RuntimeError(f"{kind} is out of order")

    def on_disconnect(self, call: Callable[[], None] | None) -> Callable[[], None] | None:
        """Has `call` called, by the event loop, when the client disconnects, or if it has. Returns the one before."""
        before, self._on_disconnect = self._on_disconnect, call
        self._carrier.resume_reading()  # else the connection would not see its client go
        if self.is_disconnected and call is not None:
            asyncio.get_running_loop().call_soon(call)
        return before

    def write_chunk(self, body: bytes) -> bool:
        """Writes a part of a body that has begun, past all middleware and without a task. Returns False if `send` must
        do it: the body has not begun, the connection takes no more now, or the client has gone."""
        if not self.has_begun or self.is_complete or self.is_disconnected or self._carrier.is_write_paused:
            return False
        self._send_body(body, True)
        return True

    def idle_socket(self, leave: Callable[[], None]) -> tuple[int, bool] | None:
        """Returns the descriptor of a connection without unsent bytes, and whether a chunk is framed; `leave` is called
        when the client disconnects, before the descriptor is closed. None: `write_chunk` must do it."""
        if not self.has_begun or self.is_complete or self.is_disconnected or self._unsent_nbytes is not None:
            return None
        descriptor = self._carrier.idle_descriptor
        if descriptor is None:
            return None
        self._leave_socket = leave
        return descriptor, self._is_chunked

    def write_rest(self, body: bytes, sent: int) -> None:
        """Writes a chunk of which the socket has taken `sent` bytes, framing included."""
        if not self.is_complete and not self.is_disconnected:
            self._carrier.write((_chunk(body) if self._is_chunked else body)[sent:])

    def _frame(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """Returns the head of the response. Its body is framed by a length, by chunks, or by the connection's end."""
        lines = [STATUS_LINES[status], self._carrier.date_line]
        if not self.is_received:
            self.keep_alive = False  # the rest of the body is not read as a request
        for name, value in headers:
            line = b"%b: %b" % (name, value)
            if _CONTROL_CHARACTER.search(line):
                raise RuntimeError(f"a control character in the header {line!r}")
            name = name.lower()
            if name == b"content-length":
                self._unsent_nbytes = int(value)
            elif name == b"connection" or name == b"transfer-encoding":  # both are the server's to say
                if b"close" in value.lower():
                    self.keep_alive = False
                continue
            lines += line, b"\r\n"
        if self.scope["method"] == "HEAD" or status in BODILESS:
            self._unsent_nbytes = 0
        elif self._unsent_nbytes is None and self._is_http_1_0:
            self.keep_alive = False
        elif self._unsent_nbytes is None:
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    def _send_body(self, body: bytes, has_more: bool) -> None:
        if self._is_chunked:
            data = _chunk(body) if body else b""
            if not has_more:
                data += b"0\r\n\r\n"
        elif self.scope["method"] == "HEAD":
            data = b""
        else:
            data = body
            if self._unsent_nbytes is not None:
                self._unsent_nbytes -= len(body)
                if self._unsent_nbytes < 0 or (self._unsent_nbytes and not has_more):
                    raise RuntimeError("the body of a response is not as long as its content-length says")
        if not self.has_begun:
            data = b"".join((self._head or b"", data))
        if not has_more:
            self._last = data
            self.is_complete = True
            self._news.set()
        elif data:
            self.has_begun = True
            self._carrier.write(data)


def _chunk(body: bytes) -> bytes:
    """Returns a chunk of HTTP/1.1, as `ChunkSender` writes it, too."""
    return b"%x\r\n%b\r\n" % (len(body), body)
