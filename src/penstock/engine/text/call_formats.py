"""The formats of tool calls. Each reads the calls behind its mark; text that is no call is given up as content."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from penstock.engine.text.answer_text import ESCAPED, AnswerText, Marks, Reading, Run
from penstock.engine.text.detokenizer import json_escape
from penstock.engine.text.python_calls import read_pythonic

Types = Mapping[str, Mapping[str, str]]  # JSON type of each parameter of each tool
NAME = re.compile(r"[\w.-]+")
TAG_NAME = re.compile(r"[^<>\n]+")
MAX_LITERAL = 4096  # characters of Python: the parser of Python uses the stack
CALL_MARKS = Marks.of("</tool_call>", "<tool_call>")
VALUE_ENDS = Marks.of(
    *(f"{line_end}{mark}" for mark in ("</parameter>", "<parameter=", "</function>") for line_end in ("\n", ""))
)


class CallFormat(NamedTuple):
    mark: str | None  # before a call; None: calls are at the beginning of the answer only
    read: Callable[[AnswerText, Types], Reading[None]]  # reads a call, and text behind the call that has no meaning


def _read_object(text: AnswerText, is_strict: bool = False) -> Reading[bool]:
    """Reads `{"name": …, "arguments": …}` and begins its call. Returns whether the object is complete.

    `is_strict`: an object without arguments, or with another key, is no call.
    """
    if not (yield from text.accept("{")):
        return False
    name: str | None = None
    held: list[str] = []  # arguments before the name
    has_arguments = False
    while True:
        yield from text.spaces()
        if (yield from text.accept("}")):
            break
        if (yield from text.accept(",")):
            continue
        key = yield from text.json_string()
        yield from text.spaces()
        if key is None or not (yield from text.accept(":")):
            return False
        yield from text.spaces()
        is_arguments = key in ("arguments", "parameters") and not has_arguments
        has_arguments |= is_arguments
        if key == "name" and name is None:
            name = yield from text.json_string()
            is_whole = bool(name)
        elif not is_arguments and is_strict and key not in ("type", "id"):
            return False
        if name and not text.has_begun and (has_arguments or not is_strict):
            text.begin(name)
            text.arguments("".join(held))
        if is_arguments and text.has_begun:
            is_whole = yield from text.json_value(text.arguments, Run.ARGUMENTS)
        elif key != "name":
            is_whole = yield from text.json_value(held.append if is_arguments else text.drop)
        if not is_whole:
            return False
    if text.has_begun and not has_arguments:
        text.arguments("{}")
    return text.has_begun


def _skip_to_end(text: AnswerText) -> Reading[None]:
    """Skips text up to the end of a call; if a call begins first, up to that."""
    if (yield from text.until(CALL_MARKS, text.drop)) == "<tool_call>":
        text.put_back("<tool_call>")


def _read_hermes(text: AnswerText, _: Types) -> Reading[None]:
    yield from text.spaces()
    yield from _read_object(text)
    if text.has_begun:
        yield from _skip_to_end(text)


def _read_mistral(text: AnswerText, _: Types) -> Reading[None]:
    yield from text.spaces()
    if not (yield from text.accept("[")):
        yield from _read_object(text) if text.text.startswith("{") else _read_named(text)
        return
    yield from text.calls_of_list(_read_object)


def _read_named(text: AnswerText) -> Reading[None]:
    """Reads `name[ARGS]{…}`, as newer models of Mistral write calls, also without `[ARGS]` or with `[CALL_ID]…`."""
    name = yield from text.match(NAME)
    if not name:
        return
    if (yield from text.accept("[CALL_ID]")):
        yield from text.match(NAME)
    yield from text.accept("[ARGS]")
    yield from text.spaces()
    if text.text.startswith("{"):
        text.begin(name)
        yield from text.json_value(text.arguments, Run.ARGUMENTS)


def _read_llama3_json(text: AnswerText, _: Types) -> Reading[None]:
    yield from text.accept("<|python_tag|>")
    yield from text.spaces()
    while (yield from _read_object(text, is_strict=True)):
        yield from text.spaces()
        if not (yield from text.accept(";")):
            return
        text.attempt()
        yield from text.spaces()


# ── XML ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _read_tag_name(text: AnswerText, prefix: str) -> Reading[str]:
    """Reads `prefix`, a name, and `>`. Returns the name; empty: there is none."""
    if not (yield from text.accept(prefix)):
        return ""
    name = yield from text.match(TAG_NAME)
    return name.strip() if (yield from text.accept(">")) else ""


def _read_qwen3_xml(text: AnswerText, types: Types) -> Reading[None]:
    yield from text.spaces()
    name = yield from _read_tag_name(text, "<function=")
    if not name:
        return
    text.begin(name)
    before = "{"
    while True:
        yield from text.spaces()
        parameter = yield from _read_tag_name(text, "<parameter=")
        if not parameter:
            break
        text.arguments(f'{before}"{json_escape(parameter).decode()}": ')
        yield from _read_parameter(text, types.get(name, {}).get(parameter, "string"))
        before = ", "
    has_function_end = yield from text.accept("</function>")
    has_end = yield from text.accept("</tool_call>")
    if has_function_end or has_end:
        text.arguments("{}" if before == "{" else "}")
    if not has_end:
        yield from _skip_to_end(text)


def _read_parameter(text: AnswerText, kind: str) -> Reading[None]:
    yield from text.accept("\n")
    parts: list[str] = []
    if kind == "string":
        text.arguments('"')
        end = yield from text.until(
            VALUE_ENDS, lambda part: text.arguments(json_escape(part).decode()), Run.ARGUMENTS, ESCAPED
        )
    else:
        end = yield from text.until(VALUE_ENDS, parts.append)
    if end is not None:
        text.arguments('"' if kind == "string" else _json_of("".join(parts), kind))
        if not end.endswith("</parameter>"):
            text.put_back(end.lstrip("\n"))


def _json_of(value: str, kind: str) -> str:
    """Returns the JSON of a value that is no string; a text that is neither JSON nor Python is a string."""
    plain = value.strip()
    if plain.lower() in ("null", "none"):
        return "null"
    if kind == "boolean" and plain.lower() in ("true", "false"):
        return plain.lower()
    try:
        msgspec.json.decode(plain)
        return plain
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            literal = ast.literal_eval(plain) if len(plain) < MAX_LITERAL else value
        return msgspec.json.encode(literal).decode()
    except Exception:  # of many kinds, for a text that is no Python
        return msgspec.json.encode(value).decode()


CALL_FORMATS = {
    "hermes": CallFormat("<tool_call>", _read_hermes),
    "llama3_json": CallFormat(None, _read_llama3_json),
    "mistral": CallFormat("[TOOL_CALLS]", _read_mistral),
    "pythonic": CallFormat(None, lambda text, _: read_pythonic(text)),
    "qwen3_xml": CallFormat("<tool_call>", _read_qwen3_xml),
}
