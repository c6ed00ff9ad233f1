"""The steps of a request before a route: id, API keys, the limit of open requests, the limits of the body.

`app` has the routes. Errors of the steps, and of routes, become answers in OpenAI's form here.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import re
import secrets
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeAlias, TypeVar

import msgspec
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.engine.client.stream import EngineError
from penstock.engine.cluster.logs import event
from penstock.engine.media.media_budget import BODY_COPIES, ByteLease, MediaBudget
from penstock.server.chat import request_schema
from penstock.server.chat.prompt_builder import PromptBuilder
from penstock.server.chat.request_fields import HEADER as IGNORED_FIELDS
from penstock.server.chat.request_fields import UnknownFields
from penstock.server.chat.request_schema import REQUEST_ID_PATTERN, decoded
from penstock.server.chat.streaming import SSEResponse, cancel_on_disconnect, engine_failed
from penstock.server.errors import ApiError, Gone
from penstock.server.heap import Heap
from penstock.server.options import ServerOptions
from penstock.server.status.counters import ROUTES, STATUSES, ProcessCounters

LONG = 64 << 10  # bytes of a body: most are decoded in a fraction of 1 ms; longer ones by a thread, as the loop goes on
BODIES_AT_ONCE = 8  # of the longest: the limit of a process for requests that have come in part
CLIENT_GONE = 499  # only counted: the client has gone, and gets no response
REQUEST_ID = "x-request-id"
GENERATED_NBYTES = 12  # of an id

_VALID = re.compile(REQUEST_ID_PATTERN[1:-1])

Answer: TypeAlias = Response | SSEResponse
T = TypeVar("T")
BodyT = TypeVar("BodyT", bound=msgspec.Struct)


# ── middleware: of all routes ────────────────────────────────────────────────────────────────────────────────────────
class RequestIds:
    """Middleware: gives each request an id, in a header of its answer, in the log, and in errors of the server.

    The client's own id is kept where it sends one, as proxies and clients do to find a request in several logs. Sets
    `request.state.request_id`, and `request.state.headers`, which are added to the answer's own.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = REQUEST_ID.encode()
        state = scope.setdefault("state", {})
        client_id = next((value for header, value in scope["headers"] if header == name), b"").decode("latin-1")
        state["is_named"] = is_valid(client_id)
        state["request_id"] = client_id if state["is_named"] else secrets.token_hex(GENERATED_NBYTES)
        state["headers"] = []

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = (name, state["request_id"].encode())
                message["headers"] = [*message["headers"], named, *state["headers"]]
            await send(message)

        await self._app(scope, receive, send_with_headers)


def is_valid(request_id: str) -> bool:
    return _VALID.fullmatch(request_id) is not None


def cors(options: ServerOptions) -> list[Middleware]:
    """Returns the middleware for CORS; without `allowed_origins` there is none, and browsers refuse other origins."""
    if not options.allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
            expose_headers=(REQUEST_ID, IGNORED_FIELDS, "retry-after"),
        )
    ]


# ── keys, open requests, errors ──────────────────────────────────────────────────────────────────────────────────────
class Admission:
    """The API keys and the limit of open requests, which the endpoints of a server share."""

    def __init__(self, options: ServerOptions, row: ProcessCounters) -> None:
        self._keys = [key.encode() for key in options.api_keys]
        self._max_open_requests = options.max_open_requests
        self._row = row

    def require_key(self, request: Request) -> None:
        """Raises ApiError if there are keys, and the request has none of them."""
        if not self._keys:
            return
        presented = key_of(request)
        is_ours = [hmac.compare_digest(presented, own) for own in self._keys]  # all, so that time tells nothing
        if not any(is_ours):
            message = "expected an API key: Authorization: Bearer KEY, or x-api-key: KEY"
            headers = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, message, headers=headers, code="invalid_api_key")

    def enter(self) -> None:
        """Counts a request as open until `leave`. Raises ApiError if too many are open."""
        if self._row[ProcessCounters.OPEN] >= self._max_open_requests:
            raise ApiError(429, f"{self._max_open_requests} requests are open, the maximum of this server")
        self._row[ProcessCounters.OPEN] += 1

    def leave(self) -> None:
        self._row[ProcessCounters.OPEN] -= 1

    def count(self, route: str, status: int) -> None:
        if route in ROUTES:
            known = status if status in STATUSES else 500 if status >= 500 else 400
            self._row[ProcessCounters.ANSWERED.at[route, str(known)]] += 1


class Endpoint:
    """A route. A request without a key, above a limit or invalid gets an error, in OpenAI's form by default."""

    def __init__(
        self,
        admission: Admission,
        route: str,
        answer: Callable[[Request], Awaitable[Answer]],
        refuse: Callable[[ApiError], Response] = ApiError.response,
    ) -> None:
        self._admission = admission
        self._route = route
        self._answer = answer
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        request.state.began = time.monotonic()
        status = 500
        try:
            status = await self._respond(request, scope, receive, send)
        finally:
            self._admission.count(self._route, status)

    async def _respond(self, request: Request, scope: Scope, receive: Receive, send: Send) -> int:
        is_admitted = False
        try:
            self._admission.require_key(request)
            if scope["method"] == "POST":
                self._admission.enter()
                is_admitted = True
            answer = await self._answer(request)
            await answer(scope, receive, send)
            return answer.status_code
        except ApiError as error:
            refused = error
        except EngineError as error:
            refused = engine_failed(error, request.state.request_id)
        except (Gone, ClientDisconnect):
            return CLIENT_GONE
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            request_id = request.state.request_id
            trace = traceback.format_exc()
            context = {"request_id": request_id, "route": self._route, "error": failure, "trace": trace}
            event("request failed", logging.ERROR, **context)
            refused = ApiError(500, f"the server has failed; its log has the cause, under request_id={request_id}")
        finally:
            if is_admitted:
                self._admission.leave()
        await self._refuse(refused)(scope, receive, send)
        return refused.status


class RootPath:
    """Middleware: takes the path of a proxy, under which this server is reached, off the paths of requests."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if f"{scope['path']}/".startswith(f"{self._root_path}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._root_path) or "/"}
        await self._app(scope, receive, send)


class DirectPosts:
    """Middleware: passes a POST to the endpoint of its path, and all else to Starlette."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"]) if scope.get("method") == "POST" else None
        await (endpoint or self._app)(scope, receive, send)


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class BodyReader:
    """Receives and decodes bodies, within the limits of each and of all that are being read."""

    def __init__(self, max_nbytes: int, prompt_builder: PromptBuilder, heap: Heap, budget: MediaBudget) -> None:
        self._max_nbytes = max_nbytes
        self._budget = budget
        self._prompt_builder = prompt_builder  # for its threads
        self._heap = heap
        self._unknown_fields = UnknownFields(name for names in request_schema.FIELDS.values() for name in names)
        self.reading_nbytes = 0  # received bytes of bodies that are being read

    @contextlib.asynccontextmanager
    async def receive(self, request: Request) -> AsyncIterator[bytearray]:
        """Receives a body, which counts as being read until its prompt is built. Raises ApiError if it is too long.

        A long body has its bytes of the budget before it is read: meanwhile the connection is not read. So bodies in
        the memory are whole ones, and none waits for the rest of another.
        """
        max_nbytes, body, received = self._max_nbytes, bytearray(), 0
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > max_nbytes:
            raise _too_long(max_nbytes)
        lease = await self._admit(request, int(length)) if int(length) > LONG else None
        try:
            async for part in request.stream():
                body += part
                received += len(part)
                self.reading_nbytes += len(part)
                if received > max_nbytes:
                    raise _too_long(max_nbytes)
                if self.reading_nbytes > BODIES_AT_ONCE * max_nbytes:
                    raise ApiError(503, "the bodies of other requests fill the memory: send the request again")
                if received > LONG and lease is None:  # its length is not known before its end
                    lease = await self._admit(request, min(max_nbytes, self._budget.bodies.nbytes // BODY_COPIES))
                if lease is not None and BODY_COPIES * received > lease.nbytes:
                    raise self._beyond_budget(received)
            if lease is not None:
                lease.shrink(BODY_COPIES * received)
            yield body
        finally:
            self.reading_nbytes -= received
            if lease is not None:
                lease.release()
            if received > LONG:
                self._heap.was_used()

    async def _admit(self, request: Request, nbytes: int) -> ByteLease:
        try:
            return await self._budget.bodies.acquire(client_of(request), BODY_COPIES * nbytes)
        except ValueError:
            raise self._beyond_budget(nbytes) from None

    def _beyond_budget(self, nbytes: int) -> ApiError:
        limit = self._budget.bodies.nbytes // BODY_COPIES
        return ApiError(413, f"a body has at most {limit} bytes here (--media-mb-in-flight), this one has {nbytes}")

    async def run(self, request: Request, body: bytearray, work: Callable[[], T]) -> T:
        """Runs `work` on a body: on a long one in a thread, until the client disconnects."""
        if len(body) <= LONG:
            return work()
        return await cancel_on_disconnect(request.scope, self._prompt_builder.in_a_thread(work))

    async def decode(self, request: Request, body: bytearray, kind: type[BodyT]) -> BodyT:
        """Decodes a body. Its unknown fields are named in a header of the answer. Raises ApiError."""
        unknown: list[str] = []
        value = await self.run(request, body, lambda: decoded(body, kind, unknown))
        if unknown:
            context = {"path": request.url.path, "request_id": request.state.request_id}
            described = self._unknown_fields.describe(unknown, **context)
            request.state.headers.append((IGNORED_FIELDS.encode(), described.encode()))
        return value


def account_of(request: Request, user: str | None, has_keys: bool) -> str:
    """Returns the account of a request, which has a budget of trials: an API key, else a user, else an address."""
    if has_keys:
        return "key " + hashlib.sha256(key_of(request)).hexdigest()
    return f"user {user}" if user else f"address {client_of(request)}"


def key_of(request: Request) -> bytes:
    """Returns the API key of a request, as OpenAI's clients send it or as Anthropic's do; empty: it has none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return (key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")).encode()


def client_of(request: Request) -> str:
    """Returns the address of the client, by which clients take turns in the use of memory."""
    return "" if request.client is None else request.client.host


def _too_long(max_nbytes: int) -> ApiError:
    return ApiError(413, f"the body is longer than {max_nbytes} bytes")
