"""Grammars: from the field of a request to text, from text to a matcher, which says what may come next.

The library is llguidance, which functions import: this module is imported for forks that may have no grammar. A matcher
does the work while it masks: compiling a text takes milliseconds, so the text travels, and each process compiles it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from penstock.engine.protocol.answer_format import CHANNELS
from penstock.engine.text.call_grammar import behind_reasoning, calls_text
from penstock.engine.text.grammar_fields import CallRules, Grammar, GrammarError, GrammarSource, StructuralTag, Tool
from penstock.tensor import content_key

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CHARACTERS = 1 << 16  # of a grammar's text
MAX_RELAXED = 16  # tools of a request with a schema that has no grammar
MAX_RULES = 1 << 14  # characters of Lark or GBNF, which takes 10 ms a kilobyte: the library translates GBNF in Python
# Of a step, and of building a grammar. About 14,000 units of fuel take a millisecond, and 20,000 items.
LIMITS: Any = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_items_in_row": 1000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
# Whitespace as models write it, which cannot go on for ever. Nothing is passed over.
JSON_OPTIONS: Any = {
    "lenient": False,
    "whitespace_flexible": False,
    "key_separator": ": ?",
    "item_separator": ", ?",
}
ANY_OBJECT = {"type": "object"}
NO_ARGUMENTS: Any = {"type": "object", "properties": {}, "additionalProperties": False}  # of a tool without parameters
# Keywords of drafts before 4, which the library would ignore, and one of the library's own.
UNSUPPORTED = ("disallow", "divisibleBy", "extends", "x-guidance")
NAMES_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
VALUES = ("enum", "const", "default", "examples", "example", "required", "type")
_KEYS = re.compile(r"Unimplemented keys: (\[.*\])")
_NON_VERBOSE = "<non-verbose/>"
_NOTHING_LEFT = "NoExtensionBias"


def build_grammar(source: GrammarSource) -> Grammar:
    """Builds the text of a grammar. Raises GrammarError."""
    text = _text_of(source)
    _require_length(text, source.param)
    return Grammar(text, content_key(b"grammar", source.kind, text), source.kind == "tool_calls")


def _text_of(source: GrammarSource) -> str:
    from llguidance import LLMatcher, grammar_from

    kind, value, param = source
    try:
        if kind == "json_object":
            return _json_grammar(json.dumps(ANY_OBJECT))
        if kind == "json_schema":
            return _json_grammar(_schema_text(value, param))
        if kind == "regex":
            return LLMatcher.grammar_from_regex(value)
        if kind == "choice":
            return LLMatcher.grammar_from_regex("|".join(map(_quoted, value)))
        if kind == "structural_tag":
            return _tags_text(value, param)
        if kind == "tool_calls":
            return _calls_text(value)
        _require_length(value, param, MAX_RULES)
        return grammar_from("grammar", value)
    except (ValueError, RecursionError) as error:
        if isinstance(error, GrammarError):
            raise
        raise GrammarError(f"{str(error) or 'the grammar is nested too deeply'} at $.{param}", param) from None


def _json_grammar(schema: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)


def _schema_text(schema: Any, param: str) -> str:
    """Returns a schema as text. Raises GrammarError for one with a keyword that the library would pass over."""
    if isinstance(schema, str):
        _require_length(schema, param)
        schema = json.loads(schema)
    if schema is False:
        raise GrammarError(f"the grammar allows no text at $.{param}", param)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError(f"expected a schema, an object or a boolean, got {str(schema)[:20]} at $.{param}", param)
    for keyword in UNSUPPORTED:
        if (path := find_keyword(schema, keyword)) is not None:
            raise _unsupported(keyword, param + path)
    return json.dumps(schema)


def _require_length(text: str, param: str, limit: int = MAX_CHARACTERS) -> None:
    if len(text) > limit:
        message = f"expected a grammar of at most {limit} characters, got {len(text)} at $.{param}"
        raise GrammarError(message, param)


def _unsupported(keyword: str, path: str) -> GrammarError:
    return GrammarError(f"the keyword {keyword} of JSON Schema is not supported: it is at $.{path}", path)


def _quoted(text: str) -> str:
    """Returns a regular expression for one text."""
    return "".join(char if char.isalnum() or char in " _" else f"\\x{{{ord(char):x}}}" for char in text)


def _tags_text(tag: str | StructuralTag, param: str) -> str:
    from llguidance import LLMatcher, StructTag

    if isinstance(tag, str):
        _require_length(tag, param)
        tag = msgspec.json.decode(tag, type=StructuralTag)
    structures = []
    for number, structure in enumerate(tag.structures):
        trigger = next((trigger for trigger in tag.triggers if structure.begin.startswith(trigger)), "")
        where = f"{param}.structures[{number}]"
        if not trigger:
            raise GrammarError(f"expected a trigger at the beginning of {structure.begin!r} at $.{where}.begin", where)
        schema = _schema_text(structure.schema, f"{where}.schema")
        structures.append(StructTag(trigger=trigger, begin=structure.begin, grammar=schema, end=structure.end))
    return LLMatcher.grammar_from_lark(StructTag.to_grammar(structures, assume_special=False))


def _calls_text(rules: CallRules) -> str:
    from llguidance import LLMatcher

    schemas = {}
    for number, tool in enumerate(rules.tools):
        if tool.function.name in rules.allowed:
            schema = json.loads(_schema_text(_arguments(tool), _parameters_path(number)))
            schemas[tool.function.name] = {**schema, "x-guidance": JSON_OPTIONS}
    text = calls_text(rules, schemas)
    if rules.content is None:
        return LLMatcher.grammar_from_lark(text)
    first, *others = _grammars(_text_of(rules.content))
    return json.dumps({"grammars": [{"name": "calls", "lark_grammar": text}, {**first, "name": "content"}, *others]})


def _arguments(tool: Tool) -> Any:
    """Returns the schema of a tool's arguments."""
    return NO_ARGUMENTS if tool.function.parameters is None else tool.function.parameters or ANY_OBJECT


def _parameters_path(number: int) -> str:
    return f"tools[{number}].function.parameters"


def _grammars(text: str) -> list[dict[str, Any]]:
    """Returns the parts of a grammar: a grammar of JSON has a list, and all others are Lark."""
    if not text.startswith("{"):
        return [{"lark_grammar": text}]
    grammars: list[dict[str, Any]] = json.loads(text)["grammars"]
    return grammars


def grammar_behind_reasoning(grammar: Grammar, reasoning: str, is_open: bool, marks: Mapping[str, int]) -> Grammar:
    """Returns the grammar of an answer that begins with reasoning. `is_open`: inside the reasoning."""
    has_header = reasoning == CHANNELS and not grammar.has_calls
    text = behind_reasoning(_grammars(grammar.text), reasoning, is_open, marks, has_header)
    return Grammar(text, content_key(b"grammar", "reasoning", text))


def relaxed_calls(tokenizer: LLTokenizer, rules: CallRules) -> CallRules:
    """Returns the rules with any arguments for each tool with a schema that has no grammar. Raises GrammarError if the
    tool is strict. After MAX_RELAXED such tools, all others that are not strict are taken for such: a check takes up to
    20 ms."""
    tools, relaxed = [], 0
    for number, tool in enumerate(rules.tools):
        function = tool.function
        source = GrammarSource("json_schema", _arguments(tool), _parameters_path(number))
        try:
            if function.name in rules.allowed and (function.strict or relaxed < MAX_RELAXED):
                check_grammar(tokenizer, build_grammar(source), source)
        except GrammarError:
            if function.strict:
                raise
            relaxed += 1
            function = replace(function, parameters=ANY_OBJECT)
        if relaxed >= MAX_RELAXED and not function.strict:
            function = replace(function, parameters=ANY_OBJECT)
        tools.append(replace(tool, function=function))
    return replace(rules, tools=tuple(tools))


def find_keyword(schema: Any, keyword: str) -> str | None:
    """Returns the path of the first use of a keyword in a schema, as ".properties.a.keyword"; None: it has none."""
    left = [("", schema)]
    while left:
        path, value = left.pop()
        if isinstance(value, dict) and keyword in value:
            return f"{path}.{keyword}"
        left += reversed([*_inner_schemas(path, value)])
    return None


def _inner_schemas(path: str, schema: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(schema, list):
        yield from ((f"{path}[{number}]", inner) for number, inner in enumerate(schema))
    elif isinstance(schema, dict):
        for keyword, value in schema.items():
            if keyword in NAMES_OF_SCHEMAS and isinstance(value, dict):
                yield from ((f"{path}.{keyword}.{name}", inner) for name, inner in value.items())
            elif keyword not in VALUES:
                yield f"{path}.{keyword}", value


# ── matchers ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class ByteTokens:
    """A tokenizer with an id for each byte, an end id, and the special tokens of a model."""

    bos_token_id = None
    eos_token_id = 256

    def __init__(self, special: Sequence[str] = ()) -> None:
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<end>", *(text.encode() for text in special)]
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def byte_tokenizer(special: Sequence[str] = ()) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(ByteTokens(special)), slices=[])


def model_tokenizer(path: Path, vocabulary: int, end_ids: Collection[int]) -> LLTokenizer:
    """Reads a tokenizer.json. `vocabulary`: of the model, which may have more ids than the tokenizer.
    Raises ValueError."""
    from llguidance import LLTokenizer

    if not path.exists():
        raise ValueError(f"{path} is missing: a grammar is of the texts of ids")
    return LLTokenizer(path.read_text(), n_vocab=vocabulary, eos_token=sorted(end_ids))


def compile_grammar(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """Returns a matcher at the beginning of an answer. Raises ValueError, without the library's dump of the state."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**LIMITS))
    if matcher.is_error():
        raise ValueError(matcher.get_error().replace(_NON_VERBOSE, "").strip() or "the grammar allows no text")
    return matcher


def has_nothing_left(matcher: LLMatcher) -> bool:
    """Returns whether a matcher failed because no id continues its text, and not by a limit."""
    return bool(matcher.get_error().startswith(_NOTHING_LEFT))


def check_grammar(tokenizer: LLTokenizer, grammar: Grammar, source: GrammarSource) -> None:
    """Raises GrammarError for a grammar that does not compile, or allows no text."""
    try:
        matcher = compile_grammar(tokenizer, grammar.text)
        mask = matcher.compute_bitmask()
        if matcher.is_error() or not any(mask):
            raise ValueError("the grammar allows no text")
    except ValueError as error:
        raise _explained(str(error), source) from None


def _explained(error: str, source: GrammarSource) -> GrammarError:
    """Returns the error for the client, with the path of a keyword that is not supported."""
    keys = _KEYS.search(error)
    if keys is not None:
        keyword = json.loads(keys[1])[0]
        value = json.loads(source.value) if isinstance(source.value, str) else source.value
        if isinstance(value, StructuralTag):
            value = msgspec.to_builtins(value)
        return _unsupported(keyword, source.param + (find_keyword(value, keyword) or ""))
    error = error.replace(_NOTHING_LEFT, "the grammar allows no text")
    return GrammarError(f"{' '.join(error.split())} at $.{source.param}", source.param)
