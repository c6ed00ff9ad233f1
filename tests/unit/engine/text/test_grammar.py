"""From the fields of a request to a grammar's text, and what is refused."""

import json
from typing import Any

import msgspec
import pytest

pytest.importorskip("llguidance")

from penstock.engine.text.grammar import (
    MAX_CHARACTERS,
    build_grammar,
    byte_tokenizer,
    check_grammar,
    compile_grammar,
    find_keyword,
)
from penstock.engine.text.grammar_fields import FIELDS, GrammarError, GrammarFields, GrammarSource
from tests.e2e.schema_cases import HONOURED, REFUSED

TOKENIZER = byte_tokenizer(["<|tool|>"])


def source_of(fields: dict[str, Any]) -> GrammarSource | None:
    return msgspec.convert(fields, GrammarFields).grammar_source()


def accepts(source: GrammarSource | None, text: str) -> bool:
    assert source is not None
    matcher = compile_grammar(TOKENIZER, build_grammar(source).text)
    return matcher.try_consume_tokens([*text.encode()]) == len(text.encode()) and matcher.is_accepting()


def test_each_field_is_a_source_of_its_kind() -> None:
    values = {"choice": ["a"], "json_object": True}
    for path, kind in FIELDS.items():
        outer, _, inner = path.partition(".")
        value = values.get(kind, "{}")
        source = source_of({outer: {inner: value} if inner else value})
        assert source == (kind, value, path)
    assert source_of({}) is None and source_of({"response_format": {"type": "text"}, "regex": ""}) is None


def test_grammar_in_two_fields_is_refused_with_both() -> None:
    with pytest.raises(GrammarError, match="got guided_json and regex") as caught:
        source_of({"guided_json": {}, "regex": "a"})
    assert caught.value.param == "regex"


@pytest.mark.parametrize(
    ("fields", "accepted", "refused"),
    [
        ({"guided_choice": ["a.b", "c\n/d", "é "]}, ["a.b", "c\n/d", "é "], ["axb", "", "a.bc"]),
        ({"guided_regex": "a/b[0-9]{2}"}, ["a/b12"], ["a/b1", "xa/b12"]),
        ({"json_schema": "true"}, ["[1, 2]", '{"a":1}', "null"], ["[1,  2]", "x"]),
        ({"response_format": {"type": "json_object"}}, ['{"a": [1,2]}'], ["[]"]),
        ({"ebnf": 'root ::= "a" | "b" x\nx ::= [0-9]'}, ["a", "b7"], ["b"]),
    ],
)
def test_grammar_accepts_its_texts(fields: dict[str, Any], accepted: list[str], refused: list[str]) -> None:
    source = source_of(fields)
    assert all(accepts(source, text) for text in accepted) and not any(accepts(source, text) for text in refused)


def test_key_is_of_kind_and_text_alone() -> None:
    sources = [GrammarSource(*source) for source in (("regex", "1", "x"), ("regex", "2", "x"), ("choice", ["1"], "x"))]
    assert len({build_grammar(source).key for source in sources}) == 3
    assert build_grammar(sources[0]._replace(param="y")) == build_grammar(sources[0])


def test_schemas_of_the_documented_keywords_compile() -> None:
    for schema in HONOURED:
        source = GrammarSource("json_schema", schema, "x")
        check_grammar(TOKENIZER, build_grammar(source), source)


def test_schemas_that_cannot_be_followed_are_refused_with_the_keyword() -> None:
    for schema, path in REFUSED:
        source = GrammarSource("json_schema", schema, "x")
        with pytest.raises(GrammarError) as caught:
            check_grammar(TOKENIZER, build_grammar(source), source)
        assert caught.value.param == "x" + path and f"$.x{path}" in str(caught.value)


def test_keyword_is_none_as_the_name_of_a_property_or_in_a_value() -> None:
    schema = {"properties": {"not": {"items": {"not": {}}}}, "enum": [{"not": 1}], "const": {"not": 2}}
    assert find_keyword(schema, "not") == ".properties.not.items.not"
    assert find_keyword({"properties": {"not": {}}, "default": {"not": 1}}, "not") is None


def test_special_tokens_of_the_model_may_be_named() -> None:
    for text, is_known in (("start: <|tool|>", True), ("start: <|other|>", False)):
        source = GrammarSource("grammar", text, "x")
        if is_known:
            check_grammar(TOKENIZER, build_grammar(source), source)
        else:
            with pytest.raises(GrammarError, match="unknown special token"):
                check_grammar(TOKENIZER, build_grammar(source), source)


@pytest.mark.parametrize("kind", ["regex", "grammar", "json_schema", "structural_tag"])
def test_long_grammar_is_refused(kind: str) -> None:
    text = json.dumps({"enum": ["a" * MAX_CHARACTERS]})
    with pytest.raises(GrammarError, match=r"at most \d+ characters"):
        build_grammar(GrammarSource(kind, text, "x"))
