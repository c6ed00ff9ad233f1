"""The body of /v1/messages, and the chat that it becomes."""

import json
from typing import Any

import pytest

pytest.importorskip("starlette")

from penstock.engine.protocol.messages import FinishReason
from penstock.server.chat.piece_events import translated
from penstock.server.chat.request_schema import ChatRequest, Conversation, decoded
from penstock.server.errors import ApiError
from penstock.server.messages.message_events import error_body
from penstock.server.messages.messages_request import NAMES, MessagesRequest

DATA = "iVBORw0KGgo" + "A" * (80 << 10)  # long enough to be cut out of the body
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
TOOL = {"name": "weather", "description": "of a city", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rio"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}
USER = {"role": "user", "content": "hi"}


def chat_of(**fields: Any) -> tuple[ChatRequest, list[str]]:
    body = {"model": "m", "max_tokens": 5, "messages": [USER], **fields}
    return decoded(json.dumps(body).encode(), MessagesRequest).translate()


def messages_of(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    conversation = Conversation.of(chat_of(messages=messages, **fields)[0].messages)
    return [{name: value for name, value in message.items() if value} for message in conversation.messages]


def test_the_system_prompt_comes_first() -> None:
    assert messages_of(USER, system="be brief") == [{"role": "system", "content": "be brief"}, USER]
    blocks = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    assert messages_of(USER, system=blocks)[0]["content"] == "a\nb"


def test_results_of_tools_are_messages_before_the_users_text() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}, IMAGE]}
    answer = {"role": "assistant", "content": [thought, {"type": "text", "text": "Let me see."}, USE]}
    last = {"role": "user", "content": [{"type": "text", "text": "and?"}, result]}
    user, model, tool, again = messages_of(USER, answer, last)
    assert (model["content"], model["reasoning"]) == ("Let me see.", "hm")
    assert model["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Rio"}}
    assert tool["role"] == "tool" and tool["tool_call_id"] == "t1"
    assert tool["content"] == [{"type": "text", "text": "sunny"}, {"type": "image"}]
    assert (user["content"], again["content"]) == ("hi", "and?")


def test_images_are_data_urls_or_urls() -> None:
    url = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    chat, _ = chat_of(messages=[{"role": "user", "content": [IMAGE, url, {"type": "text", "text": "see"}]}])
    media = Conversation.of(chat.messages).media
    assert [item.url for item in media] == [f"data:image/png;base64,{DATA}", "https://example.org/a.png"]


def test_options_are_those_of_a_chat() -> None:
    chat, _ = chat_of(
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        stop_sequences=["end"],
        temperature=0.5,
        top_k=7,
        metadata={"user_id": "me"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        stream=True,
    )
    params = chat.sampling()
    assert (params.max_tokens, params.temperature, params.top_k, params.stop) == (5, 0.5, 7, ("end",))
    assert (chat.user, chat.stream, chat.tool_choice, chat.parallel_tool_calls) == ("me", True, "required", False)
    assert chat.tools is not None and chat.tools[0].function.parameters == {"type": "object"}
    assert chat.template_options == {"reasoning_effort": "high", "enable_thinking": True}
    source = chat.grammar_source()
    assert source is not None and source.kind == "json_schema"
    for choice, expected in (({"type": "auto"}, "auto"), ({"type": "none"}, "none")):
        assert chat_of(tools=[TOOL], tool_choice=choice)[0].tool_choice == expected
    named, _ = chat_of(tools=[TOOL], tool_choice={"type": "tool", "name": "weather"})
    assert named.tool_choice.function.name == "weather"  # type: ignore[union-attr]
    assert chat_of(thinking={"type": "disabled"})[0].template_options == {"enable_thinking": False}


def test_options_of_agents_change_no_chat() -> None:
    management = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert chat_of(context_management=management)[0] == chat_of()[0]
    former, _ = chat_of(output_format={"type": "json_schema", "schema": {"type": "object"}})
    assert former.grammar_source() is not None
    hidden = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, USE]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}]}
    assert [message["role"] for message in messages_of(USER, hidden, result)] == ["user", "assistant", "tool"]


def test_a_last_message_of_the_model_is_continued() -> None:
    assert chat_of(messages=[USER, {"role": "assistant", "content": "It is"}])[0].continue_final_message
    assert not chat_of()[0].continue_final_message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [USE]}, USER]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": [USE, USE]}, USER]}, "messages[0].content"),
        ({"tools": [{**TOOL, "type": "bash_20250124"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "name": 'a"'}]}, "tools[0].name"),
        ({"tool_choice": {"type": "often"}}, "tool_choice.type"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0]"),
        ({"stop": "end"}, "stop"),
        ({"n": 2}, "n"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_path(fields: dict[str, Any], param: str) -> None:
    paths: list[str] = []
    with pytest.raises(ApiError) as caught:
        try:
            chat, paths = chat_of(**fields)
            Conversation.of(chat.messages)
        except ApiError as error:
            raise translated(error, paths, NAMES) from None
    assert (caught.value.status, caught.value.param) == (400, param)


def test_errors_of_the_tool_choice_name_the_fields_of_the_body() -> None:
    error = translated(ApiError(400, "no tool at $.tool_choice.function.name", param="tool_choice"), ["x"], NAMES)
    assert (error.message, error.param) == ("no tool at $.tool_choice.name", "tool_choice")


def test_errors_have_anthropics_form() -> None:
    for status, kind in (
        (400, "invalid_request_error"),
        (404, "not_found_error"),
        (500, "api_error"),
        (422, "invalid_request_error"),
    ):
        assert error_body(ApiError(status, "no")) == {"type": "error", "error": {"type": kind, "message": "no"}}
    assert FinishReason.STOP
