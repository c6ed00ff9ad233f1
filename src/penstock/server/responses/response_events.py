"""The events of a response, and the response as a whole, as OpenAI's API has them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from penstock.engine.client.stream import OutputStream
from penstock.engine.protocol.messages import AnswerFormat, FinishReason
from penstock.engine.text.answer_parser import CallBegins
from penstock.server.chat.piece_events import Event, ItemKind, PieceEvents
from penstock.server.chat.streaming import usage_of
from penstock.server.errors import ApiError

PREFIXES = {ItemKind.TEXT: "msg", ItemKind.REASONING: "rs", ItemKind.CALL: "fc"}  # of ids of items
DELTAS = {
    ItemKind.TEXT: "response.output_text",
    ItemKind.REASONING: "response.reasoning_text",
    ItemKind.CALL: "response.function_call_arguments",
}


class ResponseEvents(PieceEvents):
    """Numbers the events. The answer is stored before the last event, which has the whole answer."""

    def __init__(
        self,
        answer_format: AnswerFormat | None,
        response: dict[str, Any],
        save: Callable[[dict[str, Any]], bool],
    ) -> None:
        """`response`: with all fields, before the answer begins. `save` returns whether a response is stored."""
        super().__init__(answer_format)
        self._response = response
        self._save = save
        self._numbers = 0
        self._item: dict[str, Any] = {}  # that is open

    def number(self, event: Event) -> Event:
        self._numbers += 1
        return {**event, "sequence_number": self._numbers - 1}

    def begin(self, stream: OutputStream) -> list[Event]:
        return [{"type": f"response.{name}", "response": self._response} for name in ("created", "in_progress")]

    def open(self, kind: ItemKind, call: CallBegins | None) -> list[Event]:
        item_id = f"{PREFIXES[kind]}_{self._response['id'].removeprefix('resp_')}_{len(self.items)}"
        item: dict[str, Any] = {"id": item_id, "type": "message", "status": "in_progress"}
        if call is not None:
            item |= {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": ""}
        elif kind is ItemKind.REASONING:
            item |= {"type": "reasoning", "summary": [], "content": []}
        else:
            item |= {"role": "assistant", "content": []}
        self._item = item
        events = [{"type": "response.output_item.added", "output_index": len(self.items), "item": item}]
        if call is None:
            events.append({**self._place("response.content_part.added"), "part": self._part("")})
        return events

    def _place(self, event_type: str) -> Event:
        """Returns the beginning of an event of the open item."""
        event = {"type": event_type, "item_id": self._item["id"], "output_index": len(self.items)}
        return event if self.kind is ItemKind.CALL else {**event, "content_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        if self.kind is ItemKind.REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _text_event(self, suffix: str, field: str, text: str) -> Event:
        assert self.kind is not None, "an item is open"
        logprobs: dict[str, Any] = {"logprobs": []} if self.kind is ItemKind.TEXT else {}
        return {**self._place(f"{DELTAS[self.kind]}.{suffix}"), field: text, **logprobs}

    def delta(self, text: str) -> Event:
        return self._text_event("delta", "delta", text)

    def close(self, is_complete: bool) -> list[Event]:
        text = "".join(self.texts)
        item = {**self._item, "status": "completed" if is_complete else "incomplete"}
        if self.kind is ItemKind.CALL:
            events = [{**self._text_event("done", "arguments", text), "name": item["name"]}]
            item["arguments"] = text
        else:
            events = [
                self._text_event("done", "text", text),
                {**self._place("response.content_part.done"), "part": self._part(text)},
            ]
            item["content"] = [self._part(text)]
        events.append({"type": "response.output_item.done", "output_index": len(self.items), "item": item})
        self.items.append(item)
        return events

    def end(self, stream: OutputStream) -> list[Event]:
        response = self.whole(stream)
        return [{"type": f"response.{response['status']}", "response": response}]

    def fail(self, error: ApiError) -> list[Event]:
        detail = {"code": "server_error" if error.status >= 500 else "invalid_prompt", "message": error.message}
        response = {**self._response, "status": "failed", "error": detail, "output": self.items, "store": False}
        return [{"type": "response.failed", "response": response}]

    def whole(self, stream: OutputStream) -> dict[str, Any]:
        is_cut = self.reason is FinishReason.LENGTH
        response = {
            **self._response,
            "status": "incomplete" if is_cut else "completed",
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self.items,
            "usage": _usage(stream),
        }
        response["store"] = response["store"] and self._save(response)
        return response


def _usage(stream: OutputStream) -> dict[str, Any]:
    usage = usage_of(stream)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": stream.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": stream.reasoning_tokens},
        "total_tokens": usage["total_tokens"],
    }
