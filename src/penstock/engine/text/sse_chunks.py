"""Writes the chunks of an answer: lines of server-sent events that the server only passes on.

The server says what each line begins with (`ChunkFormat.head`), and writes the beginning and the end of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engine.protocol.messages import ChunkFormat, FinishReason, Style
from penstock.engine.text.detokenizer import json_escape

LEAST_LOGPROB = -9999.0  # JSON has no infinity
REASONS = {
    None: b"null",
    FinishReason.STOP: b'"stop"',
    FinishReason.LENGTH: b'"length"',
    FinishReason.ERROR: b'"error"',
    FinishReason.MISSING: b'"error"',
    FinishReason.MISFIT: b'"error"',
    FinishReason.GRAMMAR_STUCK: b'"error"',
    FinishReason.GRAMMAR_LIMIT: b'"error"',
    FinishReason.GRAMMAR_MISFIT: b'"error"',
}
LOGPROBS = b',"logprobs":'


END = b"}\n\n"
USAGE = b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}'


def _end(reason: bytes) -> bytes:
    return b',"finish_reason":%b}]' % reason + END


MIDDLE = _end(REASONS[None])


class ChunkWriter:
    """Writes the chunks of one sample. A chunk of text alone is `front`, the escaped text and `back`; with
    log-probabilities it is `front`, the text, `before_logprobs`, their JSON and MIDDLE."""

    def __init__(self, chunk_format: ChunkFormat, sample: int) -> None:
        """`chunk_format.head` has one field at least."""
        self.is_chat = chunk_format.style == Style.CHAT
        self._start = b'data: %b,"choices":[{"index":%d,' % (chunk_format.head, chunk_format.first_index + sample)
        self.front = self._start + (b'"delta":{"content":"' if self.is_chat else b'"text":"')
        self.before_logprobs = (b'"}' if self.is_chat else b'"') + LOGPROBS
        self.back = self.before_logprobs + b"null" + MIDDLE
        self.has_begun = not self.is_chat  # the first chunk of a chat has the role
        self.has_ids = chunk_format.has_ids
        self._prompt_tokens = chunk_format.prompt_tokens
        self.is_plain = not self.has_ids and self._prompt_tokens is None  # `front` and `back` are all but the text
        self.offset = 0  # characters written so far, for the log-probabilities of a completion

    def resume(self, length: int, has_logprobs: bool) -> None:
        """Continues an answer of which `length` characters have been delivered."""
        self.has_begun = self.has_begun or length > 0 or has_logprobs
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
        if not self.is_chat:
            body = b'"text":"%b"' % json_escape(text)
        elif not self.has_begun:
            self.has_begun = True
            body = b'"delta":{"role":"assistant","content":"%b"}' % json_escape(text)
        elif text or logprobs:
            body = b'"delta":{"content":"%b"}' % json_escape(text)
        else:
            body = b'"delta":{}'
        self.offset += len(text)
        if self.has_ids:
            body += b',"token_ids":[%b]' % b",".join(b"%d" % token_id for token_id in ids)
        end = _end(REASONS[reason])
        if self._prompt_tokens is not None:
            counts = self._prompt_tokens, generated, self._prompt_tokens + generated
            end = end.removesuffix(END) + USAGE % counts + END
        return self._start + body + LOGPROBS + (logprobs or b"null") + end
