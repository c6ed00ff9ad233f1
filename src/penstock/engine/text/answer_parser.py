"""Parses the text of an answer, as it comes, into content, reasoning and tool calls."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable
from typing import NamedTuple

from penstock.engine.protocol.answer_format import REASONING_MARKS, AnswerFormat
from penstock.engine.text.answer_text import AnswerText, Marks, Reading, Run, scan_token
from penstock.engine.text.answer_text import Arguments as Arguments
from penstock.engine.text.answer_text import CallBegins as CallBegins
from penstock.engine.text.answer_text import Content as Content
from penstock.engine.text.answer_text import Piece as Piece
from penstock.engine.text.answer_text import Reasoning as Reasoning
from penstock.engine.text.call_formats import CALL_FORMATS, NAME, CallFormat

MAX_READ = 256  # characters that are read at a time: each step copies the rest
# Of the messages of gpt-oss, which follow each other in an answer.
HEADER_END = Marks.of("<|message|>")
MESSAGE_BEGINS = ("<|start|>", "<|channel|>")
MESSAGE_ENDS = Marks.of("<|end|>", "<|call|>", "<|return|>", *MESSAGE_BEGINS)
RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
MISTRAL_ID_LENGTH = 9  # letters and digits: Mistral's templates refuse other ids


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


class AnswerParser(AnswerText):
    """Parses the text of one sample. The pieces so far, joined, are a function of the text so far.

    Text without a character of `firsts` need not be fed, unless `run` is UNKNOWN: it is a piece by itself.
    """

    def __init__(self, answer_format: AnswerFormat, sample: int = 0) -> None:
        super().__init__(functools.partial(create_call_id, answer_format, sample))
        self.is_reasoning = self.has_reasoned = answer_format.reasoning is not None and answer_format.in_reasoning
        self._format = answer_format
        self._awaits_call = False  # the text, behind the reasoning, is calls and nothing else
        self._reading = self._read()
        next(self._reading)

    def feed(self, text: str) -> list[Piece]:
        """Returns what is certain after more of the text."""
        if len(text) > MAX_READ:
            return [piece for at in range(0, len(text), MAX_READ) for piece in self.feed(text[at : at + MAX_READ])]
        if self.scan is not None:  # half the time of the general way
            scan = scan_token(text, self.scan.in_string, self.scan.depth)
            if scan.is_whole is None and scan.end == len(text):
                self.scan, self.firsts = scan, scan.firsts
                return [Arguments(self.calls - 1, text)] if text else []
        self.text += text
        next(self._reading)
        pieces, self.pieces = self.pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """Returns what was held back, after the last text."""
        self.is_last = True
        next(self._reading, None)
        if self._awaits_call:
            self.pieces = [piece for piece in self.pieces if not isinstance(piece, Content)]  # of a call that is cut
            if not self.calls and len(self._format.forced) == 1:
                self.begin(self._format.forced[0])
        pieces, self.pieces = self.pieces, []
        return pieces

    # ── the parts of an answer ──
    def _read(self) -> Reading[None]:
        if self._format.has_channels:
            yield from self._read_messages()
            return
        if self._format.reasoning is not None:
            yield from self._read_reasoning(*REASONING_MARKS[self._format.reasoning])
        if self._format.tools is None:
            yield from self.until(Marks.of(), self.content, Run.CONTENT)
        else:
            yield from self._read_calls(CALL_FORMATS[self._format.tools])

    def _read_reasoning(self, opening: str, closing: str) -> Reading[None]:
        spaces = yield from self.spaces()
        if (yield from self.accept(opening)):
            self.is_reasoning = self.has_reasoned = True
        elif self.is_reasoning:
            self.reasoning(spaces)
        else:
            self.put_back(spaces)
            return
        if (yield from self.until(Marks.of(closing), self.reasoning, Run.REASONING)) is not None:
            self.is_reasoning = False

    def _read_messages(self) -> Reading[None]:
        """Reads messages in channels. Text of the channel analysis is reasoning, a message to a function is a call, and
        all other text is content; a line end stands between the messages of a kind."""
        mark: str | None = ""
        kinds: set[Run] = set()
        while mark is not None:
            header = "analysis" if self.is_reasoning else (yield from self._read_header())
            if header is None:
                return
            recipient = RECIPIENT.search(header)
            if recipient is not None and self._format.tools is not None:
                self.begin(recipient[1])
                mark = yield from self.until(MESSAGE_ENDS, self.arguments, Run.ARGUMENTS)
            else:
                self.is_reasoning = header.startswith("analysis")
                self.has_reasoned |= self.is_reasoning
                write, kind = (self.reasoning, Run.REASONING) if self.is_reasoning else (self.content, Run.CONTENT)
                write("\n" if kind in kinds else "")
                kinds.add(kind)
                mark = yield from self.until(MESSAGE_ENDS, write, kind)
            if mark is not None:
                self.is_reasoning = False
                self.put_back(mark if mark in MESSAGE_BEGINS else "")

    def _read_header(self) -> Reading[str | None]:
        """Reads the header of a message: the channel and the recipient. Returns an empty one for text without a header,
        and None if the answer has ended."""
        while not self.text:
            if not (yield from self.more()):
                return None
        if (yield from self.accept("<|start|>")):
            yield from self.accept("assistant")
        parts: list[str] = []
        if (yield from self.accept(" to=")):
            parts += [" to=", (yield from self.match(NAME))]
        if not (yield from self.accept("<|channel|>")):
            self.put_back("".join(parts))  # text without a header, as of a message that the answer continues
            return ""
        recipient, channel = "".join(parts), list[str]()
        if (yield from self.until(HEADER_END, channel.append)) is None:
            return None
        return "".join(channel) + recipient

    def _read_calls(self, call_format: CallFormat) -> Reading[None]:
        """Reads content and calls. White space at the beginning, and behind a call, is content only before content."""
        self._awaits_call = bool(self._format.forced) and not self.is_reasoning
        mark = call_format.mark or ""
        marks = Marks.of() if call_format.mark is None else Marks.of(mark)
        is_content = False
        while True:
            if is_content:
                if (yield from self.until(marks, self.content, Run.CONTENT)) is None:
                    return
                self.attempt(mark)
            else:
                spaces = yield from self.spaces()
                is_call = not self.calls if call_format.mark is None else (yield from self.accept(mark))
                if not is_call:
                    if self.text or not self.calls:
                        self.content(spaces)
                    is_content = True
                    continue
                self.attempt(spaces + mark)
            yield from call_format.read(self, self._format.types)
            is_content = not self.has_begun
            self.give_up()


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
