"""The body of /v1/responses, and the chat that it becomes."""

import json
from typing import Any

import msgspec
import pytest

pytest.importorskip("starlette")

from penstock.server.chat.piece_events import translated
from penstock.server.chat.request_schema import Conversation, decoded
from penstock.server.errors import ApiError
from penstock.server.responses.responses_request import NAMES, ResponsesRequest, TranslatedChat

PNG = "data:image/png;base64,iVBORw0KGgo"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rio"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}


def posted(**fields: Any) -> ResponsesRequest:
    return decoded(json.dumps(fields).encode(), ResponsesRequest)


def chat_of(**fields: Any) -> TranslatedChat:
    request = posted(**fields)
    request.require_supported()
    return request.translate()


def messages_of(**fields: Any) -> list[dict[str, Any]]:
    """The messages as a chat template takes them, without empty fields."""
    messages = Conversation.of(chat_of(**fields).chat.messages).messages
    return [{name: value for name, value in message.items() if value} for message in messages]


def test_items_of_one_turn_of_the_model_are_one_message() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said_before = {"role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]}
    items = [{"role": "user", "content": "hi"}, thought, said_before, CALL, {**CALL, "call_id": "c2"}]
    results = [{**RESULT, "call_id": "c2"}, RESULT, {"role": "user", "content": "and?"}]
    user, answer, first, second, last = messages_of(input=[*items, *results])
    assert user["content"] == "hi" and last["content"] == "and?"
    assert (answer["content"], answer["reasoning"]) == ("Let me see.", "hm")
    assert [call["id"] for call in answer["tool_calls"]] == ["c1", "c2"]
    assert answer["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Rio"}'}
    assert [first["tool_call_id"], second["tool_call_id"]] == ["c1", "c2"], "in the order of the calls"


def test_turns_of_the_model_stay_apart() -> None:
    texts = [{"role": "assistant", "content": text} for text in ("a", "b")]
    assert [message["content"] for message in messages_of(input=texts)] == ["a", "b"]
    again = [{**CALL, "call_id": "c2"}, {**RESULT, "call_id": "c2"}]
    roles = [message["role"] for message in messages_of(input=[CALL, RESULT, *again])]
    assert roles == ["assistant", "tool", "assistant", "tool"]


def test_images_are_parts_in_messages_and_results() -> None:
    image = {"type": "input_image", "image_url": PNG}
    parts = [{"type": "input_text", "text": "see"}, image]
    items = [{"role": "user", "content": parts}, CALL, {**RESULT, "output": [image]}]
    conversation = Conversation.of(chat_of(input=items).chat.messages)
    assert [media.url for media in conversation.media] == [PNG, PNG]
    assert [part["type"] for part in conversation.messages[0]["content"]] == ["text", "image"]


def test_long_images_are_put_back_where_they_were() -> None:
    url = "data:image/png;base64," + "A" * (80 << 10)
    image = {"type": "input_image", "image_url": url}
    items = [{"role": "user", "content": [image]}, CALL, {**RESULT, "output": [image]}]
    assert [image.image_url for item in posted(input=items).items for image in item.images] == [url, url]


def test_options_are_those_of_a_chat() -> None:
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    chat = chat_of(
        input="hi",
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        user="me",
        stream=True,
        tools=[TOOL],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        text={"format": schema, "verbosity": "medium"},
        reasoning={"effort": "low", "summary": "auto"},
        metadata={"a": "b"},
        truncation="disabled",
        include=[],
        background=False,
    ).chat
    params = chat.sampling()
    assert (params.max_tokens, params.temperature, params.top_p, params.seed) == (7, 0.5, 0.9, 3)
    assert (chat.user, chat.stream, chat.parallel_tool_calls, chat.reasoning_effort) == ("me", True, False, "low")
    assert chat.tools is not None
    function = {name: value for name, value in TOOL.items() if name != "type"}
    assert msgspec.to_builtins(chat.tools[0].function) == {**function, "description": None}
    source = chat.grammar_source()
    assert source is not None and (source.kind, source.value) == ("json_schema", {"type": "object"})
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    assert chat_of(input="hi", tools=[TOOL], tool_choice=allowed).chat.tool_choice.allowed_tools.mode == "required"


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "weather"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
    ],
)
def test_answer_shows_the_choice_of_tools_as_it_was_sent(choice: dict[str, Any]) -> None:
    assert msgspec.to_builtins(posted(input="hi", tools=[TOOL], tool_choice=choice).tool_choice) == choice


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"n": 2}, "n"),
        ({"max_tokens": 2}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "name": 'a"'}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": "often"}, "tool_choice"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"content": "hi"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].file_id",
        ),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [CALL]}, "input[0]"),
        ({"input": [CALL, CALL, RESULT]}, "input[0]"),
        ({"input": [{"role": "user", "content": "hi"}, RESULT]}, "input[1].call_id"),
        ({"input": []}, "input"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_path(fields: dict[str, Any], param: str) -> None:
    paths: list[str] = []
    with pytest.raises(ApiError) as caught:
        try:
            chat, paths = chat_of(**{"input": "hi", **fields})
            Conversation.of(chat.messages)
        except ApiError as error:
            raise translated(error, paths, NAMES) from None
    assert (caught.value.status, caught.value.param) == (400, param)


def test_errors_of_the_chat_name_the_fields_of_the_body() -> None:
    error = ApiError(400, "no $.response_format.json_schema.schema.x", param="tools[0].function.parameters.x")
    renamed = translated(error, ["input[0]"], NAMES)
    assert (renamed.message, renamed.param) == ("no $.text.format.schema.x", "tools[0].parameters.x")
    for param, name in (
        ("messages", "input"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("tool_choice.allowed_tools.tools[1].function.name", "tool_choice.tools[1].name"),
    ):
        renamed = translated(ApiError(400, f"no tool at $.{param}", param=param), ["input[0]"], NAMES)
        assert (renamed.message, renamed.param) == (f"no tool at $.{name}", name)
