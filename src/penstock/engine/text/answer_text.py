"""The text of an answer while it is read, and the pieces read from it: content, reasoning and tool calls.

A reader is a generator that yields where it needs more text. It passes on each character as soon as the meaning of the
character is certain, so the pieces so far are a function of the text so far.
"""

from __future__ import annotations

import enum
import functools
import json
import re
from collections.abc import Callable, Generator
from typing import NamedTuple, TypeVar

import msgspec

from penstock.engine.text.detokenizer import char_bloom

T = TypeVar("T")
Reading = Generator[None, None, T]
SPACE = " \t\r\n"
MAX_NAME = 256  # characters of a name or a key: a longer text is no name, and is held back no longer
ESCAPED = char_bloom('"\\' + "".join(map(chr, range(32))))  # mask of the characters that JSON escapes in strings
STRING_ENDS, OUTSIDE_ENDS = char_bloom('"\\'), char_bloom('"{}[]<')
STRING = re.compile(r'(?:[^"\\]+|\\.)*', re.DOTALL)  # the inside of a JSON string, or its beginning
IN_STRING = re.compile(r'"|\\(?:.|\Z)', re.DOTALL)
OUTSIDE = re.compile(r'["{}\[\]<]')  # of strings; no JSON has a <
SCALAR_END = re.compile(r"[,}\]<\s]")


class Content(msgspec.Struct, frozen=True, gc=False):
    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    text: str


class CallBegins(msgspec.Struct, frozen=True, gc=False):
    """A tool call begins. `index` counts the calls of the answer."""

    index: int
    id: str
    name: str


class Arguments(msgspec.Struct, frozen=True, gc=False):
    """More of the JSON of a call's arguments. A call ends where the next call begins, or the answer ends."""

    index: int
    text: str


Piece = Content | Reasoning | CallBegins | Arguments


class Run(enum.Enum):
    """Where the end of the text is. In all runs but UNKNOWN, a text without a character of `AnswerText.firsts`
    changes nothing, and is a piece as a whole."""

    UNKNOWN = enum.auto()
    CONTENT = enum.auto()
    REASONING = enum.auto()
    ARGUMENTS = enum.auto()


UNKNOWN, ARGUMENTS = Run.UNKNOWN, Run.ARGUMENTS  # the member of a class takes 0.1 us to find


class Marks(NamedTuple):
    whole: re.Pattern[str]
    beginning: re.Pattern[str]  # a part of a mark, at the end of a text
    firsts: int  # mask of the first character of each: see `char_bloom`

    @classmethod
    @functools.cache
    def of(cls, *marks: str) -> Marks:
        parts = [re.escape(mark[:length]) for mark in marks for length in range(1, len(mark))]
        return cls(
            re.compile("|".join(map(re.escape, marks)) or r"(?!)"),
            re.compile(rf"(?:{'|'.join(parts)})\Z" if parts else r"(?!)"),
            char_bloom("".join(mark[0] for mark in marks)),
        )


class AnswerText:
    """Text that has come and has not been read, and pieces that have not been returned."""

    def __init__(self, create_id: Callable[[int], str]) -> None:
        """`create_id` returns the id of a call by its index."""
        self.text = ""
        self.is_last = False  # no more text comes
        self.run = Run.UNKNOWN
        self.firsts = 0  # mask of characters: see `char_bloom`
        self.calls = 0  # that have begun
        self.pieces: list[Piece] = []
        self.scan: JsonScan | None = None  # where the text ends within JSON that is arguments
        self._create_id = create_id
        self._attempt: list[str] | None = None  # text read since `attempt`, until a call begins

    # ── pieces ──
    def content(self, text: str) -> None:
        if text:
            self.pieces.append(Content(text))

    def reasoning(self, text: str) -> None:
        if text:
            self.pieces.append(Reasoning(text))

    def arguments(self, text: str) -> None:
        last = self.pieces[-1] if self.pieces else None
        if isinstance(last, Arguments):
            self.pieces[-1] = Arguments(last.index, last.text + text)
        elif text:
            self.pieces.append(Arguments(self.calls - 1, text))

    def attempt(self, text: str = "") -> None:
        """Begins an attempt to read a call, of which `text` has been read."""
        self._attempt = [text]

    def begin(self, name: str) -> None:
        """Begins a call: the attempt has succeeded."""
        self._attempt = None
        self.pieces.append(CallBegins(self.calls, self._create_id(self.calls), name))
        self.calls += 1

    @property
    def has_begun(self) -> bool:
        """Returns whether the attempt has succeeded."""
        return self._attempt is None

    def give_up(self) -> None:
        """Turns the text of an attempt into content."""
        self.content("".join(self._attempt or ()))
        self._attempt = None

    def drop(self, text: str) -> None:
        pass

    # ── text ──
    def take(self, length: int) -> str:
        text, self.text = self.text[:length], self.text[length:]
        if self._attempt is not None:
            self._attempt.append(text)
        return text

    def put_back(self, text: str) -> None:
        """Puts text back that was read outside of an attempt."""
        self.text = text + self.text

    def more(self, run: Run = UNKNOWN, firsts: int = 0) -> Reading[bool]:
        """Waits for more text. Returns False if none comes."""
        if self.is_last:
            return False
        self.run, self.firsts = (UNKNOWN if self.text else run), firsts
        yield
        return True

    def accept(self, literal: str) -> Reading[bool]:
        """Reads a literal, if the text begins with it."""
        while not self.text.startswith(literal):
            if not literal.startswith(self.text) or not (yield from self.more()):
                return False
        self.take(len(literal))
        return True

    def match(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Reads the longest match at the beginning of the text; none if the match is too long for a name."""
        while True:
            match = pattern.match(self.text)
            end = 0 if match is None else match.end()
            if end > MAX_NAME:
                return ""
            if end < len(self.text) or not (yield from self.more()):
                return self.take(end)

    def spaces(self) -> Reading[str]:
        """Reads white space."""
        spaces = ""
        while True:
            spaces += self.take(len(self.text) - len(self.text.lstrip(SPACE)))
            if self.text or not (yield from self.more()):
                return spaces

    def until(
        self, marks: Marks, write: Callable[[str], None], run: Run = UNKNOWN, firsts: int = 0
    ) -> Reading[str | None]:
        """Passes text to `write` up to the first of the marks. Returns the mark; None: the text ended before.

        `run`, `firsts`: of the text before a mark, besides the first characters of the marks.
        """
        while True:
            match = marks.whole.search(self.text)
            if match is not None:
                write(self.take(match.start()))
                return self.take(len(match.group()))
            beginning = None if self.is_last else marks.beginning.search(self.text)
            write(self.take(len(self.text) if beginning is None else beginning.start()))
            if not (yield from self.more(run, firsts | marks.firsts)):
                return None

    def calls_of_list(self, read: Callable[[AnswerText], Reading[bool]]) -> Reading[bool]:
        """Reads calls up to the end of their list, of which the bracket has been read. Returns False if `read` does."""
        while True:
            yield from self.spaces()
            if not (yield from read(self)):
                return False
            yield from self.spaces()
            if not (yield from self.accept(",")):
                yield from self.accept("]")
                return True
            self.attempt()

    # ── JSON ──
    def json_string(self) -> Reading[str | None]:
        """Reads a short JSON string. None: there is none."""
        if not (yield from self.accept('"')):
            return None
        while True:
            match = STRING.match(self.text)
            end = 0 if match is None else match.end()
            if end > MAX_NAME:
                return None
            if self.text[end : end + 1] == '"':
                return _unescaped(self.take(end + 1)[:-1])
            if not (yield from self.more()):
                return None

    def json_value(self, write: Callable[[str], None], run: Run = UNKNOWN) -> Reading[bool]:
        """Passes a JSON value to `write`, as the text has it. Returns False if the value has no end."""
        if self.text[:1] not in ("{", "[", '"'):
            return (yield from self._scalar(write))
        scan = JsonScan(0, False, 0, None)
        while True:
            scan_text = scan_token if len(self.text) < MAX_NAME else scan_json
            scan = scan_text(self.text, scan.in_string, scan.depth)
            write(self.take(scan.end))
            if scan.is_whole is not None:
                return scan.is_whole
            if self.is_last:
                write(self.take(len(self.text)))
                return False
            self.run, self.firsts = (UNKNOWN if self.text else run), scan.firsts
            self.scan = scan if self.run is ARGUMENTS else None
            yield
            scan, self.scan = self.scan or scan, None

    def _scalar(self, write: Callable[[str], None]) -> Reading[bool]:
        while True:
            match = SCALAR_END.search(self.text)
            write(self.take(len(self.text) if match is None else match.start()))
            if match is not None:
                return True
            if not (yield from self.more()):
                return False


class JsonScan(NamedTuple):
    """A part of a JSON value: `end` characters, what is open behind them, and whether the value is whole or broken."""

    end: int
    in_string: bool
    depth: int  # of lists and objects
    is_whole: bool | None  # None: the value goes on

    @property
    def firsts(self) -> int:
        return STRING_ENDS if self.in_string else OUTSIDE_ENDS


def scan_json(text: str, in_string: bool, depth: int) -> JsonScan:
    """Scans more text of a JSON value. Leaves a backslash at the end to be scanned with the character behind it."""
    at = 0
    while (match := (IN_STRING if in_string else OUTSIDE).search(text, at)) is not None:
        mark = match.group()
        if mark in ("\\", "<"):
            return JsonScan(match.start(), in_string, depth, None if mark == "\\" else False)
        at = match.end()
        if mark == '"':
            in_string = not in_string
        elif not in_string:
            depth += 1 if mark in "{[" else -1
        if depth <= 0 and not in_string:
            return JsonScan(at, in_string, depth, True)
    return JsonScan(len(text), in_string, depth, None)


scan_token = functools.lru_cache(maxsize=4096)(scan_json)  # tokens repeat: half the time of an id in arguments


def _unescaped(inside: str) -> str:
    try:
        text: str = json.loads(f'"{inside}"', strict=False)
    except ValueError:
        return inside
    return text.encode(errors="replace").decode()  # half a pair of surrogates is no character
