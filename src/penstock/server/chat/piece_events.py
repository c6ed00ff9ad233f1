"""Answers that the server writes itself, event by event, from the text that the output processors send.

An answer is a list of items, one after the other: text, reasoning, calls. The items are a
function of the request and the text, so an answer has equal items after the loss of a process.
"""

from __future__ import annotations

import abc
import enum
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.client.stream import OutputChunk, OutputStream
from penstock.engine.protocol.messages import AnswerFormat, FinishReason, SamplingParams
from penstock.engine.text.answer_parser import AnswerParser, CallBegins, Content, Piece, Reasoning
from penstock.engine.text.grammar_fields import Grammar
from penstock.server.chat.latency_recorder import LatencyRecorder
from penstock.server.chat.media_prompts import Prompt
from penstock.server.chat.request_schema import ChatRequest
from penstock.server.chat.streaming import RequestStreams, SSEResponse, collect, json_response
from penstock.server.chat.tool_fields import ToolUse
from penstock.server.errors import ApiError

Event: TypeAlias = dict[str, Any]  # with a type under "type"


class ItemKind(enum.Enum):
    TEXT = enum.auto()
    REASONING = enum.auto()
    CALL = enum.auto()


class PieceEvents(abc.ABC):
    """Writes the events of an answer of one sample. A subclass has the names of an API."""

    def __init__(self, answer_format: AnswerFormat | None) -> None:
        """`answer_format`: None where all text is content."""
        self.items: list[dict[str, Any]] = []  # complete ones, as `close` has built them
        self.texts: list[str] = []  # of the open item
        self.calls = 0
        self.kind: ItemKind | None = None  # of the open item; None: no item is open
        self.reason: FinishReason | None = None  # None: more text will come
        self.stop: int | str | None = None  # the stop string that has ended the answer
        self._parser = None if answer_format is None else AnswerParser(answer_format)

    @abc.abstractmethod
    def begin(self, stream: OutputStream) -> list[Event]:
        """Returns the events before the first text. The stream has its first chunk."""

    @abc.abstractmethod
    def open(self, kind: ItemKind, call: CallBegins | None) -> list[Event]:
        """Returns the events by which an item begins. `call`: of an item that is a call."""

    @abc.abstractmethod
    def delta(self, text: str) -> Event:
        """Returns the event of more text of the open item."""

    @abc.abstractmethod
    def close(self, is_complete: bool) -> list[Event]:
        """Adds the open item to `items`, and returns the events by which the item ends."""

    @abc.abstractmethod
    def end(self, stream: OutputStream) -> list[Event]:
        """Returns the events behind the last item."""

    @abc.abstractmethod
    def fail(self, error: ApiError) -> list[Event]:
        """Returns the events by which an answer ends that stays incomplete."""

    @abc.abstractmethod
    def whole(self, stream: OutputStream) -> dict[str, Any]:
        """Returns the answer, after `add` with all its text."""

    def number(self, event: Event) -> Event:
        """Returns an event with a number, if the API has numbers."""
        return event

    def add(self, text: str, reason: FinishReason | None, stop: int | str | None) -> Iterator[Event]:
        """Yields the events of more text. `reason`, `stop`: of the end of the answer."""
        for piece in self._pieces(text, reason is not None):
            call = piece if isinstance(piece, CallBegins) else None
            kind = _kind_of(piece)
            if kind is not self.kind or call is not None:
                yield from self._finish_item(is_complete=True)
                self.kind = kind
                self.calls += call is not None
                yield from self.open(kind, call)
            if not isinstance(piece, CallBegins):
                self.texts.append(piece.text)
                yield self.delta(piece.text)
        if reason is not None:
            self.reason, self.stop = reason, stop
            yield from self._finish_item(is_complete=reason is FinishReason.STOP)

    def _pieces(self, text: str, is_last: bool) -> list[Piece]:
        if self._parser is None:
            return [Content(text)] if text else []
        pieces = self._parser.feed(text) if text else []
        return [*pieces, *self._parser.finish()] if is_last else pieces

    def _finish_item(self, *, is_complete: bool) -> list[Event]:
        if self.kind is None:
            return []
        events = self.close(is_complete)
        self.texts, self.kind = [], None
        return events


BuildEvents: TypeAlias = Callable[[AnswerFormat | None, SamplingParams], PieceEvents]


def _kind_of(piece: Piece) -> ItemKind:
    if isinstance(piece, Content):
        return ItemKind.TEXT
    return ItemKind.REASONING if isinstance(piece, Reasoning) else ItemKind.CALL


class PieceResponse(SSEResponse):
    """An answer of events that the server writes, as they come or whole."""

    is_verbatim = False

    def __init__(self, events: PieceEvents, batch: RequestStreams, latencies: LatencyRecorder, request_id: str) -> None:
        super().__init__(batch, b"", False, latencies, request_id)
        self._events = events

    @property
    def _stream(self) -> OutputStream:
        return self._batch.streams[0]

    def begin(self) -> bytes:
        return self._written(self._events.begin(self._stream))

    def translate(self, chunk: OutputChunk) -> bytes:
        return self._written(self._events.add(chunk.text, chunk.reason, chunk.stop))

    def end(self) -> bytes:
        self._latencies.count_calls(self._stream, self._events.calls)
        return self._written(self._events.end(self._stream))

    def fail(self, error: ApiError) -> bytes:
        return self._written(self._events.fail(error))

    async def whole(self) -> Response:
        (choice,) = await collect(self._batch, 1, 1, self._latencies)
        for _ in self._events.add(choice.text, choice.reason, choice.stop):
            pass
        self._latencies.count_calls(self._stream, self._events.calls)
        return json_response(self._events.whole(self._stream))

    def _written(self, events: Iterable[Event]) -> bytes:
        return b"".join(
            b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(self._events.number(event)))
            for event in events
        )


# ── the chat behind a request of another API ─────────────────────────────────────────────────────────────────────────
class PreparedChat(NamedTuple):
    params: SamplingParams
    prompt: Prompt  # `ChatApi.answer` submits or releases it
    grammar: Grammar | None
    use: ToolUse | None


class ChatApi(Protocol):
    """What answers chats."""

    async def prepare(self, request: Request, body: bytearray, chat: ChatRequest) -> PreparedChat: ...
    async def answer(
        self, request: Request, chat: ChatRequest, prepared: PreparedChat, build: BuildEvents | None = None
    ) -> Response | SSEResponse: ...


# ── errors of a translated request ───────────────────────────────────────────────────────────────────────────────────
_MESSAGE = re.compile(r"messages\[(\d+)\]")


def translated(error: ApiError, paths: Sequence[str], names: Iterable[tuple[str, str]]) -> ApiError:
    """Returns an error of a chat with the fields of the request behind the chat.

    `paths`: of each message of the chat; empty: the chat was not made yet, and the error is of the request itself.
    `names`: patterns of a chat's fields, and the fields of the request.
    """
    if not paths:
        return error

    def path(match: re.Match[str]) -> str:
        place = int(match[1])
        return paths[place] if place < len(paths) else match[0]

    def translate(text: str) -> str:
        text = _MESSAGE.sub(path, text)
        for pattern, name in names:
            text = re.sub(rf"(?:\A|(?<=\$\.)){pattern}", name, text)
        return text

    param = None if error.param is None else translate(error.param)
    return ApiError(error.status, translate(error.message), param=param, code=error.code, headers=error.headers)
