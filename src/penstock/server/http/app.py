"""The routes of a server process, their API keys and limits: each route is a method.

`request_schema` checks bodies, the engine's client gets the answers, and `streaming` writes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import functools
import hmac
import logging
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.engine.client.client import Client
from penstock.engine.client.stream import EngineError, OutputStream
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import ChunkFormat, SamplingParams, Style
from penstock.server.chat import request_schema
from penstock.server.chat.prompt_builder import PromptBuilder
from penstock.server.chat.request_fields import HEADER as IGNORED_FIELDS
from penstock.server.chat.request_fields import UnknownFields
from penstock.server.chat.request_schema import (
    ChatRequest,
    CompletionRequest,
    Conversation,
    Sampling,
    TokenizeRequest,
    decoded,
)
from penstock.server.chat.streaming import (
    LatencyRecorder,
    RequestStreams,
    SSEResponse,
    StreamedChoice,
    cancel_on_disconnect,
    collect,
    engine_failed,
    usage_of,
)
from penstock.server.errors import ApiError, Gone, Limit, context_length_exceeded
from penstock.server.heap import Heap
from penstock.server.http import openapi
from penstock.server.http.dashboard import Dashboard
from penstock.server.http.health import HealthReport
from penstock.server.http.metrics import Metrics
from penstock.server.images.image_prompts import Prompt
from penstock.server.options import ServerOptions
from penstock.server.request_ids import HEADER as REQUEST_ID
from penstock.server.request_ids import RequestIds, is_valid
from penstock.server.status.counters import ROUTES, ProcessCounters, ServerCounters
from penstock.server.status.server_info import served_name

LONG = 64 << 10  # bytes of a body: most are decoded in a fraction of 1 ms; longer ones by a thread, as the loop goes on
BODIES_AT_ONCE = 8  # of the longest: what a process keeps of requests that have not come as a whole
MAX_PATH = 256  # characters of an unknown path that are compared with the routes
MAX_SHARE = 2  # the prompts of one request take at most 1/MAX_SHARE of all slots at a time
LIKE = 0.75  # minimum similarity of the nearest route; other routes of OpenAI's API are less similar
CLIENT_GONE = 499  # only counted: the client has gone, and gets no response
NAMES = {Style.CHAT: ("chatcmpl", "chat.completion"), Style.COMPLETION: ("cmpl", "text_completion")}

Answer: TypeAlias = Response | SSEResponse
T = TypeVar("T")
BodyT = TypeVar("BodyT", bound=msgspec.Struct)


class ApiServer:
    """The routes of one server process, and what they share."""

    def __init__(
        self,
        config: EngineConfig,
        options: ServerOptions,
        client: Client,
        reader: PromptBuilder,
        tally: ServerCounters,
        board: StatusBoard,
        me: int,
    ) -> None:
        self._config = config
        self._options = options
        self._client = client
        self._reader = reader
        self._row = tally.rows[me]
        self._keys = [key.encode() for key in options.api_keys]
        self._metrics = Metrics(tally, board, served_name(config, options))
        self._health = HealthReport(tally, board, me)
        self._dashboard = Dashboard()
        self._unknown_fields = UnknownFields(name for names in request_schema.FIELDS.values() for name in names)
        self._name = served_name(config, options)
        self._names = options.served_model_name or (self._name,)
        self._paths: list[str] = []  # of the routes
        self._started = int(time.time())
        self._reading_nbytes = 0  # received bytes of bodies that are being read
        self._heap = Heap()

    def app(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", Endpoint(self, "chat", self._chat), methods=["POST"]),
            Route("/v1/completions", Endpoint(self, "completions", self._completions), methods=["POST"]),
            Route("/tokenize", Endpoint(self, "tokenize", self._tokenize), methods=["POST"]),
            Route("/v1/models", Endpoint(self, "models", self._list_models), methods=["GET"]),
            Route("/v1/models/{name:path}", Endpoint(self, "models", self._show_model), methods=["GET"]),
            Route("/metrics", Endpoint(self, "metrics", self._show_metrics), methods=["GET"]),
            Route("/dashboard", self._dashboard.page),
            Route("/dashboard/data", Endpoint(self, "dashboard", self._dashboard.data), methods=["GET"]),
            openapi.route(bool(self._keys)),
            Route("/health", self._health.whole),
            Route("/health/live", self._health.live),
            Route("/health/ready", self._health.ready),
        ]
        self._paths = [route.path.replace(":path", "") for route in routes]
        middleware = [Middleware(RequestIds), *cors(self._options)]
        return Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: self._no_route})

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for no other"
        path, headers = request.url.path, error.headers
        if error.status_code == 405 and headers is not None:
            message = f"{request.method} {path} is not allowed: expected {headers['Allow']}"
        else:
            nearest = difflib.get_close_matches(path[:MAX_PATH], self._paths, 1, LIKE)
            way_out = f"the nearest is {nearest[0]}" if nearest else f"{openapi.PATH} lists all"
            message = f"there is no route {path}: {way_out}"
        return ApiError(error.status_code, message, headers=headers).response()

    # ── API keys and limits ──
    def require_key(self, request: Request) -> None:
        if not self._keys:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        presented = key.strip().encode()
        is_ours = [hmac.compare_digest(presented, own) for own in self._keys]  # all, so that time tells nothing
        if scheme.lower() != "bearer" or not any(is_ours):
            message, headers = "expected an API key: Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, message, headers=headers, code="invalid_api_key")

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Counts a request as open while it is answered. Raises ApiError if too many are open."""
        if self._row[ProcessCounters.OPEN] >= self._options.max_open_requests:
            raise ApiError(429, f"{self._options.max_open_requests} requests are open, the maximum of this server")
        self._row[ProcessCounters.OPEN] += 1
        try:
            yield
        finally:
            self._row[ProcessCounters.OPEN] -= 1

    @contextlib.asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytearray]:
        """Reads a body, which counts as being read until its prompt is built. Raises ApiError if it is too long."""
        max_nbytes, body = self._options.max_body_nbytes, bytearray()
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > max_nbytes:
            raise _too_long(max_nbytes)
        try:
            async for part in request.stream():
                body += part
                self._reading_nbytes += len(part)
                if len(body) > max_nbytes:
                    raise _too_long(max_nbytes)
                if self._reading_nbytes > BODIES_AT_ONCE * max_nbytes:
                    raise ApiError(503, "the bodies of other requests fill the memory: send the request again")
            yield body
        finally:
            self._reading_nbytes -= len(body)
            if len(body) > LONG:
                self._heap.was_used()

    async def _aside(self, request: Request, body: bytearray, work: Callable[[], T]) -> T:
        """Runs `work` on a body: on a long one in a thread, until the client disconnects."""
        if len(body) <= LONG:
            return work()
        return await cancel_on_disconnect(request.receive, self._reader.in_a_thread(work))

    async def _decoded(self, request: Request, body: bytearray, kind: type[BodyT]) -> BodyT:
        unknown: list[str] = []
        value = await self._aside(request, body, lambda: decoded(body, kind, unknown))
        if unknown:
            context = {"path": request.url.path, "request_id": request.state.request_id}
            described = self._unknown_fields.describe(unknown, **context)
            request.state.headers.append((IGNORED_FIELDS.encode(), described.encode()))
        return value

    def _require_model(self, name: str | None) -> None:
        if name is not None and name not in (*self._names, self._config.model):
            message = f"there is no model {name!r} here, but {' and '.join(map(repr, self._names))}"
            raise ApiError(404, message, param="model", code="model_not_found")

    # ── what is generated ──
    async def _chat(self, request: Request) -> Answer:
        async with self._body(request) as body:
            chat = await self._decoded(request, body, ChatRequest)
            self._require_model(chat.model)
            params = chat.sampling(self._config.sampling_defaults)
            conversation = await self._aside(request, body, lambda: Conversation.of(chat.messages))
            limit = self._limit(chat, params, "messages")
            prompt = await self._prompt(request, conversation, chat.template_options, chat, limit)
            chat.messages = []  # images are long, and it may take long to answer
        try:
            return await self._generate(request, Style.CHAT, chat, params, [prompt], "messages")
        except BaseException:
            prompt.release()
            raise

    async def _prompt(
        self,
        request: Request,
        conversation: Conversation,
        options: dict[str, Any],
        body: ChatRequest | TokenizeRequest,
        limit: Limit | None = None,
    ) -> Prompt:
        """Returns the prompt of a conversation, which the caller releases unless it submits it."""
        is_answered, add_special = body.add_generation_prompt is not False, body.add_special_tokens is True
        reading = self._reader.conversation(conversation, is_answered, options, add_special, limit)
        if not conversation.images:
            return await reading
        try:
            return await cancel_on_disconnect(request.receive, reading)
        finally:
            self._heap.was_used()

    async def _completions(self, request: Request) -> Answer:
        async with self._body(request) as body:
            completion = await self._decoded(request, body, CompletionRequest)
            self._require_model(completion.model)
            params = completion.sampling(self._config.sampling_defaults)
            texts = await self._aside(request, body, completion.prompts)
            prompts, limit = [], self._limit(completion, params, "prompt")
            for prompt in texts:
                ids = await self._reader.ids(prompt, completion.add_special_tokens is not False, limit)
                prompts.append(Prompt(ids))
                await asyncio.sleep(0)  # each takes up to 1 ms, and others go on in between
        return await self._generate(request, Style.COMPLETION, completion, params, prompts, "prompt")

    async def _generate(
        self,
        request: Request,
        style: Style,
        sampling: Sampling,
        params: SamplingParams,
        prompts: Sequence[Prompt],
        param: str,
    ) -> Answer:
        prompts = [self._truncated(prompt, sampling, params) for prompt in prompts]
        for prompt in prompts:
            self._require_room(prompt.ids, params, param)
        try:
            params.require_choice(self._config.end_ids, self._reader.words.vocab_size)
        except ValueError as error:
            raise ApiError(400, str(error), param="allowed_token_ids") from None
        pace = LatencyRecorder(self._row, request.state.began)
        short, name = NAMES[style]
        if sampling.request_id is not None and not request.state.is_named:
            if not is_valid(sampling.request_id):  # a line's end after it, which its pattern lets pass
                raise ApiError(400, "expected printable characters at $.request_id", param="request_id")
            request.state.request_id = sampling.request_id
        request_id: str = request.state.request_id
        answer: dict[str, Any] = {"id": f"{short}-{request_id}", "object": name, "created": int(time.time())}
        answer["model"] = sampling.model or self._name
        if not sampling.stream:
            batch = self._batch(sampling, params, prompts)
            return await cancel_on_disconnect(
                request.receive, self._whole(style, batch, params, len(prompts), answer, pace)
            )
        if style == Style.CHAT:
            answer["object"] += ".chunk"
        head = msgspec.json.encode(answer)[:-1]
        nothing_yet = b',"usage":null' if sampling.includes_usage else b""
        batch = self._batch(sampling, params, prompts, ChunkFormat(style, head + nothing_yet))
        return SSEResponse(batch, head, sampling.includes_usage, pace, request_id)

    def _batch(
        self,
        sampling: Sampling,
        params: SamplingParams,
        prompts: Sequence[Prompt],
        chunk_format: ChunkFormat | None = None,
    ) -> RequestStreams:
        slots = self._config.max_num_seqs * self._config.data_parallel_size
        formats = [chunk_format and replace(chunk_format, first_index=n * params.n) for n in range(len(prompts))]
        submits = [
            functools.partial(self._submit, sampling, params, *one) for one in zip(prompts, formats, strict=True)
        ]

        def release() -> None:
            for prompt in prompts:
                prompt.release()

        return RequestStreams(submits, max(1, slots // MAX_SHARE // params.n), release)

    def _truncated(self, prompt: Prompt, sampling: Sampling, params: SamplingParams) -> Prompt:
        """Keeps `truncate_prompt_tokens` ids of a prompt: the last ones, unless `truncation_side` is right.

        -1 leaves as many as the model and `max_tokens` have room for. Raises ApiError.
        """
        tokens = sampling.truncate_prompt_tokens
        if tokens is None:
            return prompt
        name, room = "truncate_prompt_tokens", self._config.max_model_len - (params.max_tokens or 1)
        if tokens > room or room < 1:
            message = (
                f"expected at most {max(0, room)} tokens, as the model has {self._config.max_model_len} and the answer "
                f"may take {params.max_tokens or 1}, got {tokens} at $.{name}"
            )
            raise ApiError(400, message, param=name)
        kept = room if tokens == -1 else tokens
        if kept >= len(prompt.ids):
            return prompt
        if prompt.items:
            message = f"expected a prompt without images, got one of {len(prompt.ids)} tokens with images, at $.{name}"
            raise ApiError(400, message, param=name)
        is_from_left = sampling.truncation_side != "right"
        return prompt._replace(ids=prompt.ids[len(prompt.ids) - kept :] if is_from_left else prompt.ids[:kept])

    def _require_room(self, ids: list[int], params: SamplingParams, param: str) -> None:
        """Raises ApiError for an empty prompt, and for one that leaves no room for a token of its answer."""
        max_model_len = self._config.max_model_len
        if not ids:
            raise ApiError(400, f"expected a prompt of 1 to {max_model_len - 1} tokens, got none", param=param)
        if len(ids) >= max_model_len:
            raise context_length_exceeded(max_model_len, len(ids), Limit(max_model_len - 1, param, params.max_tokens))

    def _limit(self, sampling: Sampling, params: SamplingParams, param: str) -> Limit | None:
        """Returns the limit of the prompt's length; None: a longer prompt is truncated."""
        if sampling.truncate_prompt_tokens is not None:
            return None
        return Limit(self._config.max_model_len - 1, param, params.max_tokens)

    async def _submit(
        self, sampling: Sampling, params: SamplingParams, prompt: Prompt, chunk_format: ChunkFormat | None
    ) -> OutputStream:
        return await self._client.submit(
            prompt.ids,
            params,
            items=prompt.items,
            scope=prompt.scope,
            priority=sampling.priority or 0,
            client=sampling.user or "",
            salt=(sampling.cache_salt or "").encode(),
            chunk_format=chunk_format,
        )

    async def _whole(
        self,
        style: Style,
        batch: RequestStreams,
        params: SamplingParams,
        prompts: int,
        answer: dict[str, Any],
        pace: LatencyRecorder,
    ) -> Response:
        choices = await collect(batch, prompts, params.n, pace)
        vocabulary = None if params.logprobs is None else await self._reader.vocabulary()
        build_choice = StreamedChoice.of_chat if style == Style.CHAT else StreamedChoice.of_completion
        answer["choices"] = []
        for index, choice in enumerate(choices):
            if index:
                await asyncio.sleep(0)  # with log-probabilities each takes milliseconds, and others go on in between
            answer["choices"].append(build_choice(choice, index, vocabulary))
        answer["usage"] = usage_of(*batch.streams.values())
        return _json(answer)

    # ── what is known ──
    async def _tokenize(self, request: Request) -> Answer:
        async with self._body(request) as body:
            tokenize = await self._decoded(request, body, TokenizeRequest)
            self._require_model(tokenize.model)
            content = await self._aside(request, body, tokenize.content)
            if isinstance(content, str):
                ids = await self._reader.ids(content, tokenize.add_special_tokens is not False)
            else:
                prompt = await self._prompt(request, content, tokenize.chat_template_kwargs or {}, tokenize)
                prompt.release()
                ids = prompt.ids
        return _json({"count": len(ids), "max_model_len": self._config.max_model_len, "tokens": ids})

    async def _list_models(self, request: Request) -> Answer:
        return _json({"object": "list", "data": [self._described(name) for name in self._names]})

    async def _show_model(self, request: Request) -> Answer:
        name = request.path_params["name"]
        self._require_model(name)
        return _json(self._described(name if name in self._names else self._name))

    def _described(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "penstock",
            "max_model_len": self._config.max_model_len,
        }

    async def _show_metrics(self, request: Request) -> Answer:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def count(self, route: str, status: int) -> None:
        if route in ROUTES:
            self._row[self._row.answered(route, status)] += 1


class Endpoint:
    """A route. A request without a key, above a limit or invalid gets an error in OpenAI's form."""

    def __init__(self, api: ApiServer, route: str, answer: Callable[[Request], Awaitable[Answer]]) -> None:
        self._api = api
        self._route = route
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        request.state.began = time.monotonic()
        status = 500
        try:
            status = await self._respond(request, scope, receive, send)
        finally:
            self._api.count(self._route, status)

    async def _respond(self, request: Request, scope: Scope, receive: Receive, send: Send) -> int:
        with contextlib.ExitStack() as admission:
            try:
                self._api.require_key(request)
                if scope["method"] == "POST":
                    admission.enter_context(self._api.admitted())
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
        await refused.response()(scope, receive, send)
        return refused.status


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


def _too_long(max_nbytes: int) -> ApiError:
    return ApiError(413, f"the body is longer than {max_nbytes} bytes")


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
