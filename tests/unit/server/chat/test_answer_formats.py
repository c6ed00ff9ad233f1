"""Which format the answers of a model have, and which grammar an answer follows."""

import json
from typing import Any

import pytest

pytest.importorskip("starlette")

from penstock.engine.protocol.messages import AnswerFormat
from penstock.engine.text.grammar_fields import CallRules, GrammarSource
from penstock.server.chat.answer_formats import AnswerFormats, format_of_template, types_of
from penstock.server.chat.request_schema import ChatRequest, decoded
from penstock.server.chat.tool_fields import ToolUse, tool_use
from penstock.server.errors import ApiError
from penstock.server.options import ServerOptions
from tests.unit.server.chat.test_tool_fields import USER, tool

SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


def formats(template: str = "<tool_call>", **options: Any) -> AnswerFormats:
    return AnswerFormats(ServerOptions(**options), template, None)


def chat(**fields: Any) -> tuple[ChatRequest, ToolUse | None]:
    result = decoded(json.dumps({"messages": [USER], **fields}).encode(), ChatRequest)
    return result, tool_use(result.tools, result.tool_choice, result.parallel_tool_calls)


def source_of(**fields: Any) -> GrammarSource | None:
    request, use = chat(**fields)
    params = request.sampling()
    return request.answer_grammar(params) if use is None else formats().grammar_source(request, use, params)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("return a json object within <tool_call></tool_call> XML tags", "hermes"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=a>", "qwen3_xml"),
        ("{{- '[TOOL_CALLS] [' }}", "mistral"),
        ('Respond in the format {"name": function name, "parameters": dictionary', "llama3_json"),
        ("{{- '\"parameters\": ' }}{{- tool_call.arguments | tojson }}", "llama3_json"),
        ("[func_name1(params_name1=params_value1), func_name2(params)]", "pythonic"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "openai"),
        ("{{ messages }}", None),
    ],
)
def test_format_of_calls_is_read_from_the_template(template: str, name: str | None) -> None:
    assert format_of_template(template) == name
    assert formats(template).tools == (name or "hermes")
    assert formats(template, tool_call_parser="pythonic").tools == ("openai" if name == "openai" else "pythonic")
    assert (formats(template).reasoning == "openai_gptoss") == (name == "openai")


def test_unknown_parser_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match="auto, hermes, llama3_json, mistral, openai, pythonic or qwen3_xml, got 'x'"):
        ServerOptions(tool_call_parser="x")
    with pytest.raises(ValueError, match="none, deepseek_r1, mistral, openai_gptoss, qwen3 or seed_oss, got 'x'"):
        ServerOptions(reasoning_parser="x")


def test_answers_have_a_format_if_they_may_have_calls_or_reasoning() -> None:
    _, use = chat(tools=[tool()])
    _, none = chat(tools=[tool()], tool_choice="none")
    answer = formats().answer_format(use, "")
    assert (answer.tools, answer.reasoning) == ("hermes", None)
    assert not answer.forced
    _, named = chat(tools=[tool()], tool_choice={"type": "function", "function": {"name": tool()["function"]["name"]}})
    forced = formats().answer_format(named, "")
    assert forced.forced == (tool()["function"]["name"],)
    other = formats().answer_format(use, "")
    assert other.call_ids != answer.call_ids
    thinking = formats(reasoning_parser="qwen3")
    assert thinking.answer_format(none, "<think>\n") == AnswerFormat(reasoning="qwen3", in_reasoning=True)
    assert thinking.answer_format(None, "x") == AnswerFormat(reasoning="qwen3")


def test_grammar_is_of_the_calls_of_the_content_or_of_both() -> None:
    for fields, kind, has_content in (
        ({}, None, False),
        ({"tools": [tool()]}, None, False),
        ({"tools": [tool()], "tool_choice": "required"}, "tool_calls", False),
        ({"tools": [tool()], "regex": "a"}, "regex", False),
        ({"tools": [tool()], "response_format": SCHEMA}, "tool_calls", True),
        ({"tools": [tool()], "tool_choice": "none", "response_format": SCHEMA}, "json_schema", False),
        ({"tools": [tool()], "tool_choice": "required", "response_format": SCHEMA}, "tool_calls", False),
    ):
        source = source_of(**fields)
        assert (None if source is None else source.kind) == kind, fields
        if source is not None and kind == "tool_calls":
            assert isinstance(source.value, CallRules) and (source.value.content is not None) == has_content


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "regex": "a"}, "tool_choice"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"parallel_tool_calls": False, "min_tokens": 3}, "min_tokens"),
    ],
)
def test_fields_without_meaning_beside_forced_calls_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        source_of(tools=[tool()], **fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_types_of_parameters_tell_text_from_json() -> None:
    properties = {
        "a": {"type": "string"},
        "b": {"type": "integer"},
        "c": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "d": {"enum": ["x", "y"]},
        "e": {"enum": ["x", 1]},
        "f": True,
        "g": {"type": ["string", "null"]},
    }
    _, use = chat(tools=[tool("t", parameters={"properties": properties}), tool("u")])
    assert use is not None
    expected = {"a": "string", "b": "integer", "d": "string", **dict.fromkeys("cefg", "any")}
    assert types_of(use.tools) == {"t": expected, "u": {}}
    answer = formats("<function=").answer_format(use, "")
    assert answer.types["t"] == expected
