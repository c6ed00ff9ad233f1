"""Reads `[name(key=value, …), …]`, a list of Python calls with literals, and writes the arguments as JSON."""

from __future__ import annotations

import ast
import json
import re

from penstock.engine.text.answer_text import ESCAPED, AnswerText, Marks, Reading, Run
from penstock.engine.text.detokenizer import char_bloom, json_escape

NAME = re.compile(r"[A-Za-z_][\w.]*")
KEY = re.compile(r"[A-Za-z_]\w*")
WORD = re.compile(r"[\w.+-]+")
NUMBER = re.compile(r"[+-]?[\d.][\w.]*(?:[+-]\d+)?")
HEXADECIMAL = re.compile("[0-9a-fA-F]{4}")
WORDS = {"True": "true", "False": "false", "None": "null"}
ESCAPE_LENGTHS = {"x": 4, "u": 6, "U": 10}  # characters of an escape with a number
MAX_DEPTH = 64  # of lists and dicts


def read_pythonic(text: AnswerText) -> Reading[None]:
    yield from text.spaces()
    if not (yield from text.accept("[")):
        return
    if not (yield from text.calls_of_list(_read_call)) and text.has_begun:
        yield from text.until(Marks.of(), text.drop)


def _read_call(text: AnswerText) -> Reading[bool]:
    name = yield from text.match(NAME)
    if not name or not (yield from text.accept("(")):
        return False
    yield from text.spaces()
    before = "{"
    while not (yield from text.accept(")")):
        key = yield from text.match(KEY)
        yield from text.spaces()
        if not key or not (yield from text.accept("=")):
            return False
        if not text.has_begun:
            text.begin(name)
        text.arguments(f'{before}"{key}": ')
        before = ", "
        yield from text.spaces()
        if not (yield from _read_value(text, 0)):
            return False
        yield from text.spaces()
        if not (yield from text.accept(",")) and not text.text.startswith(")"):
            return False
        yield from text.spaces()
    if not text.has_begun:
        text.begin(name)
    text.arguments("{}" if before == "{" else "}")
    return True


def _read_value(text: AnswerText, depth: int) -> Reading[bool]:
    """Reads a literal at the beginning of the text. Returns False if there is none."""
    first = text.text[:1]
    if first and first in "'\"":
        return (yield from _read_string(text))
    if first and first in "[{":
        return depth < MAX_DEPTH and (yield from _read_items(text, depth + 1))
    word = yield from text.match(WORD)
    written = WORDS.get(word) or _number(word)
    text.arguments(written)
    return bool(written)


def _read_items(text: AnswerText, depth: int) -> Reading[bool]:
    """Reads a list or a dict."""
    opening = text.take(1)
    closing = "]" if opening == "[" else "}"
    text.arguments(opening)
    yield from text.spaces()
    before = ""
    while not (yield from text.accept(closing)):
        if not text.text:
            return False
        text.arguments(before)
        before = ", "
        if opening == "{":
            is_key = text.text[0] in "'\"" and (yield from _read_string(text))
            yield from text.spaces()
            if not is_key or not (yield from text.accept(":")):
                return False
            text.arguments(": ")
            yield from text.spaces()
        if not (yield from _read_value(text, depth)):
            return False
        yield from text.spaces()
        if not (yield from text.accept(",")) and not text.text.startswith(closing):
            return False
        yield from text.spaces()
    text.arguments(closing)
    return True


def _read_string(text: AnswerText) -> Reading[bool]:
    quote = text.take(1)
    end = re.compile(rf"[{quote}\\]")
    text.arguments('"')
    while True:
        match = end.search(text.text)
        text.arguments(json_escape(text.take(len(text.text) if match is None else match.start())).decode())
        if match is None:
            if not (yield from text.more(Run.ARGUMENTS, ESCAPED | char_bloom(quote))):
                return False
        elif match.group() == quote:
            text.take(1)
            text.arguments('"')
            return True
        elif not (yield from _read_escape(text)):
            return False


def _read_escape(text: AnswerText) -> Reading[bool]:
    while len(text.text) < ESCAPE_LENGTHS.get(text.text[1:2], 2):
        if not (yield from text.more()):
            return False
    escape = text.take(ESCAPE_LENGTHS.get(text.text[1], 2))
    if escape[1] in "xu":
        digits = escape[2:].rjust(4, "0")  # JSON has the escape u, too, also of half a pair of surrogates
        if HEXADECIMAL.fullmatch(digits) is None:
            return False
        text.arguments(f"\\u{digits}")
        return True
    try:
        written = json_escape(ast.literal_eval(f'"{escape}"') if escape[1] in "abfnrtvU\\'\"\n" else escape)
    except (SyntaxError, UnicodeError):  # a number that is no character
        return False
    text.arguments(written.decode())
    return True


def _number(word: str) -> str:
    """Returns the JSON of a number; empty if the word is no number that JSON has."""
    if NUMBER.fullmatch(word) is None:
        return ""
    try:
        value = ast.literal_eval(word)
    except (SyntaxError, ValueError):
        return ""
    return json.dumps(value) if isinstance(value, (int, float)) and value - value == 0 else ""
