"""Grammars of answers with tool calls, in the model's own format, and of answers behind reasoning.

Grammars are Lark text as llguidance reads it. `grammar` compiles them, and `call_formats` reads the calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from penstock.engine.protocol.answer_format import CHANNELS, REASONING_MARKS
from penstock.engine.text.grammar_fields import CallRules, GrammarError

ANY_TEXT = r"/(.|\n)*/"
# The text of an XML parameter: without a mark that ends the parameter, `</p…`, `</f…` or `<p…`.
RAW = r"([^<]|<+[^\/p<]|<+\/[^pf<])*"
# Answers without a call, where calls have no mark: the first character begins no call.
FIRST_OF_CALLS = {"llama3_json": "{", "pythonic": r"\["}
CALL_BEGINS = {"hermes": "<tool_call>", "qwen3_xml": "<tool_call>", "mistral": "[TOOL_CALLS]"}
UNSEEN_IN_RAW = ("pattern", "format", "minLength", "maxLength")

Schemas = Mapping[str, dict[str, Any]]  # of the arguments of each tool that may be called


def quoted(text: str) -> str:
    """Returns a Lark string. Lark's escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False)


def in_json(schema: Any) -> str:
    return f"%json {json.dumps(schema)}"


def calls_text(rules: CallRules, schemas: Schemas) -> str:
    """Returns the grammar of an answer that is one or more calls, or may have calls. Raises GrammarError."""
    writer = CallWriter(rules, schemas)
    calls = writer.calls()
    if rules.format == "openai":
        content = ANY_TEXT if rules.content is None else "@content"
        start = f"start: {calls}" + ("" if rules.is_forced else f" | {channel_header('final', rules.marks)} {content}")
    elif rules.is_forced or rules.content is not None:
        start = f"start: {calls}" + ("" if rules.is_forced else " | @content")
    elif rules.format in FIRST_OF_CALLS:
        first = FIRST_OF_CALLS[rules.format]
        start = rf'start: {calls} | OTHER | ""' + f"\nOTHER: /[ \\n]*[^{first} \\n<](.|\\n)*/"
    else:
        start = writer.text_with_calls()
    return "\n".join([start, *writer.rules])


def mark_text(mark: str, marks: Mapping[str, int]) -> str:
    """Returns the expression of a mark. `marks`: ids of those that are special tokens."""
    return f"<[{marks[mark]}]>" if mark in marks else quoted(mark)


def channel_header(channel: str, marks: Mapping[str, int]) -> str:
    return f"{mark_text('<|channel|>', marks)} {quoted(channel)} {mark_text('<|message|>', marks)}"


def behind_reasoning(
    grammars: list[dict[str, Any]], reasoning: str, is_open: bool, marks: Mapping[str, int], has_header: bool = False
) -> str:
    """Returns a grammar that begins behind the reasoning. `is_open`: the answer begins inside the reasoning, and else
    may have none. `grammars`: of the answer, as llguidance has them. `has_header`: in the channel "final"."""
    opening, closing = REASONING_MARKS[reasoning]
    if closing in marks:
        think = f"think: TEXT? <[{marks[closing]}]>\nTEXT: {ANY_TEXT}"
    else:
        think = f"think[suffix={quoted(closing)}]: {ANY_TEXT}"
    begin, thought = mark_text(opening, marks), "think"
    if reasoning == CHANNELS:
        begin, thought = channel_header("analysis", marks), f'think {mark_text("<|start|>", marks)} "assistant"'
    answer = f"{channel_header('final', marks)} @answer" if has_header else "@answer"
    start = f"start: {thought} {answer}" if is_open else f"start: ({begin} {thought})? {answer}"
    first, *others = grammars
    wrapper = {"name": "reasoning", "lark_grammar": f"{start}\n{think}"}
    return json.dumps({"grammars": [wrapper, {**first, "name": "answer"}, *others]})


class CallWriter:
    def __init__(self, rules: CallRules, schemas: Schemas) -> None:
        self.rules: list[str] = []
        self._rules = rules
        self._schemas = schemas

    def calls(self) -> str:
        """Returns the expression of one or more calls, in which `self.rules` are used."""
        names = self._rules.format
        if names == "mistral" and not self._rules.has_named_calls:
            body = self._alternatives(self._json_call("arguments"))
            self.rules.append(f"body: {body}")
            more = '(", " body)*' if self._rules.is_parallel else ""
            return f'{self._mark("[TOOL_CALLS]")} "[" body {more} "]"'
        if names == "pythonic":
            self.rules.append(f"body: {self._alternatives(self._pythonic_call)}")
            more = '(", " body)*' if self._rules.is_parallel else ""
            return f'"[" body {more} "]"'
        if names == "openai":  # the end of a message to a function ends the answer
            self.rules.append(f"body: {self._alternatives(self._message_to)}")
            return "body"
        if names == "llama3_json":  # its templates show one call in a message
            self.rules.append(f"body: {self._alternatives(self._json_call('parameters'))}")
            return "body"
        self.rules += [f"call: {self._mark(CALL_BEGINS[names])} rest", f"rest: {self._rest()}"]
        if not self._rules.is_parallel:
            return "call"
        return "call+" if names == "mistral" else r'call ("\n" call)*'

    def text_with_calls(self) -> str:
        """Returns the rules of text in which a mark begins a call."""
        mark = CALL_BEGINS[self._rules.format]
        if self._rules.format == "mistral" and not self._rules.has_named_calls:
            more = '(", " body)*' if self._rules.is_parallel else ""
            self.rules.append(f'rest: "[" body {more} "]"')
        if mark in self._rules.marks:
            marked = f"marked: TEXT? {self._mark(mark)} rest"
        else:
            marked = f"marked: trigger rest\ntrigger[lazy]: TEXT {quoted(mark)}"
        repeated = "marked* TEXT?" if self._rules.is_parallel else "marked | TEXT?"
        return f"start: {repeated}\n{marked}\nTEXT: {ANY_TEXT}"

    # ── the parts ──
    def _mark(self, mark: str) -> str:
        return mark_text(mark, self._rules.marks)

    def _alternatives(self, write: Callable[[int, str], str]) -> str:
        return " | ".join(write(number, name) for number, name in enumerate(self._schemas))

    def _rest(self) -> str:
        """Returns the expression of a call behind its first mark."""
        if self._rules.format == "mistral":
            return self._alternatives(self._named_call)
        if self._rules.format == "hermes":
            body, end = self._alternatives(self._json_call("arguments")), self._mark("</tool_call>")
        else:
            body, end = self._alternatives(self._xml_call), self._mark("</tool_call>")
        return rf'"\n" ({body}) "\n" {end}'

    def _json_call(self, key: str) -> Callable[[int, str], str]:
        def write(number: int, name: str) -> str:
            begin = quoted(f'{{"name": {json.dumps(name)}, "{key}": ')
            return f'{begin} {in_json(self._schemas[name])} "}}"'

        return write

    def _message_to(self, number: int, name: str) -> str:
        header = f"{self._mark('<|channel|>')} {quoted(f'commentary to=functions.{name} ')}"
        constraint = f'{self._mark("<|constrain|>")} "json" {self._mark("<|message|>")}'
        return f"{header} {constraint} {in_json(self._schemas[name])}"

    def _named_call(self, number: int, name: str) -> str:
        return f"{quoted(name)} {self._mark('[ARGS]')} {in_json(self._schemas[name])}"

    # ── XML: <function=…> with <parameter=…>, of text or JSON ──
    def _xml_call(self, number: int, name: str) -> str:
        parts = [quoted(f"<function={name}>\n")]
        schema = self._schemas[name]
        required = schema.get("required", ())
        for place, (key, value) in enumerate(schema.get("properties", {}).items()):
            rule = f"p{number}_{place}"
            self.rules.append(self._xml_parameter(rule, key, value, schema, name))
            parts.append(rule if key in required else f"{rule}?")
        return " ".join([*parts, quoted("</function>")])

    def _xml_parameter(self, rule: str, key: str, value: Any, schema: dict[str, Any], name: str) -> str:
        begin, end = f"<parameter={key}>\n", "\n</parameter>\n"
        if not is_raw(value):
            return f"{rule}: {quoted(begin)} {in_json(self._part(schema, value))} {quoted(end)}"
        choices = value.get("enum", [value["const"]] if "const" in value else [])
        if choices:
            return f"{rule}: {quoted(begin)} ({' | '.join(map(quoted, choices))}) {quoted(end)}"
        unseen = [keyword for keyword in UNSEEN_IN_RAW if keyword in value]
        tools = self._rules.tools
        if unseen and any(tool.function.strict for tool in tools if tool.function.name == name):
            place = next(place for place, tool in enumerate(tools) if tool.function.name == name)
            path = f"tools[{place}].function.parameters.properties.{key}.{unseen[0]}"
            raise GrammarError(
                f"{unseen[0]} of a text is not supported in the format qwen3_xml: it is at $.{path}", path
            )
        terminal = rule.upper()
        return f"{rule}: {terminal}\n{terminal}: {quoted(begin)} /{RAW}/ {quoted(end)}"

    # ── Python: name(key=value, …) ──
    def _pythonic_call(self, number: int, name: str) -> str:
        if not all(part.isidentifier() for part in name.split(".")):
            raise GrammarError(f"expected a Python name in the format pythonic, got {name} at $.tools", "tools")
        schema = self._schemas[name]
        required = schema.get("required", ())
        keys = list(schema.get("properties", {}))
        for place, key in enumerate(keys):
            value = self._python_value(schema, schema["properties"][key])
            self.rules.append(f"k{number}_{place}: {quoted(f'{key}=')} {value} m{number}_{place}")
            self.rules.append(f"m{number}_{place}: {self._python_rest(number, keys, place + 1, required, ', ')}")
        return f'{quoted(f"{name}(")} ({self._python_rest(number, keys, 0, required, "")}) ")"'

    @staticmethod
    def _python_rest(number: int, keys: list[str], first: int, required: Any, before: str) -> str:
        """Returns the keys that may come next, up to the first that must, as each may come once and in order."""
        alternatives = []
        for place in range(first, len(keys)):
            alternatives.append(f"{quoted(before)} k{number}_{place}" if before else f"k{number}_{place}")
            if keys[place] in required:
                break
        else:
            alternatives.append('""')
        return " | ".join(alternatives)

    def _python_value(self, schema: dict[str, Any], value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind == "boolean" and not {"enum", "const"} & value.keys():
            return '("True" | "False")'
        return '"None"' if kind == "null" else in_json(self._part(schema, value))

    @staticmethod
    def _part(schema: dict[str, Any], value: Any) -> Any:
        """Returns the schema of one argument, with the definitions and options of the whole."""
        shared = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
        return {**shared, **value} if isinstance(value, dict) else value


def is_raw(schema: Any) -> bool:
    """Returns whether an XML parameter of this schema is text as it is, and not JSON."""
    if not isinstance(schema, dict):
        return False
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return schema.get("type", "string" if choices else None) == "string" and all(isinstance(x, str) for x in choices)
