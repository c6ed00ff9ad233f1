"""The events of a message, from texts."""

from typing import Any

import pytest

pytest.importorskip("starlette")

from penstock.engine.protocol.messages import AnswerFormat, FinishReason
from penstock.server.errors import ApiError
from penstock.server.messages.message_events import MessageEvents
from tests.unit.server.responses.test_response_events import TEXT, TOOLS, stream


def answered(
    text: str,
    answer_format: AnswerFormat | None = None,
    reason: FinishReason = FinishReason.STOP,
    stop: int | str | None = None,
    step: int = 3,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All events, and the whole message."""
    writer = MessageEvents(answer_format, "msg_n", "m")
    events = writer.begin(stream())
    for at in range(0, len(text), step):
        events += writer.add(text[at : at + step], None, None)
    events += writer.add("", reason, stop)
    return [*events, *writer.end(stream())], writer.whole(stream())


def test_events_have_anthropics_order() -> None:
    events, message = answered("Hello!")
    assert [event["type"] for event in events] == [
        *("message_start", "ping", "content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert events[0]["message"]["content"] == [] and events[0]["message"]["stop_reason"] is None
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert (
        events[-2]["usage"]
        == message["usage"]
        == {
            "input_tokens": 6,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 3,
        }
    )
    assert message["content"] == [{"type": "text", "text": "Hello!"}] and message["model"] == "m"


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_thinking_text_and_calls_are_blocks(step: int) -> None:
    events, message = answered(TEXT, TOOLS, step=step)
    thinking, text, call = message["content"]
    assert thinking == {"type": "thinking", "thinking": "hm\n", "signature": ""}
    assert text == {"type": "text", "text": "Let me see."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "f", {"a": 1})
    assert message["stop_reason"] == "tool_use"
    deltas: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_delta":
            deltas[event["index"]] = deltas.get(event["index"], "") + [*event["delta"].values()][1]
    assert deltas == {0: "hm\n", 1: "Let me see.", 2: '{"a": 1}'}
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in starts] == ["thinking", "text", "tool_use"] and starts[2]["input"] == {}


def test_the_reason_of_the_end_is_anthropics() -> None:
    for fields, reason, sequence in (
        ({"reason": FinishReason.LENGTH}, "max_tokens", None),
        ({"stop": "end"}, "stop_sequence", "end"),
        ({"stop": 7}, "end_turn", None),
    ):
        message = answered("Hello!", **fields)[1]  # type: ignore[arg-type]
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_arguments_that_are_cut_are_a_text() -> None:
    _, message = answered(TEXT.partition(" 1}")[0], TOOLS, FinishReason.LENGTH)
    assert message["content"][-1]["input"] == {"unparsed": '{"a":'} and message["stop_reason"] == "max_tokens"


def test_an_answer_that_fails_ends_with_an_error() -> None:
    assert MessageEvents(None, "msg_n", "m").fail(ApiError(503, "it died")) == [
        {"type": "error", "error": {"type": "overloaded_error", "message": "it died"}}
    ]
