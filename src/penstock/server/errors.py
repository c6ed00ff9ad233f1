"""Errors in the form of OpenAI's API: status, message, type, param, code.

The message comes from the code that found the error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from starlette.responses import Response

from penstock.engine.client.stream import EngineError

RETRIED = (429, 503)  # statuses after which a client may retry …
RETRY_AFTER = 1  # … in so many seconds
MAX_CHARACTERS = 2000  # of a message, which may quote a client at length
KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class Gone(Exception):
    """The client has disconnected, and gets no answer."""


class ApiError(Exception):
    """A refused request. `param` is the wrong field."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if len(message) > MAX_CHARACTERS:
            message = f"{message[: MAX_CHARACTERS // 2]} … {message[-MAX_CHARACTERS // 2 :]}"
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        if headers is None and status in RETRIED:
            headers = {"Retry-After": str(RETRY_AFTER)}
        self.headers = headers

    @classmethod
    def of(cls, error: EngineError, request_id: str = "") -> ApiError:
        """Converts an error of the engine. `request_id`: the id in the log, for an error that is not the client's."""
        is_ours = error.status >= 500 and request_id
        return cls(error.status, f"{error.reason} (request {request_id})" if is_ours else error.reason)

    @property
    def body(self) -> bytes:
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        detail = {"message": self.message, "type": kind, "param": self.param, "code": self.code or kind}
        return msgspec.json.encode({"error": detail})

    def response(self) -> Response:
        return Response(self.body, self.status, self.headers, "application/json")


_WHERE = re.compile(r"(?P<what>.*) - at (?:`key` in )?`\$\.?(?P<path>.*)`", re.DOTALL)


def body_error(error: Exception, how_counted: str = "") -> ApiError:
    """Returns the error for a body that does not decode, with the path to the field. `how_counted` explains a byte
    position in msgspec's text."""
    text = str(error)
    match = _WHERE.fullmatch(text)
    if match is None:
        if how_counted and "(byte" in text:
            text = f"{text}, {how_counted}"
        return ApiError(400, f"the body is invalid: {text}", code="invalid_body")
    problem = match["what"].replace("`", "")
    missing = re.search(r"missing required field (\w+)", problem)
    path = match["path"].replace("[...]", "")  # of a dict, which key is not said
    if missing:
        path = f"{path}.{missing[1]}".removeprefix(".")
    where = f"$.{path}" if path and not path.startswith("[") else f"${path}"
    return ApiError(400, f"{problem[:1].lower()}{problem[1:]} at {where}", param=path or None)


class Limit(NamedTuple):
    """The limit of a prompt's length."""

    tokens: int
    param: str  # the field of the prompt
    completion: int | None  # requested tokens besides; None: as many as fit


def context_length_exceeded(max_model_len: int, tokens: int, limit: Limit, *, at_least: bool = False) -> ApiError:
    """Returns the error with OpenAI's and vLLM's text, which clients look for to shorten a conversation and retry."""
    about = "at least " if at_least else ""
    if limit.completion is None:
        request, way_out = f"your {limit.param} resulted in {about}{tokens} tokens", limit.param
    else:
        request = (
            f"you requested {about}{tokens + limit.completion} tokens ({about}{tokens} in the {limit.param}, "
            f"{limit.completion} in the completion)"
        )
        way_out = f"{limit.param} or completion"
    message = (
        f"This model's maximum context length is {max_model_len} tokens. However, {request}. "
        f"Please reduce the length of the {way_out}."
    )
    return ApiError(400, message, param=limit.param, code="context_length_exceeded")
