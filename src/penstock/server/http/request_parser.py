"""Parses the requests of a client: httptools' parser, with a bound on all bytes besides bodies.

Leaves the handling of requests to `connection`.
"""

from __future__ import annotations

from typing import Protocol
from urllib.parse import unquote

import httptools
from starlette.types import Scope

from penstock.server.errors import ApiError

MAX_BESIDES_NBYTES = 64 << 10  # of a request: the head, and trailers
FRAMING = 8  # additional bytes for each byte of a body: a chunk may have one byte

Address = tuple[str, int] | None


class RequestSink(Protocol):
    """Gets the parts of requests in their order."""

    def begin_message(self) -> None: ...
    def begin_request(self, scope: Scope, keep_alive: bool, expects_continue: bool) -> None: ...
    def add_body(self, body: bytes) -> None: ...
    def end_request(self) -> None: ...


class RequestParser:
    """The methods `on_…` are called by httptools."""

    def __init__(self, sink: RequestSink, server: Address, client: Address, scheme: str = "http") -> None:
        self.is_in_message = False
        self.body_nbytes = 0  # of the message
        self._sink = sink
        self._server = server
        self._client = client
        self._scheme = scheme
        self._parser = httptools.HttpRequestParser(self)
        self._raw_nbytes = 0  # of the message
        self._fed_nbytes = 0  # at once
        self._refusal: ApiError | None = None
        self._is_in_head = False

    def feed(self, data: bytes | memoryview) -> None:
        """Raises ApiError for bytes that are no request; the parser is unusable then."""
        self._raw_nbytes += len(data)
        self._fed_nbytes = len(data)
        chunks: list[bytes | memoryview] = [data]
        while chunks:
            chunk = chunks.pop()
            try:
                self._parser.feed_data(chunk)
            except httptools.HttpParserUpgrade as offer:
                chunks += memoryview(chunk)[offer.args[0] :], self._head_without_offer()
            except httptools.HttpParserError as error:
                raise self._refusal or ApiError(400, f"expected a request of HTTP/1.1: {error}") from None
        if self.is_in_message and self._raw_nbytes > MAX_BESIDES_NBYTES + (1 + FRAMING) * self.body_nbytes:
            raise _too_much_besides()

    def close(self) -> None:
        """Breaks a cycle of references, to need no garbage collection."""
        del self._parser

    def _head_without_offer(self) -> bytes:
        """Returns the head of a request with the offer of an upgrade, for a new parser: the old parser took the head
        for the whole request.

        HTTP/2 clients offer an upgrade with the first request, also when the request has a body.
        """
        method, version = self._parser.get_method(), self._parser.get_http_version().encode("ascii")
        if method == b"CONNECT":
            raise ApiError(400, "CONNECT is for proxies, and this server is none")
        lines = [b"%b: %b\r\n" % header for header in self._headers if header[0] != b"upgrade"]
        self._parser = httptools.HttpRequestParser(self)
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._url, version, b"".join(lines))

    # ── httptools ──
    def on_message_begin(self) -> None:
        self.is_in_message = self._is_in_head = True
        self.body_nbytes = 0
        self._expects_continue = False
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._sink.begin_message()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            return  # a trailer
        name = name.lower()
        self._headers.append((name, value))
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if self._parser.should_upgrade():
            return
        try:
            self._require_short_head()
            version = self._parser.get_http_version()
            scope = self._scope(version)
        except ApiError as error:
            self._refusal = error
            raise
        keep_alive = version != "1.0" and self._parser.should_keep_alive()
        self._sink.begin_request(scope, keep_alive, self._expects_continue)

    def on_body(self, body: bytes) -> None:
        self.body_nbytes += len(body)
        self._sink.add_body(body)

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return
        self.is_in_message = False
        self._raw_nbytes = 0
        self._sink.end_request()

    # ── a head ──
    def _require_short_head(self) -> None:
        """Refuses a long head that passed the check in `feed`, because the end of a message came in the same bytes."""
        if max(self._raw_nbytes, self._fed_nbytes) <= MAX_BESIDES_NBYTES:
            return
        head_nbytes = len(self._url) + sum(len(name) + len(value) for name, value in self._headers)
        if head_nbytes > MAX_BESIDES_NBYTES:
            raise _too_much_besides()

    def _scope(self, version: str) -> Scope:
        hosts = sum(name == b"host" for name, _ in self._headers)
        if hosts != 1 and version == "1.1":
            raise ApiError(400, f"expected one Host header in a request of HTTP/1.1, got {hosts}")
        try:
            url = httptools.parse_url(self._url)
            raw_path = url.path or b"/"
            path = raw_path.decode("ascii")
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError) as error:
            raise ApiError(400, f"expected a URL in the request's first line: {error}") from None
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "method": self._parser.get_method().decode("ascii"),
            "scheme": self._scheme,
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": url.query or b"",
            "root_path": "",
            "headers": self._headers,
            "client": self._client,
            "server": self._server,
            "state": {},
        }


def _too_much_besides() -> ApiError:
    return ApiError(431, f"a request has at most {MAX_BESIDES_NBYTES} bytes besides its body")
