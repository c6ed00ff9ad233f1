"""The events of a response, from texts."""

from typing import Any

import pytest

pytest.importorskip("starlette")

from penstock.engine.client.stream import OutputChunk, OutputStream
from penstock.engine.protocol.messages import AnswerFormat, FinishReason
from penstock.server.errors import ApiError
from penstock.server.responses.response_events import ResponseEvents

TOOLS = AnswerFormat(tools="hermes", reasoning="qwen3", call_ids="x")
TEXT = '<think>hm\n</think>Let me see.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
ADDED, DONE = "response.output_item.added", "response.output_item.done"


def stream() -> OutputStream:
    answer = OutputStream(1, 0, 0, 10, 1)
    answer.add(OutputChunk(0, b"", [1, 2, 3], FinishReason.STOP, None, 4))
    return answer


def events_of(
    text: str, answer_format: AnswerFormat | None, reason: FinishReason = FinishReason.STOP, step: int = 3
) -> tuple[list[dict[str, Any]], ResponseEvents, list[dict[str, Any]]]:
    """All events, with their numbers; the writer; and what it has stored."""
    stored: list[dict[str, Any]] = []

    def save(response: dict[str, Any]) -> bool:
        stored.append(response)
        return True

    writer = ResponseEvents(answer_format, {"id": "resp_n", "status": "in_progress", "output": [], "store": True}, save)
    events = writer.begin(stream())
    for at in range(0, len(text), step):
        events += writer.add(text[at : at + step], None, None)
    events += writer.add("", reason, None)
    events += writer.end(stream())
    return [writer.number(event) for event in events], writer, stored


def test_events_have_openais_order_and_numbers() -> None:
    events, _, stored = events_of("Hello!", None)
    assert [event["type"] for event in events] == [
        *("response.created", "response.in_progress", ADDED, "response.content_part.added"),
        *("response.output_text.delta", "response.output_text.delta", "response.output_text.done"),
        *("response.content_part.done", DONE, "response.completed"),
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["delta"] for event in events if "delta" in event] == ["Hel", "lo!"]
    assert {event["item_id"] for event in events if "item_id" in event} == {"msg_n_0"}
    response = events[-1]["response"]
    assert stored == [response] and response["status"] == "completed" and response["store"]
    (message,) = response["output"]
    assert message["content"] == [{"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}]
    assert response["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 13,
    }


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_reasoning_text_and_calls_are_items(step: int) -> None:
    events, writer, _ = events_of(TEXT, TOOLS, step=step)
    reasoning, message, call = writer.items
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm\n"}] and reasoning["type"] == "reasoning"
    assert message["content"][0]["text"] == "Let me see."
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "f", '{"a": 1}')
    assert call["call_id"].startswith("call_") and call["status"] == "completed"
    for index, item in enumerate(writer.items):
        own = [event for event in events if event.get("output_index") == index]
        assert own[0]["type"] == ADDED and own[-1]["type"] == DONE
        assert own[0]["item"]["status"] == "in_progress" and own[-1]["item"] == item
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert "".join(event.get("delta", "") for event in own) == text
        done = next(event for event in own if event["type"].endswith(("text.done", "arguments.done")))
        assert done.get("text", done.get("arguments")) == text


def test_an_answer_cut_by_its_length_is_incomplete() -> None:
    events, writer, _ = events_of(TEXT[:-20], TOOLS, FinishReason.LENGTH)
    assert [item["status"] for item in writer.items] == ["completed", "completed", "incomplete"]
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_an_answer_that_fails_ends_with_its_error_and_is_not_stored() -> None:
    stored: list[Any] = []
    writer = ResponseEvents(None, {"id": "resp_n", "store": True}, lambda response: bool(stored.append(response)))
    list(writer.add("Hel", None, None))
    (event,) = writer.fail(ApiError(503, "it died"))
    assert event["type"] == "response.failed" and not event["response"]["store"] and not stored
    assert event["response"]["error"] == {"code": "server_error", "message": "it died"}


def test_a_response_that_finds_no_room_is_not_said_to_be_stored() -> None:
    writer = ResponseEvents(None, {"id": "resp_n", "store": True}, lambda response: False)
    list(writer.add("Hel", FinishReason.STOP, None))
    assert writer.whole(stream())["store"] is False
