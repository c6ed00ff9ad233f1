"""Texts of models, cut anywhere, give the pieces of the whole text, in each format."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.engine.protocol.answer_format import REASONING_MARKS, TOOL_FORMATS, AnswerFormat
from penstock.engine.text.answer_parser import (
    AnswerParser,
    Arguments,
    Content,
    ParsedAnswer,
    Piece,
    Reasoning,
    Run,
    join_pieces,
    parse_answer,
)
from penstock.engine.text.detokenizer import char_bloom
from tests import tiers

KINDS = {Run.CONTENT: Content, Run.REASONING: Reasoning}
TYPES = {"f": {"n": "integer", "s": "string", "o": "object", "b": "boolean"}}
PARTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>"),
        *("<|channel|>", "<|message|>", "<|start|>assistant", "<|end|>", " to=f", "analysis", "<|"),
        *(
            "</think>",
            "</",
            "<",
            "[",
            "]",
            "{",
            "}",
            "(",
            ")",
            '"',
            "'",
            "\\",
            "\n",
            " ",
            ",",
            ":",
            "=",
            ";",
            "é",
            "😀",
        ),
        *(
            '{"name": "f", "arguments": {',
            '{"arguments": {"a": "',
            '"}, "name": "g"}',
            '"name"',
            '"parameters": ',
            "}}",
        ),
        *("<function=f>", "<parameter=n>", "<parameter=s>\n", "\n</parameter>", "</parameter>", "</function>"),
        *(
            "f(",
            "[f(a=",
            "True",
            "-1.5e3",
            "\\u00e9",
            "\\x4",
            "\\n",
            '"x": [1, {"y": null}]',
            "7",
            "word",
            "A\t\x01",
            "None",
        ),
    ]
)
TEXTS = st.one_of(st.lists(PARTS, max_size=14).map("".join), st.text(max_size=20))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.from_regex("[a-z]{1,4}", fullmatch=True), JSON, max_size=3)
CALLS = st.lists(st.tuples(st.from_regex("[a-z]{1,6}", fullmatch=True), ARGUMENTS), min_size=1, max_size=3)
FORMATS = st.builds(
    AnswerFormat,
    st.sampled_from([None, *TOOL_FORMATS]),
    st.sampled_from([None, *REASONING_MARKS]),
    st.booleans(),
    types=st.just(TYPES),
    forced=st.sampled_from([(), ("f",), ("f", "g")]),
)


def fed(parser: AnswerParser, text: str) -> list[Piece]:
    """Feeds a text; a text that need not be read is not fed."""
    if parser.run == Run.UNKNOWN or parser.firsts & char_bloom(text):
        return parser.feed(text)
    return [Arguments(parser.calls - 1, text) if parser.run == Run.ARGUMENTS else KINDS[parser.run](text)]


@settings(max_examples=tiers.STOPS_EXAMPLES, deadline=None)
@given(FORMATS, TEXTS, st.lists(st.integers(1, 40), max_size=60))
@example(AnswerFormat("qwen3_xml"), "<tool_call><function=f></tool_call>", [22])
@example(AnswerFormat("hermes"), '<tool_call>{"name": "f", "arguments": "\\"', [40])
@example(AnswerFormat("qwen3_xml"), "<tool_call><function=f><parameter=s>a\x01\u00e9", [37])
@example(AnswerFormat("hermes"), f'<tool_call>{{"name": "{"x" * 300}"', [9] * 40)
def test_answer_is_equal_however_its_text_is_cut(answer_format: AnswerFormat, text: str, cuts: list[int]) -> None:
    parser, pieces, at = AnswerParser(answer_format), [], 0
    for length in [*cuts, len(text)]:
        pieces += fed(parser, text[at : at + length])
        at += length
        expected = AnswerParser(answer_format)
        assert join_pieces(pieces) == join_pieces(expected.feed(text[:at])), "what is certain is a function of the text"
        assert (parser.run, parser.is_reasoning) == (expected.run, expected.is_reasoning)
    pieces += parser.finish()
    assert join_pieces(pieces) == parse_answer(answer_format, text)


def written(tools: str, calls: list[tuple[str, dict[str, object]]]) -> str:
    """Writes calls as a model does."""
    objects = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    if tools == "hermes":
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in objects)
    if tools == "mistral":
        return f"[TOOL_CALLS] [{', '.join(objects)}]"
    if tools == "openai":
        headers = [f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>" for name, _ in calls]
        messages = [f"{header}{json.dumps(items)}" for header, (_, items) in zip(headers, calls, strict=True)]
        return "<|call|><|start|>assistant".join(messages)
    if tools == "llama3_json":
        return "; ".join(objects)
    if tools == "pythonic":
        names = [f"{name}({', '.join(f'{key}={value!r}' for key, value in items.items())})" for name, items in calls]
        return f"[{', '.join(names)}]"
    return "".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{json.dumps(value)}\n</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


@pytest.mark.parametrize("tools", TOOL_FORMATS)
@settings(max_examples=tiers.STOPS_EXAMPLES // 4, deadline=None)
@given(CALLS, st.sampled_from(["", "I look.\n"]))
def test_calls_as_models_write_them_are_read(
    tools: str, calls: list[tuple[str, dict[str, object]]], content: str
) -> None:
    types = {name: dict.fromkeys(arguments, "object") for name, arguments in calls}
    content = content if tools in ("hermes", "mistral", "qwen3_xml") else ""
    answer = parse_answer(AnswerFormat(tools, types=types, call_ids="r"), content + written(tools, calls))
    assert answer.content == content
    assert [call.name for call in answer.calls] == [name for name, _ in calls]
    assert len({call.id for call in answer.calls}) == len(calls)
    for call, (name, arguments) in zip(answer.calls, calls):
        if tools != "qwen3_xml" or types[name].keys() == arguments.keys():  # a tool of two calls has the types of one
            assert json.loads(call.arguments) == arguments


def test_parsed_answer_of_a_plain_text_is_its_content() -> None:
    assert parse_answer(AnswerFormat(), "a <tool_call> b") == ParsedAnswer("a <tool_call> b", "", [])
