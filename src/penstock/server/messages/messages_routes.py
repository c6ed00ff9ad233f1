"""The routes under `/v1/messages`. A message is answered as a chat."""

from __future__ import annotations

import functools

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.protocol.messages import AnswerFormat, SamplingParams
from penstock.server.chat.piece_events import ChatApi, translated
from penstock.server.chat.streaming import json_response
from penstock.server.errors import ApiError
from penstock.server.http.endpoint import Answer, BodyReader
from penstock.server.messages.message_events import MessageEvents, error_body
from penstock.server.messages.messages_request import NAMES, CountTokensRequest, MessagesRequest


def refuse(error: ApiError) -> Response:
    """Returns an error in Anthropic's form."""
    return Response(msgspec.json.encode(error_body(error)), error.status, error.headers, "application/json")


class MessagesRoutes:
    def __init__(self, api: ChatApi, bodies: BodyReader, model: str) -> None:
        """`model`: the name in answers to requests without a model."""
        self._api = api
        self._bodies = bodies
        self._model = model

    async def create(self, request: Request) -> Answer:
        paths: list[str] = []
        try:
            async with self._bodies.receive(request) as body:
                posted = await self._bodies.decode(request, body, MessagesRequest)
                chat, paths = await self._bodies.run(request, body, posted.translate)
                posted.messages = []  # images are long, and an answer may take long
                prepared = await self._api.prepare(request, body, chat)
            build = functools.partial(self._events, request, posted.model or self._model)
            return await self._api.answer(request, chat, prepared, build)
        except ApiError as error:
            raise translated(error, paths, NAMES) from None

    def _events(
        self, request: Request, model: str, answer_format: AnswerFormat | None, params: SamplingParams
    ) -> MessageEvents:
        return MessageEvents(answer_format, f"msg_{request.state.request_id}", model)

    async def count_tokens(self, request: Request) -> Answer:
        paths: list[str] = []
        try:
            async with self._bodies.receive(request) as body:
                posted = await self._bodies.decode(request, body, CountTokensRequest)
                chat, paths = await self._bodies.run(request, body, posted.translate)
                prepared = await self._api.prepare(request, body, chat)
        except ApiError as error:
            raise translated(error, paths, NAMES) from None
        prepared.prompt.release()
        return json_response({"input_tokens": len(prepared.prompt.ids)})
