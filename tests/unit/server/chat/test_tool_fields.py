"""Tools in a request, calls and results in its conversation."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("starlette")

from penstock.server.chat.request_schema import ChatRequest, Conversation, TokenizeRequest, decoded
from penstock.server.chat.tool_fields import MAX_TOOLS, ToolUse, tool_use
from penstock.server.errors import ApiError

USER = {"role": "user", "content": "hi"}


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def call(call_id: str, arguments: Any = "{}", name: str = "f") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*items: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(items), **fields}


def result(call_id: str | None, content: str = "ok", **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id, **fields}


def use_of(**fields: Any) -> ToolUse | None:
    chat = decoded(json.dumps({"messages": [USER], **fields}).encode(), ChatRequest)
    return tool_use(chat.tools, chat.tool_choice, chat.parallel_tool_calls)


def conversation(*messages: dict[str, Any]) -> Conversation:
    return Conversation.of(decoded(json.dumps({"messages": [USER, *messages]}).encode(), ChatRequest).messages)


@pytest.mark.parametrize(
    ("choice", "allowed", "is_forced", "is_parallel"),
    [
        (None, "fg", False, True),
        ("auto", "fg", False, True),
        ("none", "", False, True),
        ("required", "fg", True, True),
        (tool("g"), "g", True, False),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("f")]}}, "f", False, True),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("f")]}}, "f", True, True),
    ],
)
def test_tool_choice_says_what_may_be_called(choice: Any, allowed: str, is_forced: bool, is_parallel: bool) -> None:
    use = use_of(tools=[tool("f"), tool("g")], tool_choice=choice)
    assert use is not None
    assert (use.allowed, use.is_forced, use.is_parallel) == (set(allowed), is_forced, is_parallel)


def test_grammar_is_needed_where_the_model_alone_could_err() -> None:
    both = [tool("f"), tool("g")]
    some = {"type": "allowed_tools", "allowed_tools": {"tools": [tool("f")]}}
    for fields, needed in (
        ({}, False),
        ({"tool_choice": "none", "parallel_tool_calls": False}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": some}, True),
        ({"parallel_tool_calls": False}, True),
        ({"tools": [tool("f"), tool("g", strict=True)]}, True),
        ({"tools": [tool("f"), tool("g", strict=True)], "tool_choice": "none"}, False),
    ):
        use = use_of(**{"tools": both, **fields})
        assert use is not None and use.needs_grammar == needed, fields
    assert use_of() is None and use_of(tools=[], tool_choice="auto") is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [tool('a"b')]}, "tools[0].function.name"),
        ({"tools": [tool("a\n")]}, "tools[0].function.name"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 129)]}, "tools[0].function.name"),
        ({"tools": [tool(f"f{number}") for number in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [tool("f"), tool("g"), tool("f")]}, "tools[2].function.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [tool("f", parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool("f", parameters={"type": "array"})]}, "tools[0].function.parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": tool("f")}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": tool("g")}, "tool_choice"),
        (
            {"tools": [tool()], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [tool("g")]}}},
            "tool_choice.allowed_tools.tools[0]",
        ),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ],
)
def test_tools_that_make_no_sense_are_refused_with_their_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        use_of(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_templates_get_tools_without_strict() -> None:
    tools = [tool("f", strict=True, description="d", parameters={"type": "object", "properties": {"a": {}}}), tool("g")]
    body = json.dumps({"messages": [USER], "tools": tools}).encode()
    expected = [
        tool("f", description="d", parameters={"type": "object", "properties": {"a": {}}}),
        tool("g", parameters={"type": "object", "properties": {}}),
    ]
    chat = decoded(body, ChatRequest)
    assert Conversation.of(chat.messages, chat.tools).tools == expected
    tokenize = decoded(body, TokenizeRequest).content()
    assert isinstance(tokenize, Conversation) and tokenize.tools == expected


def test_history_has_calls_results_and_reasoning() -> None:
    messages = conversation(
        calls(call("1", '{"a": 1}'), call("2", "", "g"), reasoning_content="hm"),
        result("1", "one"),
        result("2", "two", name="other"),
        {"role": "assistant", "content": "done", "tool_calls": []},
    ).messages
    assert messages == [
        USER,
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "reasoning": "hm",
            "thinking": "hm",
            "tool_calls": [call("1", '{"a": 1}'), call("2", "{}", "g")],
        },
        {"role": "tool", "content": "one", "tool_call_id": "1", "name": "f"},
        {"role": "tool", "content": "two", "tool_call_id": "2", "name": "other"},
        {"role": "assistant", "content": "done"},
    ]


def test_results_are_in_the_order_of_their_calls() -> None:
    messages = conversation(
        *(calls(call("1"), call("2"), call("3")), result("3"), result("1"), result("2")),
        *(calls(call("2"), call("1")), result("1"), result("2")),
        USER,
    ).messages
    assert [message.get("tool_call_id") for message in messages] == [
        *(None, None, "1", "2", "3"),
        *(None, "2", "1", None),
    ]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([calls(call("1"))], "messages[1].tool_calls[0]"),
        ([calls(call("1"), call("2")), result("1"), USER], "messages[1].tool_calls[1]"),
        ([result("1")], "messages[1].tool_call_id"),
        ([calls(call("1")), result("2")], "messages[2].tool_call_id"),
        ([calls(call("1")), result("1"), result("1")], "messages[3].tool_call_id"),
        ([calls(call("1")), result(None)], "messages[2].tool_call_id"),
        ([calls(call("1"), call("1")), result("1")], "messages[1].tool_calls[1].id"),
        ([calls(call("")), result("1")], "messages[1].tool_calls[0].id"),
        ([calls(call("1", [1]))], "messages[1].tool_calls[0].function.arguments"),
        ([{**USER, "tool_calls": [call("1")]}], "messages[1].tool_calls"),
        ([{**USER, "function_call": {"name": "f"}}], "messages[1].function_call"),
    ],
)
def test_history_that_makes_no_sense_is_refused_with_its_field(messages: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        conversation(*messages)
    assert (caught.value.status, caught.value.param) == (400, param)


NAMES = st.sampled_from(["f", "g", "", "a b", "x\n", "\u00e9"]) | st.text(max_size=4)
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=4), st.lists, max_leaves=4)
OBJECTS = st.dictionaries(st.sampled_from(["type", "properties", "a"]), JSON, max_size=3)
FUNCTIONS = st.fixed_dictionaries({"name": NAMES}, optional={"parameters": OBJECTS | JSON, "strict": JSON})
TOOLS = st.fixed_dictionaries({"function": FUNCTIONS | JSON}, optional={"type": st.just("function") | JSON})
CHOICES = st.sampled_from(["auto", "none", "required"]) | NAMES.map(tool) | JSON
IDS = st.sampled_from(["1", "2", "3"]) | JSON
CALLS = st.builds(call, IDS, st.sampled_from(["{}", "[", ""]) | JSON, NAMES)
HISTORY = st.lists(
    st.one_of(
        st.builds(lambda items: calls(*items), st.lists(CALLS, max_size=3)),
        st.builds(result, IDS),
        st.just(USER),
        st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "assistant"])}, optional={"tool_calls": JSON}),
    ),
    max_size=6,
)


@given(st.lists(TOOLS, max_size=3), CHOICES, HISTORY)
def test_any_tools_and_history_are_taken_or_refused_with_400(tools: Any, choice: Any, history: Any) -> None:
    body = json.dumps({"messages": [USER, *history], "tools": tools, "tool_choice": choice}).encode()
    try:
        chat = decoded(body, ChatRequest)
        tool_use(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
        messages = Conversation.of(chat.messages, chat.tools).messages
    except ApiError as error:
        assert error.status == 400 and error.param is not None
    else:
        assert len(messages) == len(history) + 1
