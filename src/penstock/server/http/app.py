"""The routes of a server process: each route is a method.

`endpoint` admits requests and reads bodies, `request_schema` checks bodies, the engine's client gets the answers, and
`streaming` writes the answers.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

import penstock
from penstock import Store
from penstock.engine.client.client import Client
from penstock.engine.client.stream import EngineError, OutputStream
from penstock.engine.cluster.adapter_registry import AdapterRegistry
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.media.media_budget import MediaBudget
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.lora import Adapter
from penstock.engine.protocol.messages import AnswerFormat, ChunkFormat, SamplingParams, Style
from penstock.engine.text.detokenizer import Vocabulary
from penstock.engine.text.grammar_fields import Grammar
from penstock.server.chat.answer_formats import AnswerFormats
from penstock.server.chat.grammars import GrammarChecker
from penstock.server.chat.latency_recorder import LatencyRecorder
from penstock.server.chat.media_prompts import Prompt
from penstock.server.chat.piece_events import BuildEvents, PieceResponse, PreparedChat
from penstock.server.chat.prompt_builder import PromptBuilder
from penstock.server.chat.prompt_fields import PromptFields
from penstock.server.chat.request_reporter import RequestReporter
from penstock.server.chat.request_schema import (
    ChatRequest,
    CompletionRequest,
    Conversation,
    DetokenizeRequest,
    Sampling,
    TokenizeRequest,
)
from penstock.server.chat.streaming import (
    RequestStreams,
    SSEResponse,
    StreamedChoice,
    cancel_on_disconnect,
    collect,
    json_response,
    usage_of,
)
from penstock.server.chat.tool_fields import tool_use
from penstock.server.errors import ApiError, Limit, context_length_exceeded
from penstock.server.heap import Heap
from penstock.server.http import openapi
from penstock.server.http.adapter_routes import AdapterRoutes
from penstock.server.http.dashboard import Dashboard
from penstock.server.http.endpoint import (
    Admission,
    Answer,
    BodyReader,
    DirectPosts,
    Endpoint,
    RequestIds,
    RootPath,
    account_of,
    client_of,
    cors,
    is_valid,
)
from penstock.server.http.health import HealthReport
from penstock.server.http.metrics import Metrics
from penstock.server.http.pooling_routes import PoolingRoutes
from penstock.server.http.segment_metrics import SegmentMetrics
from penstock.server.messages.messages_routes import MessagesRoutes, refuse
from penstock.server.options import ServerOptions
from penstock.server.responses.responses_routes import ResponsesRoutes
from penstock.server.status.counters import ProcessCounters, ServerCounters
from penstock.server.status.server_info import served_name

MAX_PATH = 256  # compared characters of an unknown path
MAX_SHARE = 2  # the prompts of one request take at most 1/MAX_SHARE of all slots at a time
LIKE = 0.75  # minimum similarity of the nearest route; missing routes of OpenAI's API are less similar
NAMES = {Style.CHAT: ("chatcmpl", "chat.completion"), Style.COMPLETION: ("cmpl", "text_completion")}


class ApiServer:
    """The routes of a server process, and the state of all routes."""

    def __init__(
        self,
        config: EngineConfig,
        options: ServerOptions,
        client: Client,
        reader: PromptBuilder,
        tally: ServerCounters,
        board: StatusBoard,
        me: int,
        segments: SegmentMetrics | None = None,
        budget: MediaBudget | None = None,
        response_store: Store | None = None,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        """`budget`: of the media of `reader`; None: a new budget for bodies. `response_store`, `adapters`: of all
        servers."""
        self._config = config
        self._options = options
        self._client = client
        self._reader = reader
        self._row = tally.rows[me]
        self._tally = tally
        self._defaults = config.sampling_defaults.explicit
        self._slots = config.max_num_seqs * config.all_groups
        self._metrics = Metrics(tally, board, served_name(config, options), segments)
        self._health = HealthReport(tally, board, me, config.node_of)
        self._dashboard = Dashboard()
        self._name = served_name(config, options)
        self._names = options.served_model_name or (self._name,)
        self._paths: list[str] = []  # of the routes
        self._started = int(time.time())
        self._heap = Heap()
        self._admission = Admission(options, self._row)
        budget = MediaBudget(options.media_nbytes_in_flight) if budget is None else budget
        self._bodies = BodyReader(options.max_body_nbytes, reader, self._heap, budget)
        self._grammars = GrammarChecker(reader, bool(config.end_ids))
        self.lora = None if adapters is None else AdapterRoutes(config, client, self._bodies, self._names, adapters)
        self._reporter = RequestReporter.create(options, self._name)
        self._pooling = PoolingRoutes(
            config, options, client, reader, self._bodies, self._row, self._find_model, self._reporter
        )
        self._formats = AnswerFormats(options, reader.tokenizer.tool_template, reader.tokenizer.tokenizer)
        self._responses = ResponsesRoutes(self, self._bodies, reader, options, self._name, response_store)
        self._messages = MessagesRoutes(self, self._bodies, self._name)

    def close(self) -> None:
        if self._reporter is not None:
            self._reporter.close()

    def app(self) -> ASGIApp:
        """Returns the application. POSTs go past the layers of Starlette, a tenth of the time of a short request."""
        app: ASGIApp = DirectPosts(self.routes(), self._posts)
        for middleware, args, kwargs in cors(self._options):
            app = middleware(app, *args, **kwargs)
        app = RequestIds(app)
        return RootPath(app, self._options.root_path) if self._options.root_path else app

    @functools.cached_property
    def _posts(self) -> dict[str, Endpoint]:
        def generated(answer: Callable[[Request], Awaitable[Answer]]) -> Callable[[Request], Awaitable[Answer]]:
            return self._no_answers if self._config.pooling else answer

        return {
            "/v1/chat/completions": Endpoint(self._admission, "chat", generated(self._chat)),
            "/v1/completions": Endpoint(self._admission, "completions", generated(self._completions)),
            **self._pooling.posts(self._admission),
            **({} if self.lora is None else self.lora.posts(self._admission)),
            "/tokenize": Endpoint(self._admission, "tokenize", self._tokenize),
            "/detokenize": Endpoint(self._admission, "tokenize", self._detokenize),
            "/v1/responses": Endpoint(self._admission, "responses", generated(self._responses.create)),
            "/v1/responses/input_tokens": Endpoint(self._admission, "responses", self._responses.count_tokens),
            "/v1/messages": Endpoint(self._admission, "messages", generated(self._messages.create), refuse),
            "/v1/messages/count_tokens": Endpoint(self._admission, "messages", self._messages.count_tokens, refuse),
        }

    def routes(self) -> Starlette:
        routes = [
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in self._posts.items()),
            Route("/v1/models", Endpoint(self._admission, "models", self._list_models), methods=["GET"]),
            Route("/v1/models/{name:path}", Endpoint(self._admission, "models", self._show_model), methods=["GET"]),
            *(
                Route(
                    f"/v1/responses/{{response_id}}{path}",
                    Endpoint(self._admission, "responses", answer),
                    methods=methods,
                )
                for path, answer, methods in (
                    ("", self._responses.show_or_delete, ["GET", "DELETE"]),
                    ("/input_items", self._responses.list_input, ["GET"]),
                )
            ),
            Route("/metrics", Endpoint(self._admission, "metrics", self._show_metrics), methods=["GET"]),
            Route("/", self._show_start, methods=["GET"]),
            Route("/dashboard", self._dashboard.page),
            Route("/dashboard/grafana.json", self._dashboard.grafana),
            *(
                Route(f"/dashboard/{name}", Endpoint(self._admission, "dashboard", answer), methods=["GET"])
                for name, answer in (("data", self._dashboard.data), ("history", self._dashboard.history))
            ),
            openapi.route(self._options),
            Route("/version", self._show_version, methods=["GET"]),
            Route("/load", Endpoint(self._admission, "load", self._show_load), methods=["GET"]),
            Route("/ping", self._health.ready, methods=["GET", "POST"]),
            Route("/health", self._health.whole),
            Route("/health/live", self._health.live),
            Route("/health/ready", self._health.ready),
        ]
        self._paths = [route.path.replace(":path", "") for route in routes]
        app = Starlette(routes=routes, exception_handlers={HTTPException: self._no_route})
        app.router.redirect_slashes = not self._options.root_path  # a redirect would leave the root path
        return app

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

    def _require_model(self, name: str | None) -> str:
        """Returns the name for an answer. Raises ApiError."""
        if name is not None and name not in (*self._names, self._config.model, *self._adapters):
            message = f"there is no model {name!r} here, but {' and '.join(map(repr, (*self._names, *self._adapters)))}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name or self._name

    @property
    def _adapters(self) -> Mapping[str, Adapter]:
        return {} if self.lora is None else self.lora.by_name

    def _digest_of(self, model: str | None) -> bytes:
        """Returns the digest of the adapter that a request names; b"": it names the model. Raises EngineError."""
        adapter = self._adapters.get(model or "")
        if adapter is None and model not in (None, *self._names, self._config.model):  # it was, for `_require_model`
            raise EngineError(404, f"the LoRA adapter {model!r} was unloaded")
        return b"" if adapter is None else adapter.digest

    def _find_model(self, name: str | None) -> tuple[str, bytes]:
        """Returns the name for an answer, and the digest of the adapter. Raises ApiError."""
        return self._require_model(name), self._digest_of(name)

    # ── what is generated ──
    async def _no_answers(self, request: Request) -> Answer:
        message = "this server makes vectors and scores, no answers: --runner generate serves a model for those"
        raise ApiError(400, message)

    async def _chat(self, request: Request) -> Answer:
        async with self._bodies.receive(request) as body:
            chat = await self._bodies.decode(request, body, ChatRequest)
            prepared = await self.prepare(request, body, chat)
        return await self.answer(request, chat, prepared)

    async def prepare(self, request: Request, body: bytearray, chat: ChatRequest) -> PreparedChat:
        """Returns a chat with its prompt, for `answer`. Keeps no message. Raises ApiError."""
        self._require_model(chat.model)
        params = self._checked(chat.sampling(self._defaults), "top_logprobs")
        has_tools = chat.tools or chat.tool_choice
        use = tool_use(chat.tools, chat.tool_choice, chat.parallel_tool_calls) if has_tools else None
        conversation = await self._bodies.run(request, body, lambda: Conversation.of(chat.messages, chat.tools))
        body.clear()  # its strings are held, and twice would be too much
        limit = self._limit(chat, params, "messages")
        source = chat.answer_grammar(params) if use is None else self._formats.grammar_source(chat, use, params)
        grammar = None if source is None else await self._grammars.check(source)
        options = {**self._options.default_chat_template_kwargs, **chat.template_options}
        prompt = await self._prompt(request, conversation, options, chat, limit)
        chat.messages = []  # media are long, and it may take long to answer
        return PreparedChat(params, prompt, grammar, use)

    async def answer(
        self, request: Request, chat: ChatRequest, prepared: PreparedChat, build: BuildEvents | None = None
    ) -> Answer:
        """Submits a chat. `build`: the events of another API than OpenAI's chats. Raises ApiError, EngineError."""
        params, prompt, grammar, use = prepared
        try:
            answer_format = None  # all text is content
            if self._formats.reasoning is not None or (use is not None and use.allowed):
                answer_format = self._formats.answer_format(use, prompt.text_end, bool(chat.continue_final_message))
                params = replace(params, skip_special_tokens=False)  # marks are special tokens of some models
                grammar = self._formats.behind_reasoning(grammar, answer_format)
            return await self._generate(request, Style.CHAT, chat, params, [prompt], grammar, answer_format, build)
        except BaseException:
            prompt.release()
            raise

    def _checked(self, params: SamplingParams, param: str) -> SamplingParams:
        """Returns `params`. Raises ApiError if they ask for too many log-probabilities."""
        limit = self._options.max_logprobs
        for name, number in ((param, params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if number is not None and number > limit:
                message = f"expected at most {limit} log-probabilities (--max-logprobs), got {number} at $.{name}"
                raise ApiError(400, message, param=name)
        return params

    async def _prompt(
        self,
        request: Request,
        conversation: Conversation,
        options: dict[str, Any],
        body: ChatRequest | TokenizeRequest,
        limit: Limit | None = None,
    ) -> Prompt:
        """Returns the prompt of a conversation, which the caller submits or releases."""
        is_continued, add_special = bool(body.continue_final_message), body.add_special_tokens is True
        if is_continued and body.add_generation_prompt:
            name = "continue_final_message"
            raise ApiError(400, f"expected {name} or add_generation_prompt, got both", param=name)
        is_answered = body.add_generation_prompt is not False and not is_continued
        client = getattr(body, "user", None) or client_of(request)
        reading = self._reader.conversation(
            conversation, is_answered, options, add_special, limit, client, is_continued
        )
        if not conversation.media:
            return await reading
        try:
            return await cancel_on_disconnect(request.scope, reading)
        finally:
            self._heap.was_used()

    async def _completions(self, request: Request) -> Answer:
        async with self._bodies.receive(request) as body:
            completion = await self._bodies.decode(request, body, CompletionRequest)
            self._require_model(completion.model)
            params = self._checked(completion.sampling(self._defaults), "logprobs")
            embeds = completion.take_embeds()
            texts = await self._bodies.run(request, body, functools.partial(completion.prompts, len(embeds)))
            limit = self._limit(completion, params, "prompt")
            source = completion.answer_grammar(params)
            grammar = None if source is None else await self._grammars.check(source)
            prompts = []
            for text in texts:
                ids = await self._reader.ids(text, completion.add_special_tokens is not False, limit)
                prompts.append(Prompt(ids))
                await asyncio.sleep(0)  # each takes up to 1 ms, and others go on in between
            if embeds:
                prompts[:0] = await self._embeds(request, embeds, params)
        try:
            return await self._generate(request, Style.COMPLETION, completion, params, prompts, grammar)
        except BaseException:
            for prompt in prompts:
                prompt.release()
            raise

    async def _embeds(self, request: Request, texts: list[str], params: SamplingParams) -> list[Prompt]:
        """Returns the prompts of embeddings, which the caller submits or releases."""
        limit = Limit(self._config.max_model_len - 1, "prompt_embeds", params.max_tokens)
        try:
            return await cancel_on_disconnect(request.scope, self._reader.embeds(texts, limit))
        finally:
            self._heap.was_used()

    async def _generate(
        self,
        request: Request,
        style: Style,
        sampling: Sampling,
        params: SamplingParams,
        prompts: Sequence[Prompt],
        grammar: Grammar | None,
        answer_format: AnswerFormat | None = None,
        build: BuildEvents | None = None,
    ) -> Answer:
        fields = PromptFields(sampling, style == Style.CHAT) if sampling.shows_prompt else None
        if sampling.bad_words:
            params = replace(params, bad_words_ids=await self._reader.bad_words_ids(sampling.bad_words))
        prompts = [self._truncated(prompt, sampling, params) for prompt in prompts]
        for prompt in prompts:
            self._require_room(prompt.ids, params, "messages" if style == Style.CHAT else "prompt")
        try:
            params.require_choice(self._config.end_ids, self._reader.tokenizer.vocab_size)
        except ValueError as error:
            raise ApiError(400, str(error), param="allowed_token_ids") from None
        short, name = NAMES[style]
        if sampling.request_id is not None and not request.state.is_named:
            if not is_valid(sampling.request_id):  # a trailing line end, which the pattern accepts
                raise ApiError(400, "expected printable characters at $.request_id", param="request_id")
            request.state.request_id = sampling.request_id
        request_id: str = request.state.request_id
        report = None if self._reporter is None else self._reporter.of(request, params)
        latencies = LatencyRecorder(self._row, request.state.began, report)
        answer: dict[str, Any] = {"id": f"{short}-{request_id}", "object": name, "created": int(time.time())}
        answer["model"] = sampling.model or self._name
        account = account_of(request, sampling.user, bool(self._options.api_keys))
        submit = functools.partial(self._submit, sampling, params, request_id, account, grammar)
        if not sampling.stream or build is not None:
            counted = None if answer_format is None else ChunkFormat(Style.TEXT, b"", answer=answer_format)
            batch = self._batch(submit, params, prompts, counted)
            if build is not None:
                response = PieceResponse(build(answer_format, params), batch, latencies, request_id)
                return response if sampling.stream else await cancel_on_disconnect(request.scope, response.whole())
            choice = StreamedChoice.of_completion
            if style == Style.CHAT:
                choice = functools.partial(StreamedChoice.of_chat, answer_format=answer_format)
            ids = [prompt.ids for prompt in prompts]
            whole = self._whole(choice, batch, params, ids, answer, latencies, fields)
            return await cancel_on_disconnect(request.scope, whole)
        if style == Style.CHAT:
            answer["object"] += ".chunk"
        head = msgspec.json.encode(answer)[:-1]
        nothing_yet = b',"usage":null' if sampling.includes_usage and not sampling.counts_usage else b""
        chunk_format = ChunkFormat(
            style, head + nothing_yet, answer=answer_format, has_ids=bool(sampling.return_token_ids)
        )
        batch = self._batch(submit, params, prompts, chunk_format, counts_usage=sampling.counts_usage)
        first = b""
        if fields is not None:
            vocabulary = await self._reader.vocabulary() if fields.echoes else None
            first = fields.first_chunks(head + nothing_yet, [prompt.ids for prompt in prompts], params.n, vocabulary)
        return SSEResponse(batch, head, sampling.includes_usage, latencies, request_id, first)

    def _batch(
        self,
        submit: Callable[[Prompt, ChunkFormat | None], Awaitable[OutputStream]],
        params: SamplingParams,
        prompts: Sequence[Prompt],
        chunk_format: ChunkFormat | None = None,
        *,
        counts_usage: bool = False,
    ) -> RequestStreams:
        lengths = [len(prompt.ids) if counts_usage else None for prompt in prompts]
        formats = [
            chunk_format and replace(chunk_format, first_index=number * params.n, prompt_tokens=length)
            for number, length in enumerate(lengths)
        ]
        submits = [functools.partial(submit, *pair) for pair in zip(prompts, formats, strict=True)]
        scopes = [prompt.scope for prompt in prompts if prompt.scope is not None]
        return RequestStreams(submits, max(1, self._slots // MAX_SHARE // params.n), scopes)

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
        max_tokens = room if tokens == -1 else tokens
        if max_tokens >= len(prompt.ids):
            return prompt
        if prompt.items:
            what = f"one of {len(prompt.ids)} tokens with images or embeddings"
            raise ApiError(400, f"expected a prompt of text alone, got {what}, at $.{name}", param=name)
        is_from_left = sampling.truncation_side != "right"
        ids = prompt.ids[len(prompt.ids) - max_tokens :] if is_from_left else prompt.ids[:max_tokens]
        return prompt._replace(ids=ids)

    def _require_room(self, ids: list[int], params: SamplingParams, param: str) -> None:
        """Raises ApiError for an empty prompt, and for a prompt without room for a token of the answer."""
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
        self,
        sampling: Sampling,
        params: SamplingParams,
        request_id: str,
        account: str,
        grammar: Grammar | None,
        prompt: Prompt,
        chunk_format: ChunkFormat | None,
    ) -> OutputStream:
        return await self._client.submit(
            prompt.ids,
            params,
            items=prompt.items,
            scope=prompt.scope,
            priority=sampling.priority or 0,
            client=sampling.user or "",
            account=account,
            salt=(sampling.cache_salt or "").encode(),
            chunk_format=chunk_format,
            request_id=request_id,
            grammar=grammar,
            adapter=self._digest_of(sampling.model),
        )

    async def _whole(
        self,
        build_choice: Callable[[StreamedChoice, int, Vocabulary | None], dict[str, Any]],
        batch: RequestStreams,
        params: SamplingParams,
        prompts: Sequence[list[int]],
        answer: dict[str, Any],
        latencies: LatencyRecorder,
        fields: PromptFields | None,
    ) -> Response:
        choices = await collect(batch, len(prompts), params.n, latencies)
        vocabulary = None
        if params.logprobs is not None or (fields is not None and fields.needs_vocabulary):
            vocabulary = await self._reader.vocabulary()
        answer["choices"] = []
        for index, choice in enumerate(choices):
            if index:
                await asyncio.sleep(0)  # with log-probabilities each takes milliseconds, and others go on in between
            built = build_choice(choice, index, None if params.logprobs is None else vocabulary)
            if calls := built.get("message", {}).get("tool_calls"):
                latencies.count_calls(batch.streams[0], len(calls))  # a chat has one prompt
            answer["choices"].append(built)
        answer["usage"] = usage_of(*batch.streams.values())
        if fields is not None:
            fields.add_to(answer, choices, prompts, batch.streams, vocabulary)
        return json_response(answer)

    # ── what is known ──
    async def _tokenize(self, request: Request) -> Answer:
        async with self._bodies.receive(request) as body:
            tokenize = await self._bodies.decode(request, body, TokenizeRequest)
            self._require_model(tokenize.model)
            content = await self._bodies.run(request, body, tokenize.content)
            if isinstance(content, str):
                ids = await self._reader.ids(content, tokenize.add_special_tokens is not False)
            else:
                options = {**self._options.default_chat_template_kwargs, **(tokenize.chat_template_kwargs or {})}
                prompt = await self._prompt(request, content, options, tokenize)
                prompt.release()
                ids = prompt.ids
        return json_response({"count": len(ids), "max_model_len": self._config.max_model_len, "tokens": ids})

    async def _detokenize(self, request: Request) -> Answer:
        async with self._bodies.receive(request) as body:
            detokenize = await self._bodies.decode(request, body, DetokenizeRequest)
            self._require_model(detokenize.model)
            ids = await self._reader.ids(detokenize.tokens, param="tokens")
        return json_response({"prompt": await self._reader.text(ids)})

    async def _show_version(self, request: Request) -> Response:
        return json_response({"version": penstock.__version__})

    async def _show_load(self, request: Request) -> Answer:
        return json_response({"server_load": sum(row[ProcessCounters.OPEN] for row in self._tally.rows)})

    async def _list_models(self, request: Request) -> Answer:
        models = [self._described(name) for name in (*self._names, *self._adapters)]
        return json_response({"object": "list", "data": models})

    async def _show_model(self, request: Request) -> Answer:
        name = request.path_params["name"]
        self._require_model(name)
        return json_response(self._described(name if name in (*self._names, *self._adapters) else self._name))

    def _described(self, name: str) -> dict[str, Any]:
        adapter = self._adapters.get(name)
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "penstock",
            "root": (self._config.model or self._name) if adapter is None else adapter.path,
            "parent": None if adapter is None else self._name,
            "max_model_len": self._config.max_model_len,
        }

    async def _show_start(self, request: Request) -> Response:
        return RedirectResponse(f"{self._options.root_path}/dashboard")

    async def _show_metrics(self, request: Request) -> Answer:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
