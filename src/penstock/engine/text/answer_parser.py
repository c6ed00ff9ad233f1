"""Parses the text of an answer, as it comes, into content, reasoning and tool calls.

The pieces so far are a function of the text so far: cuts of the text change only the cuts of the pieces.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import re
from collections.abc import Callable, Generator
from typing import NamedTuple, TypeVar

import msgspec

from penstock.engine.protocol.answer_format import REASONING_MARKS, AnswerFormat

T = TypeVar("T")
Reading = Generator[None, None, T]  # yields where the reader needs more text
MISTRAL_ID_LENGTH = 9  # letters and digits: templates of Mistral refuse other ids


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
    """More of the JSON of a call's arguments. The arguments of a call end with the next call, or with the answer."""

    index: int
    text: str


Piece = Content | Reasoning | CallBegins | Arguments


class ToolCall(NamedTuple):
    id: str
    name: str
    arguments: str  # JSON, unless the model wrote something else


class ParsedAnswer(NamedTuple):
    content: str
    reasoning: str
    calls: list[ToolCall]


class Run(enum.Enum):
    """What a text without a character of `AnswerParser.firsts` is, by itself."""

    UNKNOWN = enum.auto()  # the parser must read it
    CONTENT = enum.auto()
    REASONING = enum.auto()
    ARGUMENTS = enum.auto()


class Marks(NamedTuple):
    whole: re.Pattern[str]
    beginning: re.Pattern[str]  # a part of a mark, at the end of a text
    firsts: str  # the first character of each

    @classmethod
    @functools.cache
    def of(cls, *marks: str) -> Marks:
        parts = [re.escape(mark[:length]) for mark in marks for length in range(1, len(mark))]
        beginning = rf"(?:{'|'.join(parts)})\Z" if parts else r"(?!)"
        return cls(
            re.compile("|".join(map(re.escape, marks)) or r"(?!)"),
            re.compile(beginning),
            "".join({mark[0] for mark in marks}),
        )


def call_id(answer_format: AnswerFormat, sample: int, index: int) -> str:
    """Returns the id of a call, which is equal whenever the answer is parsed."""
    digest = hashlib.sha256(f"{sample} {index} {answer_format.call_ids}".encode()).hexdigest()
    return digest[:MISTRAL_ID_LENGTH] if answer_format.tools == "mistral" else f"call_{digest[:24]}"


class AnswerParser:
    """Parses the text of one sample. `run` and `firsts` say for which text `feed` would return just the text."""

    def __init__(self, answer_format: AnswerFormat, sample: int = 0) -> None:
        self.run = Run.UNKNOWN
        self.firsts = ""
        self.calls = 0  # that have begun
        self.is_reasoning = answer_format.in_reasoning
        self._format = answer_format
        self._sample = sample
        self._text = ""  # that has not been read
        self._is_last = False
        self._pieces: list[Piece] = []
        self._reading = self._answer()
        next(self._reading)

    def feed(self, text: str) -> list[Piece]:
        """Returns what is certain after more of the text."""
        self._text += text
        self.run = Run.UNKNOWN
        next(self._reading)
        return self._returned()

    def finish(self) -> list[Piece]:
        """Returns what was held back, after the last text."""
        self._is_last = True
        next(self._reading, None)
        return self._returned()

    def _returned(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    # ── pieces ──
    def _content(self, text: str) -> None:
        if text:
            self._pieces.append(Content(text))

    def _reasoning(self, text: str) -> None:
        if text:
            self._pieces.append(Reasoning(text))

    # ── text ──
    def _until(self, marks: Marks, write: Callable[[str], None], run: Run) -> Reading[str | None]:
        """Passes text to `write` up to the first of the marks. Returns the mark; None: the text ended before."""
        while True:
            match = marks.whole.search(self._text)
            if match is not None:
                write(self._text[: match.start()])
                self._text = self._text[match.end() :]
                return match.group()
            beginning = None if self._is_last else marks.beginning.search(self._text)
            end = len(self._text) if beginning is None else beginning.start()
            write(self._text[:end])
            self._text = self._text[end:]
            if self._is_last:
                return None
            self.run, self.firsts = (Run.UNKNOWN if self._text else run), marks.firsts
            yield

    # ── grammar ──
    def _answer(self) -> Reading[None]:
        if self._format.reasoning is not None:
            yield from self._until(Marks.of(REASONING_MARKS[self._format.reasoning][1]), self._reasoning, Run.REASONING)
            self.is_reasoning = False
        yield from self._until(Marks.of(), self._content, Run.CONTENT)


def parse_answer(answer_format: AnswerFormat, text: str, sample: int = 0) -> ParsedAnswer:
    """Parses a whole answer."""
    parser = AnswerParser(answer_format, sample)
    return join_pieces([*parser.feed(text), *parser.finish()])


def join_pieces(pieces: list[Piece]) -> ParsedAnswer:
    """Returns the answer whose pieces these are."""
    texts: dict[type[Content] | type[Reasoning], list[str]] = {Content: [], Reasoning: []}
    begun: list[CallBegins] = []
    arguments: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, CallBegins):
            begun.append(piece)
            arguments.append([])
        elif isinstance(piece, Arguments):
            arguments[piece.index].append(piece.text)
        else:
            texts[type(piece)].append(piece.text)
    calls = [ToolCall(call.id, call.name, "".join(parts)) for call, parts in zip(begun, arguments, strict=True)]
    return ParsedAnswer("".join(texts[Content]), "".join(texts[Reasoning]), calls)
