"""What a client gets from Serve's proxy when a replica has ended: an answer of another replica, or an error in JSON.

Set RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=penstock.integrations.ray_serve.proxy_errors:middlewares where Ray is
started. Without it the proxy answers with the plain text "Internal Server Error", or cuts a stream.
"""

from __future__ import annotations

import asyncio

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.integrations.ray_serve.event_stream import ENDED, EventStream
from penstock.server.errors import ApiError

RETRY_DELAYS = (0.1, 0.3, 0.6)  # seconds; a replica that ends is known to the proxy for a moment
REPLAY_NBYTES = 1 << 20  # of a body that is kept to be sent again; HAProxy keeps 16 KiB
PLAIN = b"text/plain"
LOST = "the replica of this request has ended without an answer: send the request again"


def middlewares() -> list[Middleware]:
    """Returns the middlewares of each proxy, for Ray Serve's callback."""
    return [Middleware(ProxyErrors)]


class ProxyErrors:
    """Sends a request again if its replica has ended before the first byte of the answer; then answers with 503.

    A stream that has begun ends with an error event.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        body = _KeptBody(receive)
        for delay in (*RETRY_DELAYS, None):
            answer = _ProxyAnswer(send)
            await self._app({**scope, "headers": list(scope["headers"])}, body.replay(), answer.receive)
            if body.has_left:
                return
            if delay is None or not (answer.is_lost and body.is_whole):
                return await answer.end(scope, receive)
            await asyncio.sleep(delay)


class _KeptBody:
    """The body of a request, which can be read more than once if it is short."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: list[Message] = []
        self._nbytes = 0
        self.is_whole = True  # all that was received is kept
        self.has_left = False

    def replay(self) -> Receive:
        messages = iter(tuple(self._messages))

        async def receive() -> Message:
            for message in messages:
                return message
            message = await self._receive()
            self._keep(message)
            return message

        return receive

    def _keep(self, message: Message) -> None:
        if message["type"] == "http.disconnect":
            self.has_left = True
            return
        self._nbytes += len(message.get("body", b""))
        if self._nbytes > REPLAY_NBYTES:
            self.is_whole = False
            self._messages.clear()
        if self.is_whole:
            self._messages.append(message)


class _ProxyAnswer:
    """The answer of one replica, and of the proxy when there is none."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None  # of an error that has not been sent yet
        self._text = b""
        self._stream: EventStream | None = None
        self._is_over = False

    @property
    def is_lost(self) -> bool:
        """Returns whether nothing was sent, as the replica has ended."""
        if self._stream is not None:
            return False
        return self._start is None or ENDED in self._start["headers"]

    async def receive(self, message: Message) -> None:
        """Passes a message on, unless it belongs to an error of the proxy, or of a replica that ends."""
        if message["type"] == "http.response.start":
            if message["status"] >= 400 and _is_held(message):
                self._start = message
                return
            self._stream = EventStream(message)
        elif self._stream is None:
            self._text += message.get("body", b"")
            return
        else:
            self._stream.add(message.get("body", b""))
            self._is_over = not message.get("more_body", False)
        await self._send(message)

    async def end(self, scope: Scope, receive: Receive) -> None:
        """Sends what is left of the answer: an error, or the last event of a stream that was cut."""
        if self._stream is not None:
            if not self._is_over and self._stream.can_end:
                await self._stream.fail(LOST, self._send)
            return
        if self._start is None:
            error = ApiError(503, LOST)
        elif ENDED in self._start["headers"]:
            await self._send(self._start)
            return await self._send({"type": "http.response.body", "body": self._text})
        else:
            error = ApiError(self._start["status"], self._text.decode(errors="replace"))
        await error.response()(scope, receive, self._send)


def _is_held(start: Message) -> bool:
    """Returns whether an error is of Serve, which writes plain text, or of a replica that ends."""
    headers = dict(start["headers"])
    is_of_serve = headers.get(b"content-type", b"").startswith(PLAIN) and start["status"] in (408, 429, 500, 503)
    return is_of_serve or headers.get(ENDED[0]) == ENDED[1]
