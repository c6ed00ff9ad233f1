"""Parses the text of an answer, as it comes, into content, reasoning and tool calls."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from penstock.engine.protocol.answer_format import REASONING_MARKS, AnswerFormat
from penstock.engine.text.answer_text import AnswerText, Marks, Reading, Run
from penstock.engine.text.answer_text import Arguments as Arguments
from penstock.engine.text.answer_text import CallBegins as CallBegins
from penstock.engine.text.answer_text import Content as Content
from penstock.engine.text.answer_text import Piece as Piece
from penstock.engine.text.answer_text import Reasoning as Reasoning
from penstock.engine.text.call_formats import CALL_FORMATS, CallFormat
from penstock.engine.text.detokenizer import char_bloom

MISTRAL_ID_LENGTH = 9  # letters and digits: Mistral's templates refuse other ids

_bloom = functools.lru_cache(maxsize=64)(char_bloom)


class ToolCall(NamedTuple):
    id: str
    name: str
    arguments: str  # JSON, unless the model wrote something else


class ParsedAnswer(NamedTuple):
    content: str
    reasoning: str
    calls: list[ToolCall]


def create_call_id(answer_format: AnswerFormat, sample: int, index: int) -> str:
    """Returns the id of a call, which is equal whenever the answer is parsed."""
    digest = hashlib.sha256(f"{sample} {index} {answer_format.call_ids}".encode()).hexdigest()
    return digest[:MISTRAL_ID_LENGTH] if answer_format.tools == "mistral" else f"call_{digest[:24]}"


class AnswerParser:
    """Parses the text of one sample. The pieces so far, joined, are a function of the text so far."""

    def __init__(self, answer_format: AnswerFormat, sample: int = 0) -> None:
        self.is_reasoning = self.has_reasoned = answer_format.reasoning is not None and answer_format.in_reasoning
        self._format = answer_format
        self._text = AnswerText(functools.partial(create_call_id, answer_format, sample))
        self._reading = self._read()
        next(self._reading)

    def feed(self, text: str) -> list[Piece]:
        """Returns what is certain after more of the text."""
        reader = self._text
        reader.text += text
        next(self._reading)
        pieces, reader.pieces = reader.pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """Returns what was held back, after the last text."""
        self._text.is_last = True
        next(self._reading, None)
        pieces, self._text.pieces = self._text.pieces, []
        return pieces

    @property
    def calls(self) -> int:
        """Returns the number of calls that have begun."""
        return self._text.calls

    @property
    def run(self) -> Run:
        """Returns what more text is, if the text has no character of the mask `firsts`: need not be fed."""
        return self._text.run

    @property
    def firsts(self) -> int:
        """Returns a mask of characters: see `char_bloom`."""
        return _bloom(self._text.firsts)

    # ── the parts of an answer ──
    def _read(self) -> Reading[None]:
        if self._format.reasoning is not None:
            yield from self._read_reasoning(*REASONING_MARKS[self._format.reasoning])
        if self._format.tools is None:
            yield from self._text.until(Marks.of(), self._text.content, Run.CONTENT)
        else:
            yield from self._read_calls(CALL_FORMATS[self._format.tools])

    def _read_reasoning(self, opening: str, closing: str) -> Reading[None]:
        text = self._text
        spaces = yield from text.spaces()
        if (yield from text.accept(opening)):
            self.is_reasoning = self.has_reasoned = True
        elif self.is_reasoning:
            text.reasoning(spaces)
        else:
            text.put_back(spaces)
            return
        if (yield from text.until(Marks.of(closing), text.reasoning, Run.REASONING)) is not None:
            self.is_reasoning = False

    def _read_calls(self, call_format: CallFormat) -> Reading[None]:
        """Reads content and calls. White space at the beginning, and behind a call, is content only before content."""
        text = self._text
        mark = call_format.mark or ""
        marks = Marks.of() if call_format.mark is None else Marks.of(mark)
        is_content = False
        while True:
            if is_content:
                if (yield from text.until(marks, text.content, Run.CONTENT)) is None:
                    return
                text.attempt(mark)
            else:
                spaces = yield from text.spaces()
                is_call = not text.calls if call_format.mark is None else (yield from text.accept(mark))
                if not is_call:
                    if text.text or not text.calls:
                        text.content(spaces)
                    is_content = True
                    continue
                text.attempt(spaces + mark)
            yield from call_format.read(text, self._format.types)
            is_content = not text.has_begun
            text.give_up()


def parse_answer(answer_format: AnswerFormat, text: str, sample: int = 0) -> ParsedAnswer:
    """Parses a whole answer."""
    parser = AnswerParser(answer_format, sample)
    return join_pieces([*parser.feed(text), *parser.finish()])


def join_pieces(pieces: Iterable[Piece]) -> ParsedAnswer:
    """Returns the answer that has these pieces."""
    content: list[str] = []
    reasoning: list[str] = []
    begun: list[CallBegins] = []
    arguments: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, CallBegins):
            begun.append(piece)
            arguments.append([])
        elif isinstance(piece, Arguments):
            arguments[piece.index].append(piece.text)
        else:
            (content if isinstance(piece, Content) else reasoning).append(piece.text)
    calls = [ToolCall(call.id, call.name, "".join(parts)) for call, parts in zip(begun, arguments, strict=True)]
    return ParsedAnswer("".join(content), "".join(reasoning), calls)
