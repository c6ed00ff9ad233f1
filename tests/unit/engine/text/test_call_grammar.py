"""Grammars of tool calls: what an answer may be in each format, and what it may not be."""

import json
import random
from typing import Any

import pytest

pytest.importorskip("llguidance")

from llguidance import LLTokenizer

from penstock.engine.protocol.answer_format import TOOL_FORMATS, AnswerFormat
from penstock.engine.text import grammar as grammar_module
from penstock.engine.text.answer_parser import parse_answer
from penstock.engine.text.grammar import (
    ANY_OBJECT,
    build_grammar,
    byte_tokenizer,
    check_grammar,
    compile_grammar,
    grammar_behind_reasoning,
    relaxed_calls,
)
from penstock.engine.text.grammar_fields import (
    CallRules,
    FunctionDefinition,
    Grammar,
    GrammarError,
    GrammarSource,
    Tool,
)

SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "</think>"]
MARKS = {"[TOOL_CALLS]": 257, "[ARGS]": 258}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "is_metric": {"type": "boolean"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = (Tool(FunctionDefinition("weather", parameters=CITY)), Tool(FunctionDefinition("time")))


def rules(format_name: str, **fields: Any) -> CallRules:
    defaults: dict[str, Any] = {"allowed": frozenset(("weather", "time")), "is_forced": True, "is_parallel": True}
    return CallRules(format=format_name, **{"tools": TOOLS, **defaults, **fields})


def grammar_of(call_rules: CallRules) -> Grammar:
    source = GrammarSource("tool_calls", call_rules, "tools")
    grammar = build_grammar(source)
    check_grammar(tokenizer(), grammar, source)
    return grammar


def tokenizer() -> LLTokenizer:
    return byte_tokenizer(SPECIAL)


def ids_of(text: str, special: bool = False) -> list[int]:
    """Returns an id for each byte, and with `special` for each special token."""
    for number, mark in enumerate(SPECIAL):
        before, partition, after = text.partition(mark)
        if special and partition:
            return [*ids_of(before, True), 257 + number, *ids_of(after, True)]
    return list(text.encode())


def accepts(grammar: Grammar, text: str, special: bool = False) -> bool:
    matcher = compile_grammar(tokenizer(), grammar.text)
    ids = ids_of(text, special)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


XML = "<tool_call>\n<function=weather>\n<parameter=city>\nRio </b\n</parameter>\n</function>\n</tool_call>"
# In each format, with other fields of the rules: a call, two calls, and answers that are no calls.
FORCED = {
    "hermes": (
        {},
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rio", "days": 2}}\n</tool_call>',
        '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rio"}}\n</tool_call>',
        ['<tool_call>\n{"name": "weather", "arguments": {"days": 2}}\n</tool_call>'],
    ),
    "qwen3_xml": (
        {},
        XML,
        f"{XML}\n{XML}",
        [XML.replace("city", "town"), XML.replace("</b", "</parameter> and"), XML.replace("Rio", "<parameter=a>")],
    ),
    "llama3_json": (
        {},
        '{"name": "weather", "parameters": {"city": "Rio"}}',
        None,
        ['{"name": "x", "parameters": {}}'],
    ),
    "mistral": (
        {"marks": MARKS},
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rio"}}]',
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rio"}}, {"name": "time", "arguments": {}}]',
        ["[TOOL_CALLS][]"],
    ),
    "mistral, named": (
        {"marks": MARKS, "has_named_calls": True},
        '[TOOL_CALLS]weather[ARGS]{"city": "Rio"}',
        '[TOOL_CALLS]weather[ARGS]{"city": "Rio"}[TOOL_CALLS]time[ARGS]{}',
        ["[TOOL_CALLS]weather[ARGS]{}"],
    ),
    "pythonic": (
        {},
        '[weather(city="Rio", is_metric=True)]',
        '[weather(city="Rio", days=2), weather(city="x")]',
        ['[weather(days=2, city="Rio")]', "[weather()]", '[weather(city="Rio", is_metric=true)]'],
    ),
}


@pytest.mark.parametrize("name", FORCED)
def test_forced_answer_is_calls_of_the_format(name: str) -> None:
    fields, single, double, wrong = FORCED[name]
    format_name = name.partition(",")[0]
    parallel = grammar_of(rules(format_name, **fields))
    alone = grammar_of(rules(format_name, is_parallel=False, **fields))
    is_special = "marks" in fields
    for grammar in (parallel, alone):
        assert accepts(grammar, single, is_special)
        for text in ("", "hello", f"x{single}", *wrong):
            assert not accepts(grammar, text, is_special), text
    if double is not None:
        assert accepts(parallel, double, is_special) and not accepts(alone, double, is_special)
    time_only = grammar_of(rules(format_name, allowed=frozenset(("time",)), **fields))
    assert not accepts(time_only, single, is_special)


def test_call_of_a_tool_without_parameters_has_no_arguments() -> None:
    """As OpenAI defines such a tool. One with an empty schema has any."""
    for parameters, has_any in ((None, False), ({}, True)):
        tool = Tool(FunctionDefinition("time", parameters=parameters))
        grammar = grammar_of(rules("hermes", tools=(tool,), allowed=frozenset(("time",))))
        call = '<tool_call>\n{"name": "time", "arguments": {%s}}\n</tool_call>'
        assert accepts(grammar, call % "") and accepts(grammar, call % '"a": 1') == has_any


@pytest.mark.parametrize("name", FORCED)
def test_free_answer_is_text_and_calls_from_the_mark_on(name: str) -> None:
    fields, single, double, wrong = FORCED[name]
    format_name, is_special = name.partition(",")[0], "marks" in fields
    grammar = grammar_of(rules(format_name, is_forced=False, **fields))
    for text in ("", "hello", "a < b\n", single, double or single):
        assert accepts(grammar, text, is_special), text
    for text in wrong:
        assert not accepts(grammar, text, is_special), text
    has_mark = format_name not in ("llama3_json", "pythonic")
    assert accepts(grammar, f"Look: {single}", is_special)
    alone = grammar_of(rules(format_name, is_forced=False, is_parallel=False, **fields))
    assert accepts(alone, single, is_special)
    if has_mark and double is not None:
        assert not accepts(alone, double, is_special)


def test_content_beside_free_calls_follows_its_own_grammar() -> None:
    content = GrammarSource("json_schema", {"type": "boolean"}, "response_format")
    for name, (fields, single, _, _) in FORCED.items():
        grammar = grammar_of(rules(name.partition(",")[0], is_forced=False, content=content, **fields))
        assert accepts(grammar, "true") and accepts(grammar, single, "marks" in fields)
        assert not accepts(grammar, "hello") and not accepts(grammar, f"true{single}", "marks" in fields)


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("marks", [{}, {"</think>": 259}])
def test_grammar_begins_behind_the_reasoning(is_open: bool, marks: dict[str, int]) -> None:
    regex = build_grammar(GrammarSource("regex", "[0-9]+", "regex"))
    for grammar, text in ((regex, "12"), (grammar_of(rules("hermes")), FORCED["hermes"][1])):
        behind = grammar_behind_reasoning(grammar, "qwen3", is_open, marks)
        opening = "" if is_open else "<think>"
        assert behind.key != grammar.key
        assert accepts(behind, f"{opening}so <tool_call> {{</think>{text}", bool(marks))
        assert not accepts(behind, f"{opening}so</think>\n{text}", bool(marks))
        assert accepts(behind, text) == (not is_open)
        assert not accepts(behind, f"{opening}so</think>{text} and", bool(marks))


CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
FINAL = "<|channel|>final<|message|>"


def test_answer_in_channels_is_a_call_or_final() -> None:
    call = f'{CALL}{{"city": "Rio"}}'
    forced, free = grammar_of(rules("openai")), grammar_of(rules("openai", is_forced=False))
    for grammar in (forced, free):
        assert accepts(grammar, call) and not accepts(grammar, f'{CALL}{{"town": "Rio"}}')
        assert not accepts(grammar, "hello") and not accepts(grammar, call.replace("weather", "snow"))
    assert accepts(free, f"{FINAL}hello") and not accepts(forced, f"{FINAL}hello")


@pytest.mark.parametrize("is_open", [True, False])
def test_grammar_begins_in_the_channel_final(is_open: bool) -> None:
    thought = f"{'' if is_open else '<|channel|>analysis<|message|>'}so<|end|><|start|>assistant"
    regex = build_grammar(GrammarSource("regex", "[0-9]+", "regex"))
    for grammar, text in ((regex, f"{FINAL}12"), (grammar_of(rules("openai")), f'{CALL}{{"city": "Rio"}}')):
        behind = grammar_behind_reasoning(grammar, "openai_gptoss", is_open, {})
        assert accepts(behind, thought + text) and accepts(behind, text) == (not is_open)
        assert not accepts(behind, f"{thought}12")


@pytest.mark.parametrize("format_name", TOOL_FORMATS)
def test_unsupported_keyword_is_refused_if_strict(format_name: str) -> None:
    unsupported = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for is_strict in (True, False):
        tools = (*TOOLS, Tool(FunctionDefinition("f", parameters=unsupported, strict=is_strict)))
        call_rules = rules(format_name, tools=tools, allowed=frozenset(("weather", "f")))
        with pytest.raises(GrammarError):
            grammar_of(call_rules)
        if not is_strict:
            relaxed = relaxed_calls(tokenizer(), call_rules)
            assert relaxed.tools[:2] == TOOLS and relaxed.tools[2].function.parameters == ANY_OBJECT
            grammar_of(relaxed)
            continue
        with pytest.raises(GrammarError) as caught:
            relaxed_calls(tokenizer(), call_rules)
        assert caught.value.param == "tools[2].function.parameters.properties.a.uniqueItems"


def test_of_many_hostile_schemas_a_few_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    check = grammar_module.check_grammar
    monkeypatch.setattr(grammar_module, "check_grammar", lambda *words: checked.append(words[2].param) or check(*words))
    hostile = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = tuple(Tool(FunctionDefinition(f"f{number}", parameters=hostile)) for number in range(100))
    names = frozenset(tool.function.name for tool in tools)
    relaxed = relaxed_calls(tokenizer(), rules("hermes", tools=tools, allowed=names))
    assert len(checked) == grammar_module.MAX_RELAXED
    assert all(tool.function.parameters == ANY_OBJECT for tool in relaxed.tools)


def test_grammar_of_an_unsupported_format_is_refused() -> None:
    pattern = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}
    tool = Tool(FunctionDefinition("f", parameters=pattern, strict=True))
    with pytest.raises(GrammarError) as caught:
        grammar_of(rules("qwen3_xml", tools=(tool,), allowed=frozenset("f")))
    assert caught.value.param == "tools[0].function.parameters.properties.a.maxLength"
    grammar_of(rules("hermes", tools=(tool,), allowed=frozenset("f")))
    dashed = Tool(FunctionDefinition("f-g"))
    with pytest.raises(GrammarError, match="Python name"):
        grammar_of(rules("pythonic", tools=(dashed,), allowed=frozenset(("f-g",))))


def random_answer(grammar: Grammar, seed: int) -> tuple[str, bool]:
    """Returns an answer of random bytes that the grammar allows, and whether the answer has an end."""
    chance = random.Random(seed)
    matcher = compile_grammar(tokenizer(), grammar.text)
    ids: list[int] = []
    while len(ids) < 1500:
        bits = matcher.compute_bitmask()
        allowed = [token for token in range(257 + len(SPECIAL)) if bits[token // 8] >> token % 8 & 1]
        likely = [token for token in allowed if token >= 256 or chr(token) in ' "}])\n<>/=,']
        token = chance.choice(likely if likely and chance.random() < 0.7 else allowed)
        if token == 256:
            break
        matcher.consume_token(token)
        ids.append(token)
    pieces = (bytes([token]) if token < 256 else SPECIAL[token - 257].encode() for token in ids)
    return b"".join(pieces).decode(errors="ignore"), len(ids) < 1500


@pytest.mark.parametrize("name", FORCED)
def test_parser_reads_what_a_grammar_allows(name: str) -> None:
    fields, format_name = FORCED[name][0], name.partition(",")[0]
    grammar = grammar_of(rules(format_name, **fields))
    types = {"weather": {"city": "string", "days": "integer", "is_metric": "boolean"}}
    answer_format = AnswerFormat(tools=format_name, types=types)
    complete = 0
    for seed in range(40):
        answer, is_complete = random_answer(grammar, seed)
        content, _, calls = parse_answer(answer_format, answer)
        assert content.strip() == "" and calls, answer
        for call in calls if is_complete else calls[:-1]:
            assert call.name in ("weather", "time"), answer
            arguments = json.loads(call.arguments)
            if call.name == "weather":
                assert isinstance(arguments.pop("city"), str), answer
                assert all(
                    type(arguments.pop(key, kind())) is kind for key, kind in (("days", int), ("is_metric", bool))
                )
                assert arguments == {}, answer
        complete += is_complete
    assert complete > 10
