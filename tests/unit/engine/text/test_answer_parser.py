"""What each format reads, and what becomes of texts that are nearly calls."""

import json
from typing import Any

import pytest

from penstock.engine.protocol.answer_format import AnswerFormat, begins_in_reasoning
from penstock.engine.text.answer_parser import AnswerParser, Arguments, CallBegins, Content, ParsedAnswer, parse_answer

COMMENTARY, FINAL = "<|channel|>commentary", "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
TYPES = {"f": {"n": "integer", "o": "object", "b": "boolean", "s": "string"}}


def parsed(tools: str | None, text: str, reasoning: str | None = None, **options: Any) -> ParsedAnswer:
    return parse_answer(AnswerFormat(tools, reasoning, types=TYPES, **options), text)


def calls(tools: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    """Returns the content, and the name and the arguments of each call."""
    answer = parsed(tools, text)
    return answer.content, [(call.name, call.arguments) for call in answer.calls]


@pytest.mark.parametrize(
    ("tools", "text", "content", "expected"),
    [
        (
            "hermes",
            'Hi\n<tool_call>\n{"name": "f", "arguments": {"a":  1}}\n</tool_call>',
            "Hi\n",
            [("f", '{"a":  1}')],
        ),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
        ("hermes", '\n\n<tool_call>{"name": "f"}</tool_call>\n', "", [("f", "{}")]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}',
            "",
            [("f", '{"a": "</tool_call>"}')],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}}</tool_call> b', " b", [("f", "{}")]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g"}]', "", [("f", "{}"), ("g", "{}")]),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": [1]}[TOOL_CALLS]g{"b": 2}', "", [("f", '{"a": [1]}'), ("g", '{"b": 2}')]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ("llama3_json", '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        (
            "llama3_json",
            '{"name": "f", "parameters": {}}; {"name": "g", "arguments": {}}',
            "",
            [("f", "{}"), ("g", "{}")],
        ),
        ("pythonic", "[f(a=1, b='x'), g()]", "", [("f", '{"a": 1, "b": "x"}'), ("g", "{}")]),
        ("pythonic", "[f(a=[True, None, {'k': -1.5}], )]", "", [("f", '{"a": [true, null, {"k": -1.5}]}')]),
        ("pythonic", r"[f(a='\x41\u00e9\'\n')]", "", [("f", r'{"a": "\u0041\u00e9' + r"'\n" + '"}')]),
        ("qwen3_xml", "<tool_call>\n<function=f>\n</function>\n</tool_call>", "", [("f", "{}")]),
        ("openai", f'{COMMENTARY} to=functions.f <|constrain|>json<|message|>{{"a": 1}}', "", [("f", '{"a": 1}')]),
        ("openai", f' to=functions.f{COMMENTARY} json<|message|>{{"a": "<"}}<|call|>', "", [("f", '{"a": "<"}')]),
        (
            "openai",
            f"{COMMENTARY}<|message|>I look.<|end|><|start|>assistant to=f{COMMENTARY}<|message|>{{}}<|call|>",
            "I look.",
            [("f", "{}")],
        ),
    ],
)
def test_calls_are_read(tools: str, text: str, content: str, expected: list[tuple[str, str]]) -> None:
    assert calls(tools, text) == (content, expected)


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", "a <tool_cal"),
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call>no JSON</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5}'),
        ("hermes", f'<tool_call>{{"name": "{"x" * 300}"}}'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS]just words"),
        ("llama3_json", '{"name": "Bob", "age": 3}'),
        ("llama3_json", '{"name": "Bob"}'),
        ("llama3_json", '  Look: {"name": "f", "parameters": {}}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("pythonic", "[1] says"),
        ("pythonic", "[link](url) [f(a=1)]"),
        ("pythonic", "[f(1)]"),
        ("qwen3_xml", '<tool_call>{"name": "f"}</tool_call>'),
        ("qwen3_xml", "<tool_call>\n<function=f"),
    ],
)
def test_text_that_is_no_call_is_content(tools: str, text: str) -> None:
    assert calls(tools, text) == (text, [])


@pytest.mark.parametrize(
    ("tools", "text", "content", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x', "", '{"a": "x'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": {"b": 1}</tool_call> c', " c", '{"a": {"b": 1}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "text"}</tool_call>', "", '"text"'),
        ("pythonic", "[f(a=1, b=word)]", "", '{"a": 1, "b": '),
        ("pythonic", "[f(a='x", "", '{"a": "x'),
        ("qwen3_xml", "<tool_call><function=f><parameter=s>\nx\n</parameter><parameter=n>\n5", "", '{"s": "x", "n": '),
        ("qwen3_xml", "<tool_call><function=f><parameter=s>\nx", "", '{"s": "x'),
    ],
)
def test_broken_arguments_are_passed_on(tools: str, text: str, content: str, arguments: str) -> None:
    answer = parsed(tools, text)
    assert [call.arguments for call in answer.calls] == [arguments]
    assert answer.content == content


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("s", '\n  a\n\n"b"<c>\\\n', '  a\n\n"b"<c>\\'),
        ("unknown", "5", "5"),
        ("n", "\n5\n", 5),
        ("n", "five", "five"),
        ("n", "None", None),
        ("b", "True", True),
        ("o", '{"a": [1]}', {"a": [1]}),
        ("o", "{'a': (1, None)}", {"a": [1, None]}),
        ("o", "'\\ud800'", "'\\ud800'"),
        ("o", "-" * 9000, "-" * 9000),
    ],
)
def test_parameters_of_xml_have_their_types(parameter: str, text: str, value: object) -> None:
    answer = parsed(
        "qwen3_xml", f"<tool_call><function=f><parameter={parameter}>{text}</parameter></function></tool_call>"
    )
    assert json.loads(answer.calls[0].arguments) == {parameter: value}


@pytest.mark.parametrize(
    ("reasoning", "begins", "text", "expected"),
    [
        ("qwen3", False, "<think>\na\n</think>\n\nb", ("\n\nb", "\na\n")),
        ("qwen3", False, "a <think>b</think>", ("a <think>b</think>", "")),
        ("qwen3", True, "a</think>b", ("b", "a")),
        ("qwen3", True, "<think>a</think>b", ("b", "a")),
        ("qwen3", True, "a</thin", ("", "a</thin")),
        ("mistral", False, "[THINK]a[/THINK]b", ("b", "a")),
        ("seed_oss", False, "<seed:think>a</seed:think>b", ("b", "a")),
    ],
)
def test_reasoning_is_read(reasoning: str, begins: bool, text: str, expected: tuple[str, str]) -> None:
    answer = parsed(None, text, reasoning, in_reasoning=begins)
    assert (answer.content, answer.reasoning) == expected


def test_call_in_reasoning_is_reasoning() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    answer = parsed("hermes", f"<think>{call}</think>\n\n{call}", "qwen3")
    assert (answer.content, answer.reasoning, len(answer.calls)) == ("", call, 1)


def test_answer_begins_in_reasoning_where_the_prompt_opens_it() -> None:
    assert begins_in_reasoning("qwen3", "user\nassistant\n<think>\n")
    assert not begins_in_reasoning("qwen3", "<think>\n\n</think>\n\n")
    assert begins_in_reasoning("deepseek_r1", "assistant\n")
    for reasoning in ("deepseek_r1", "qwen3"):  # the answer continues a message, which has begun with content
        assert not begins_in_reasoning(reasoning, "It is", is_continued=True)
        assert not begins_in_reasoning(reasoning, "<think>a</think>It is", is_continued=True)
        assert begins_in_reasoning(reasoning, "<think>It is", is_continued=True)
    assert begins_in_reasoning("deepseek_r1", "", is_continued=True)


def test_ids_of_calls_belong_to_request_sample_and_index() -> None:
    text = "[TOOL_CALLS]" + json.dumps([{"name": "f", "arguments": {}}] * 2)
    formats = [AnswerFormat(tools="mistral", call_ids=request) for request in ("r", "r", "s")]
    ids = [[call.id for call in parse_answer(answer, text, sample).calls] for answer in formats for sample in (0, 1)]
    assert ids[:2] == ids[2:4] and len({call_id for part in ids[2:] for call_id in part}) == 8
    assert all(len(call_id) == 9 and call_id.isalnum() for part in ids for call_id in part)


def test_pieces_come_as_soon_as_they_are_certain() -> None:
    parser = AnswerParser(AnswerFormat("hermes"))
    assert parser.feed("a <") == [Content("a ")]
    assert parser.feed("b>") == [Content("<b>")]
    assert parser.feed('<tool_call>{"name": "f"') == [CallBegins(0, parse_answer(*CALL).calls[0].id, "f")]
    assert parser.feed(', "arguments": {"x') == [Arguments(0, '{"x')]
    assert parser.feed('": 1}}') == [Arguments(0, '": 1}')]
    assert parser.finish() == []


CUT = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', len('<tool_call>{"name": "f"')),
    ("qwen3_xml", "<tool_call>\n<function=f>\n</function>\n</tool_call>", len("<tool_call>\n<function=f>")),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}]', len('[TOOL_CALLS][{"name": "f"')),
    ("llama3_json", '{"name": "f", "parameters": {}}', len('{"name": "f", "parameters":')),
    ("pythonic", "[f()]", len("[f()")),
]


@pytest.mark.parametrize(("tools", "text", "begins"), CUT, ids=[tools for tools, _, _ in CUT])
def test_forced_call_that_is_cut_is_never_content(tools: str, text: str, begins: int) -> None:
    """As by max_tokens. A call of the only function that may be called is a call before its name has come."""
    for length in range(len(text)):
        cut = text[:length]
        answer = parsed(tools, cut, forced=("f",))
        assert (answer.content, [call.name for call in answer.calls]) == ("", ["f"]), cut
        answer = parsed(tools, cut, forced=("f", "g"))
        assert (answer.content, len(answer.calls)) == ("", length >= begins), cut


def test_second_forced_call_that_is_cut_is_not_content() -> None:
    answer = parsed("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_', forced=("f",))
    assert (answer.content, len(answer.calls)) == ("", 1)


def test_reasoning_that_is_cut_calls_nothing_yet() -> None:
    assert parsed("hermes", "<think>So <tool_call>", "qwen3", forced=("f",)) == ParsedAnswer("", "So <tool_call>", [])


CALL = AnswerFormat("hermes"), '<tool_call>{"name": "f"}</tool_call>'


@pytest.mark.parametrize(("field", "value"), [("tools", "hermes2"), ("reasoning", "")])
def test_unknown_format_is_an_error(field: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"expected {field} of"):
        AnswerFormat(**{field: value})


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        (f"{ANALYSIS}So a < b.<|end|><|start|>assistant{FINAL}Yes.<|return|>", "Yes.", "So a < b."),
        (f"{ANALYSIS}One.<|end|><|start|>assistant{ANALYSIS}Two.<|end|><|start|>assistant{FINAL}", "", "One.\nTwo."),
        (f"{FINAL}Yes", "Yes", ""),
        ("Yes", "Yes", ""),
        (" to=5 it goes.", " to=5 it goes.", ""),
        (f"{COMMENTARY} to=functions.f<|message|>{{}}", "{}", ""),  # the request has no tools
        (f"{ANALYSIS}So", "", "So"),
        ("<|channel|>ana", "", ""),
        ("<|start|>assistant", "", ""),
    ],
)
def test_channels_are_content_and_reasoning(text: str, content: str, reasoning: str) -> None:
    assert parsed(None, text, "openai_gptoss") == ParsedAnswer(content, reasoning, [])


def test_message_that_the_prompt_has_begun_is_reasoning() -> None:
    assert begins_in_reasoning("openai_gptoss", f"<|start|>assistant{ANALYSIS}")
    assert not begins_in_reasoning("openai_gptoss", "<|start|>assistant")
    answer = parsed("openai", f"So.<|end|><|start|>assistant{FINAL}Yes", "openai_gptoss", in_reasoning=True)
    assert answer == ParsedAnswer("Yes", "So.", [])
