"""The events of an answer, and the answer as a whole, as Anthropic's API has them."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.engine.client.stream import OutputStream
from penstock.engine.protocol.messages import AnswerFormat, FinishReason
from penstock.engine.text.answer_parser import CallBegins
from penstock.server.chat.piece_events import Event, ItemKind, PieceEvents
from penstock.server.errors import ApiError

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
DELTAS = {  # type and field of the delta
    ItemKind.TEXT: ("text_delta", "text"),
    ItemKind.REASONING: ("thinking_delta", "thinking"),
    ItemKind.CALL: ("input_json_delta", "partial_json"),
}


def error_body(error: ApiError) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class MessageEvents(PieceEvents):
    def __init__(self, answer_format: AnswerFormat | None, message_id: str, model: str) -> None:
        super().__init__(answer_format)
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._block: dict[str, Any] = {}  # of the open item

    def begin(self, stream: OutputStream) -> list[Event]:
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**_usage(stream), "output_tokens": 0},
        }
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def open(self, kind: ItemKind, call: CallBegins | None) -> list[Event]:
        if call is not None:
            self._block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        elif kind is ItemKind.REASONING:
            self._block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            self._block = {"type": "text", "text": ""}
        return [{"type": "content_block_start", "index": len(self.items), "content_block": self._block}]

    def delta(self, text: str) -> Event:
        assert self.kind is not None, "an item is open"
        kind, field = DELTAS[self.kind]
        return {"type": "content_block_delta", "index": len(self.items), "delta": {"type": kind, field: text}}

    def close(self, is_complete: bool) -> list[Event]:
        text, block = "".join(self.texts), dict(self._block)
        if self.kind is ItemKind.CALL:
            block["input"] = _parsed(text)
        else:
            block[block["type"]] = text
        event = {"type": "content_block_stop", "index": len(self.items)}
        self.items.append(block)
        return [event]

    def _stop(self) -> dict[str, Any]:
        if self.reason is FinishReason.LENGTH:
            reason = "max_tokens"
        elif isinstance(self.stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": self.stop}
        else:
            reason = "tool_use" if any(block["type"] == "tool_use" for block in self.items) else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}

    def end(self, stream: OutputStream) -> list[Event]:
        return [{"type": "message_delta", "delta": self._stop(), "usage": _usage(stream)}, {"type": "message_stop"}]

    def fail(self, error: ApiError) -> list[Event]:
        return [error_body(error)]

    def whole(self, stream: OutputStream) -> dict[str, Any]:
        return {**self._head, "content": self.items, **self._stop(), "usage": _usage(stream)}


def _usage(stream: OutputStream) -> dict[str, int]:
    """Returns the usage. Tokens from the cache are no tokens of the input."""
    return {
        "input_tokens": stream.prompt_tokens - stream.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stream.cached_tokens,
        "output_tokens": stream.completion_tokens,
    }


def _parsed(arguments: str) -> dict[str, Any]:
    """Returns the arguments of a call; the text, where `max_tokens` has cut the arguments."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {"unparsed": arguments}
