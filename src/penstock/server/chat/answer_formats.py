"""The formats of reasoning and tool calls in the answers of a model, and what a request makes of them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engine.protocol.answer_format import CHANNELS, REASONING_MARKS, AnswerFormat, begins_in_reasoning
from penstock.engine.protocol.messages import SamplingParams
from penstock.engine.text.answer_parser import parse_answer
from penstock.engine.text.call_grammar import is_raw
from penstock.engine.text.grammar import grammar_behind_reasoning
from penstock.engine.text.grammar_fields import (
    CallRules,
    Grammar,
    GrammarError,
    GrammarSource,
    Tool,
    require_fit,
    special_tokens,
)
from penstock.server.chat.request_schema import ChatRequest
from penstock.server.chat.tool_fields import ToolUse
from penstock.server.errors import ApiError
from penstock.server.options import ServerOptions

DEFAULT_FORMAT = "hermes"
# The first text that a chat template has tells the format in which the model writes calls.
TELLING = (
    ("<|channel|>", "openai"),
    ("<function=", "qwen3_xml"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("[func_name1(", "pythonic"),
    ('"parameters": ', "llama3_json"),
)


def format_of_template(template: str) -> str | None:
    """Returns the format of calls that a chat template shows; None: it shows none that is known."""
    return next((name for text, name in TELLING if text in template), None)


class AnswerFormats:
    """The formats of one model's answers."""

    def __init__(self, options: ServerOptions, template: str, tokenizer: Any) -> None:
        """`template`: for conversations with tools. `tokenizer`: a `tokenizers.Tokenizer`, or None."""
        parser = options.tool_call_parser
        self.tools = (format_of_template(template) or DEFAULT_FORMAT) if parser == "auto" else parser
        self.reasoning = None if options.reasoning_parser == "none" else options.reasoning_parser
        if "openai" in (self.tools, format_of_template(template)) or self.reasoning == CHANNELS:
            self.tools, self.reasoning = "openai", CHANNELS  # one format has both
        self._has_named_calls = "[ARGS]" in template
        marks = {
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "[ARGS]",
            *("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"),
            *REASONING_MARKS.get(self.reasoning or "", ()),
        }
        special = {} if tokenizer is None else special_tokens(tokenizer)
        self._marks = {text: token_id for token_id, text in special.items() if text in marks}

    def grammar_source(self, chat: ChatRequest, use: ToolUse, params: SamplingParams) -> GrammarSource | None:
        """Returns the grammar of an answer that may have calls; None: it has none. Raises ApiError.

        `response_format` is the grammar of an answer that calls no tool. Other fields are grammars of the whole answer.
        """
        content = chat.answer_grammar(params)
        is_whole = content is not None and not content.param.startswith("response_format")
        if (is_whole and not use.is_forced) or not (use.needs_grammar or (use.allowed and content)):
            return content
        if is_whole and content is not None:
            message = (
                f"expected tool_choice auto or none beside {content.param}: a forced call has a grammar of its own"
            )
            raise ApiError(400, message, param="tool_choice")
        rules = CallRules(
            format=self.tools,
            tools=tuple(use.tools),
            allowed=use.allowed,
            is_forced=use.is_forced,
            is_parallel=use.is_parallel,
            has_named_calls=self._has_named_calls,
            content=None if use.is_forced else content,
            marks=self._marks,
        )
        source = GrammarSource("tool_calls", rules, "tools")
        try:
            require_fit(params.min_tokens, params.ignore_eos, params.allowed_token_ids, source)
        except GrammarError as error:
            raise ApiError(400, str(error), param=error.param) from None
        return source

    def answer_format(self, use: ToolUse | None, prompt_end: str, is_continued: bool = False) -> AnswerFormat:
        """Returns the format of an answer with reasoning or calls. `is_continued`: `prompt_end` is a message that the
        answer continues."""
        tools = self.tools if use is not None and use.allowed else None
        return AnswerFormat(
            tools=tools,
            reasoning=self.reasoning,
            in_reasoning=self.reasoning is not None and begins_in_reasoning(self.reasoning, prompt_end, is_continued),
            call_ids=secrets.token_hex(8) if tools is not None else "",
            types=types_of(use.tools) if use is not None and tools == "qwen3_xml" else {},
            forced=tuple(sorted(use.allowed)) if use is not None and use.is_forced else (),
        )

    def behind_reasoning(self, grammar: Grammar | None, answer: AnswerFormat) -> Grammar | None:
        """Returns the grammar of an answer that may begin with reasoning."""
        if grammar is None or answer.reasoning is None:
            return grammar
        return grammar_behind_reasoning(grammar, answer.reasoning, answer.in_reasoning, self._marks)


def build_message(answer_format: AnswerFormat | None, text: str, sample: int) -> dict[str, Any]:
    """Returns the message of a whole answer. `answer_format`: None where all text is content."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if answer_format is None:
        return message
    content, reasoning, calls = parse_answer(answer_format, text, sample)
    message["content"] = content or (None if calls or reasoning else "")
    if answer_format.reasoning is not None:
        message["reasoning_content"] = message["reasoning"] = reasoning or None
    if calls:
        functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": function}
            for call, function in zip(calls, functions, strict=True)
        ]
    return message


def types_of(tools: Sequence[Tool]) -> Mapping[str, Mapping[str, str]]:
    """Returns the JSON type of each parameter of each tool: "string" if its text is no JSON, and "any" for several."""
    types = {}
    for tool in tools:
        properties = (tool.function.parameters or {}).get("properties")
        named = properties.items() if isinstance(properties, dict) else ()
        types[tool.function.name] = {name: "string" if is_raw(schema) else _type_of(schema) for name, schema in named}
    return types


def _type_of(schema: Any) -> str:
    kind = schema.get("type") if isinstance(schema, dict) else None
    return kind if isinstance(kind, str) and kind != "string" else "any"
