"""Gives each request an id: in a header of its answer, in the log, and in errors that are the server's doing.

The client's own id is kept where it sends one, as proxies and clients do to find a request in several logs.
"""

from __future__ import annotations

import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
MAX_CHARACTERS = 128
PATTERN = f"^[!-~]{{1,{MAX_CHARACTERS}}}$"  # what a header, a line of a log and JSON hold as it is
GENERATED_NBYTES = 12

_VALID = re.compile(PATTERN[1:-1])


def is_valid(request_id: str) -> bool:
    return _VALID.fullmatch(request_id) is not None


class RequestIds:
    """Middleware: `request.state.request_id`, and `request.state.headers`, which are added to the answer's own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        client_id = next((value for name, value in scope["headers"] if name == HEADER.encode()), b"").decode("latin-1")
        state["is_named"] = is_valid(client_id)
        state["request_id"] = client_id if state["is_named"] else secrets.token_hex(GENERATED_NBYTES)
        state["headers"] = []

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = (HEADER.encode(), state["request_id"].encode())
                message["headers"] = [*message["headers"], named, *state["headers"]]
            await send(message)

        await self._app(scope, receive, send_with_headers)
