"""The fields of a request that demand an answer of a grammar: of OpenAI's API, of vLLM and of SGLang.

`grammar` builds the text of a grammar from them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec

MAX_CHOICES = 1024
RESPONSE_FORMATS = ["text", "json_object", "json_schema", "structural_tag"]
Schema: TypeAlias = str | bool | dict[str, Any]  # a JSON Schema, perhaps as text
Choices = Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_CHOICES)]


class GrammarError(ValueError):
    """A grammar that cannot be honoured. `param` is the field."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class Grammar(NamedTuple):
    text: str  # as the library takes it
    key: bytes  # a hash of kind and text
    has_calls: bool = False  # the text is of calls, or of content without a call


class GrammarSource(NamedTuple):
    """A grammar as a request has it: the kind, the value, and the field, for errors."""

    kind: str  # a value of FIELDS
    value: Any
    param: str


class NamedSchema(msgspec.Struct):
    schema: Schema
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # each schema is followed strictly


# What each format of calls can hold as it is. Python's `$` would accept a line end behind the name.
TOOL_NAME_PATTERN = r"^[A-Za-z0-9_.-]{1,128}(?![\s\S])"


class FunctionDefinition(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(pattern=TOOL_NAME_PATTERN)]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON Schema
    strict: bool | None = None


class Tool(msgspec.Struct):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class CallRules(msgspec.Struct, frozen=True):
    """What an answer may call. `call_grammar` writes the grammar."""

    format: str  # of TOOL_FORMATS
    tools: tuple[Tool, ...]
    allowed: frozenset[str]  # names of the tools that may be called
    is_forced: bool  # the answer is a call
    is_parallel: bool  # or several
    has_named_calls: bool = False  # of mistral: `[TOOL_CALLS]name[ARGS]{…}` instead of a list
    content: GrammarSource | None = None  # the grammar of an answer without a call; None: any text
    marks: dict[str, int] = {}  # ids of the marks that are special tokens


class TaggedStructure(msgspec.Struct):
    begin: str
    schema: Schema
    end: str


class StructuralTag(msgspec.Struct):
    """Free text, in which a trigger begins a structure with content of a schema."""

    structures: Annotated[list[TaggedStructure], msgspec.Meta(min_length=1, max_length=MAX_CHOICES)]
    triggers: Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_CHOICES)]


class ResponseFormat(msgspec.Struct):
    type: Annotated[str, msgspec.Meta(extra_json_schema={"enum": RESPONSE_FORMATS})]
    json_schema: NamedSchema | None = None
    structures: list[TaggedStructure] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    json: Schema | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | StructuralTag | None = None
    # vLLM's clients send these fields with their defaults.
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None

    def require_supported(self) -> None:
        for name in ("disable_additional_properties", "whitespace_pattern"):
            if getattr(self, name):
                path = f"structured_outputs.{name}"
                raise GrammarError(f"{path} is not supported: leave it out", path)


# The field's path, and the kind of grammar. `json_object` is a flag.
FIELDS = {
    "structured_outputs.json": "json_schema",
    "structured_outputs.regex": "regex",
    "structured_outputs.choice": "choice",
    "structured_outputs.grammar": "grammar",
    "structured_outputs.json_object": "json_object",
    "structured_outputs.structural_tag": "structural_tag",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "json_schema": "json_schema",
    "ebnf": "grammar",
}
_PATHS = [(path, kind, *path.partition(".")[::2]) for path, kind in FIELDS.items()]


class GrammarFields(msgspec.Struct, kw_only=True):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    json_schema: Schema | None = None
    ebnf: str | None = None

    def grammar_source(self) -> GrammarSource | None:
        """Returns the grammar of the request; None: it has none. Raises GrammarError if it has several."""
        sources = []
        if self.structured_outputs is not None:
            self.structured_outputs.require_supported()
        if self.response_format is not None and self.response_format.type != "text":
            sources.append(_source_of(self.response_format))
        for path, kind, outer, inner in _PATHS:
            value = getattr(self, outer)
            if inner and value is not None:
                value = getattr(value, inner)
            if value not in (None, "", False) or (kind == "json_schema" and value is False):
                sources.append(GrammarSource(kind, value, path))
        if len(sources) > 1:
            names = " and ".join(source.param for source in sources[:2])
            raise GrammarError(f"expected a grammar in one field, got {names}", sources[1].param)
        return sources[0] if sources else None


def _source_of(response_format: ResponseFormat) -> GrammarSource:
    kind, path = response_format.type, "response_format"
    if kind not in RESPONSE_FORMATS:
        message = f"expected {', '.join(RESPONSE_FORMATS)}, got {kind!r:.80} at $.{path}.type"
        raise GrammarError(message, f"{path}.type")
    if kind == "json_object":
        return GrammarSource(kind, True, path)
    if kind == "json_schema":
        if response_format.json_schema is None:
            raise GrammarError(f"expected an object at $.{path}.json_schema, got none", f"{path}.json_schema")
        return GrammarSource(kind, response_format.json_schema.schema, f"{path}.json_schema.schema")
    if not response_format.structures or not response_format.triggers:
        raise GrammarError(f"expected structures and triggers at $.{path}, got none", path)
    return GrammarSource(kind, StructuralTag(response_format.structures, response_format.triggers), path)


def require_fit(
    min_tokens: int, ignore_eos: bool, allowed_token_ids: tuple[int, ...] | None, source: GrammarSource
) -> None:
    """Raises GrammarError for sampling parameters that have no exact meaning beside a grammar."""
    for name, value in (
        ("min_tokens", min_tokens),
        ("ignore_eos", ignore_eos),
        ("allowed_token_ids", allowed_token_ids is not None),
    ):
        if value:
            raise GrammarError(f"{name} is not supported beside a grammar ({source.param}): leave one out", name)


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Returns the special tokens of a `tokenizers.Tokenizer` by id: a grammar may name them."""
    tokens = tokenizer.get_added_tokens_decoder().items()
    return {token_id: token.content for token_id, token in tokens if token.special}
