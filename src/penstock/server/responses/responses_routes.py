"""The routes under `/v1/responses`. A response is answered as a chat, and stored for the next ones."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock import Store
from penstock.engine.protocol.messages import AnswerFormat, SamplingParams
from penstock.server.chat.piece_events import ChatApi, translated
from penstock.server.chat.prompt_builder import PromptBuilder
from penstock.server.chat.streaming import json_response
from penstock.server.errors import ApiError
from penstock.server.http.endpoint import LONG, Answer, BodyReader, account_of
from penstock.server.options import ServerOptions
from penstock.server.responses.response_events import ResponseEvents
from penstock.server.responses.response_store import ResponseStore, StoredTurn, create_response_id
from penstock.server.responses.responses_request import NAMES, ResponseItem, ResponsesRequest, TranslatedChat

T = TypeVar("T")

MAX_LISTED, LISTED = 100, 20  # items of a list, at most and by default
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


class ResponsesRoutes:
    def __init__(
        self,
        api: ChatApi,
        bodies: BodyReader,
        reader: PromptBuilder,
        options: ServerOptions,
        model: str,
        store: Store | None,
    ) -> None:
        """`model`: the name in answers to requests without a model. `store`: shared by all server processes; None: no
        response is stored."""
        self._api = api
        self._model = model
        self._bodies = bodies
        self._reader = reader  # for its threads
        self._has_keys = bool(options.api_keys)
        self._store = ResponseStore(store, options.response_store_seconds)

    # ── create ──
    async def create(self, request: Request) -> Answer:
        owner, response_id, paths = self._owner(request), create_response_id(), list[str]()
        try:
            async with self._bodies.receive(request) as body:
                posted = await self._bodies.decode(request, body, ResponsesRequest)
                reads_store = posted.previous_response_id is not None or posted.has_references
                is_long = len(body) > LONG or reads_store
                chat, paths = await self._run(is_long, lambda: self._translate(owner, posted))
                prepared = await self._api.prepare(request, body, chat)
                is_stored = posted.store is not False and self._store.is_open
                if is_stored:
                    put = functools.partial(self._store.put_input, owner, response_id, posted.items)
                    try:
                        is_stored = await self._run(is_long, lambda: put(posted.previous_response_id))
                    except BaseException:
                        prepared.prompt.release()
                        raise
                posted.input = ""  # images are long, and an answer may take long
            build = functools.partial(self._events, owner, response_id, posted, is_stored)
            return await self._api.answer(request, chat, prepared, build)
        except ApiError as error:
            raise translated(error, paths, NAMES) from None

    async def count_tokens(self, request: Request) -> Answer:
        owner, paths = self._owner(request), list[str]()
        try:
            async with self._bodies.receive(request) as body:
                posted = await self._bodies.decode(request, body, ResponsesRequest)
                chat, paths = await self._run(True, lambda: self._translate(owner, posted))
                prepared = await self._api.prepare(request, body, chat)
        except ApiError as error:
            raise translated(error, paths, NAMES) from None
        prepared.prompt.release()
        return json_response({"object": "response.input_tokens", "input_tokens": len(prepared.prompt.ids)})

    async def _run(self, is_long: bool, work: Callable[[], T]) -> T:
        """Runs long work in a thread."""
        return await self._reader.in_a_thread(work) if is_long else work()

    def _translate(self, owner: str, posted: ResponsesRequest) -> TranslatedChat:
        posted.require_supported()
        earlier = self._store.conversation(owner, posted.previous_response_id)
        posted.input = self._store.resolve(owner, posted.items)
        return posted.translate(earlier)

    def _events(
        self,
        owner: str,
        response_id: str,
        posted: ResponsesRequest,
        is_stored: bool,
        answer_format: AnswerFormat | None,
        params: SamplingParams,
    ) -> ResponseEvents:
        response = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": posted.instructions,
            "max_output_tokens": posted.max_output_tokens,
            "max_tool_calls": posted.max_tool_calls,
            "metadata": posted.metadata or {},
            "model": posted.model or self._model,
            "output": [],
            "parallel_tool_calls": posted.parallel_tool_calls is not False,
            "previous_response_id": posted.previous_response_id,
            "reasoning": {"effort": None if posted.reasoning is None else posted.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": is_stored,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"} if posted.text is None else posted.text.format or {"type": "text"}},
            "tool_choice": posted.tool_choice or "auto",
            "tools": posted.tools or [],
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": posted.user,
        }
        return ResponseEvents(answer_format, response, functools.partial(self._store.put_response, owner, response_id))

    def _owner(self, request: Request) -> str:
        """Returns a hash of the API key; without keys, all clients are one owner."""
        return account_of(request, None, True) if self._has_keys else ""

    # ── stored responses ──
    async def show_or_delete(self, request: Request) -> Response:
        if request.method == "DELETE":
            name = request.path_params["response_id"]
            self._store.delete(self._owner(request), name)
            return json_response({"id": name, "object": "response", "deleted": True})
        if request.query_params.get("stream") == "true":
            raise ApiError(400, "a stored response is not streamed: expected no stream in the query", param="stream")
        return Response(bytes((await self._turn(request)).response), media_type="application/json")

    async def list_input(self, request: Request) -> Response:
        """Lists the items of a response's input, the last first unless `order` says otherwise."""
        query = request.query_params
        limit, order = query.get("limit", str(LISTED)), query.get("order", "desc")
        if not (limit.isdecimal() and 1 <= int(limit) <= MAX_LISTED):
            raise ApiError(400, f"expected limit from 1 to {MAX_LISTED}, got {limit!r:.80}", param="limit")
        if order not in ("asc", "desc"):
            raise ApiError(400, f"expected order asc or desc, got {order!r:.80}", param="order")
        items = _with_ids(request.path_params["response_id"], (await self._turn(request)).input.items)
        items = items if order == "asc" else items[::-1]
        if after := query.get("after"):
            places = [place for place, item in enumerate(items) if item["id"] == after]
            if not places:
                raise ApiError(400, f"there is no item {after!r:.200} in this list", param="after")
            items = items[places[0] + 1 :]
        page = items[: int(limit)]
        ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return json_response({"object": "list", "data": page, **ends, "has_more": len(items) > len(page)})

    async def _turn(self, request: Request) -> StoredTurn:
        return self._store.get(self._owner(request), request.path_params["response_id"])


def _with_ids(response_id: str, items: list[ResponseItem]) -> list[dict[str, Any]]:
    """Returns items of an input as JSON objects, each with a type and an id."""
    name = response_id.removeprefix("resp_")
    listed = []
    for number, item in enumerate(items):
        fields = {"type": item.type, **msgspec.to_builtins(item)}
        fields.setdefault("id", f"{PREFIXES.get(item.type, 'item')}_{name}_in{number}")
        if item.type == "message" and isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            fields["content"] = [{"type": kind, "text": item.content}]
        listed.append({"status": "completed", **fields})
    return listed
