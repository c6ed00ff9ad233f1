"""Writes the chunks of an answer: lines of server-sent events that the server only passes on.

The server says what each line begins with (`ChunkFormat.head`), and writes the beginning and the end of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engine.protocol.messages import ChunkFormat, FinishReason, Style
from penstock.engine.text.answer_text import Arguments, CallBegins, Content, Piece, Run
from penstock.engine.text.detokenizer import json_escape

LEAST_LOGPROB = -9999.0  # JSON has no infinity
REASONS = {
    None: b"null",
    FinishReason.STOP: b'"stop"',
    FinishReason.LENGTH: b'"length"',
    FinishReason.ERROR: b'"error"',
    FinishReason.MISSING: b'"error"',
    FinishReason.MISFIT: b'"error"',
    FinishReason.STUCK: b'"error"',
    FinishReason.GRAMMAR_LIMIT: b'"error"',
    FinishReason.GRAMMAR_MISFIT: b'"error"',
}
TOOL_CALLS = b'"tool_calls"'
LOGPROBS = b',"logprobs":'
CONTENT_FRAME = b'"delta":{"content":"', b'"}'
REASONING_FRAME = b'"delta":{"reasoning_content":"', b'","reasoning":"', b'"}'


END = b"}\n\n"
USAGE = b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}'


def _end(reason: bytes) -> bytes:
    return b',"finish_reason":%b}]' % reason + END


MIDDLE = _end(REASONS[None])


class ChunkWriter:
    """Writes the chunks of one sample. A chunk of text alone is `frame`, joined by the escaped text; with
    log-probabilities it is `logprobs_frame`, joined by the text, their JSON and MIDDLE."""

    def __init__(self, chunk_format: ChunkFormat, sample: int) -> None:
        """`chunk_format.head` has one field at least."""
        self.is_chat = chunk_format.style == Style.CHAT
        self.has_begun = not self.is_chat  # the first chunk of a chat has the role
        self.has_ids = chunk_format.has_ids
        self._prompt_tokens = chunk_format.prompt_tokens
        self.is_plain = not self.has_ids and self._prompt_tokens is None  # `front` and `back` are all but the text
        self.offset = 0  # characters written so far, for the log-probabilities of a completion
        self._start = b'data: %b,"choices":[{"index":%d,' % (chunk_format.head, chunk_format.first_index + sample)
        self._frames_of = Run.CONTENT, 0
        self._set_frames(*(CONTENT_FRAME if self.is_chat else (b'"text":"', b'"')))

    def _set_frames(self, front: bytes, *others: bytes) -> None:
        *middle, back = others
        self.logprobs_frame = (self._start + front, *middle, back + LOGPROBS)
        self.frame = (self._start + front, *middle, back + LOGPROBS + b"null" + MIDDLE)

    def choose_frames(self, run: Run, call: int) -> None:
        """Chooses the frames of a text that is a piece by itself. `call`: index of the last call that has begun."""
        if self._frames_of == (run, call):
            return
        self._frames_of = run, call
        if run == Run.ARGUMENTS:
            self._set_frames(b'"delta":{"tool_calls":[{"index":%d,"function":{"arguments":"' % call, b'"}}]}')
        else:
            self._set_frames(*(REASONING_FRAME if run == Run.REASONING else CONTENT_FRAME))

    def resume(self, length: int, has_written: bool) -> None:
        """Continues an answer of which `length` characters have been delivered, or chunks without text."""
        self.has_begun = self.has_begun or length > 0 or has_written
        self.offset += length

    def chunk(
        self,
        text: str,
        logprobs: bytes | None,
        reason: FinishReason | None,
        ids: Sequence[int] = (),
        generated: int = 0,
    ) -> bytes:
        """Returns a chunk; empty if there is nothing to write. `logprobs`: the JSON of its log-probabilities. `ids`: of
        the chunk; `generated`: how many ids the sample has so far."""
        if not (text or logprobs or reason or (self.has_ids and ids)):
            return b""
        if self.is_chat:
            has_content = text or logprobs or not self.has_begun
            body = self._delta([b'"content":"%b"' % json_escape(text)] if has_content else [])
        else:
            body = b'"text":"%b"' % json_escape(text)
        self.offset += len(text)
        return self._finish(body, logprobs, REASONS[reason], ids, generated)

    def parsed_chunk(
        self,
        pieces: list[Piece],
        logprobs: bytes | None,
        reason: FinishReason | None,
        ids: Sequence[int] = (),
        generated: int = 0,
        *,
        has_calls: bool,
    ) -> bytes:
        """Returns a chunk of a parsed answer. `has_calls`: a tool call has begun in the answer."""
        if not (pieces or logprobs or reason or (self.has_ids and ids)):
            return b""
        if len(pieces) == 1 and self.has_begun and self.is_plain and not logprobs and not reason:
            piece = pieces[0]
            if isinstance(piece, Arguments):
                self.choose_frames(Run.ARGUMENTS, piece.index)
                return json_escape(piece.text).join(self.frame)
        fields = _parsed_fields(pieces) or ([] if self.has_begun else [b'"content":""'])
        end = TOOL_CALLS if has_calls and reason == FinishReason.STOP else REASONS[reason]
        return self._finish(self._delta(fields), logprobs, end, ids, generated)

    def _finish(self, body: bytes, logprobs: bytes | None, reason: bytes, ids: Sequence[int], generated: int) -> bytes:
        """Returns the chunk with a choice that begins with `body`."""
        if self.has_ids:
            body += b',"token_ids":[%b]' % b",".join(b"%d" % token_id for token_id in ids)
        end = _end(reason)
        if self._prompt_tokens is not None:
            counts = self._prompt_tokens, generated, self._prompt_tokens + generated
            end = end.removesuffix(END) + USAGE % counts + END
        return self._start + body + LOGPROBS + (logprobs or b"null") + end

    def _delta(self, fields: list[bytes]) -> bytes:
        if not self.has_begun:
            self.has_begun = True
            fields = [b'"role":"assistant"', *fields]
        return b'"delta":{%b}' % b",".join(fields)


def _parsed_fields(pieces: list[Piece]) -> list[bytes]:
    content, reasoning = b"", b""
    begun: dict[int, bytes] = {}
    arguments: dict[int, bytes] = {}
    for piece in pieces:
        if isinstance(piece, CallBegins):
            name = b'"id":"%b","type":"function","function":{"name":"%b",' % (
                piece.id.encode(),
                json_escape(piece.name),
            )
            begun[piece.index], arguments[piece.index] = name, b""
        elif isinstance(piece, Arguments):
            arguments[piece.index] = arguments.get(piece.index, b"") + json_escape(piece.text)
        elif isinstance(piece, Content):
            content += json_escape(piece.text)
        else:
            reasoning += json_escape(piece.text)
    fields = []
    if reasoning:
        fields.append(b'"reasoning_content":"%b","reasoning":"%b"' % (reasoning, reasoning))
    if content:
        fields.append(b'"content":"%b"' % content)
    if arguments:
        calls = [
            b'{"index":%d,%b"arguments":"%b"}}' % (index, begun.get(index, b'"function":{'), text)
            for index, text in arguments.items()
        ]
        fields.append(b'"tool_calls":[%b]' % b",".join(calls))
    return fields
