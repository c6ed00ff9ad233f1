"""Ready-made pieces of an answer: the lines of server-sent events that a server only has to pass on.

Leaves to the server what each of them begins with (`ChunkFormat.head`), and how an answer begins and ends.
"""

from __future__ import annotations

from penstock.engine.output.detokenizer import json_escape
from penstock.engine.protocol.messages import ChunkFormat, FinishReason, Style

LEAST_LOGPROB = -9999.0  # JSON has no infinity
REASONS = {
    None: b"null",
    FinishReason.STOP: b'"stop"',
    FinishReason.LENGTH: b'"length"',
    FinishReason.ABORT: b'"abort"',
    FinishReason.ERROR: b'"error"',
    FinishReason.MISSING: b'"error"',
    FinishReason.MISFIT: b'"error"',
}
LOGPROBS = b',"logprobs":'


def _end(reason: bytes) -> bytes:
    return b',"finish_reason":%b}]}\n\n' % reason


MIDDLE = _end(REASONS[None])


class ChunkWriter:
    """Of one sample. Text goes between `front` and `back`, quoted, where nothing else is to be said of it; or between
    `front` and `told`, which what is said of its log-probabilities follows, and MIDDLE."""

    def __init__(self, its: ChunkFormat, sample: int) -> None:
        """`its.head` has one field at least."""
        self.is_chat = its.style == Style.CHAT
        self._start = b'data: %b,"choices":[{"index":%d,' % (its.head, its.first_index + sample)
        self.front = self._start + (b'"delta":{"content":"' if self.is_chat else b'"text":"')
        self.told = (b'"}' if self.is_chat else b'"') + LOGPROBS
        self.back = self.told + b"null" + MIDDLE
        self.has_begun = not self.is_chat  # a chat's first piece has the role
        self.offset = 0  # characters shown, where log-probabilities are told of a completion

    def piece(self, text: str, likely: bytes | None, reason: FinishReason | None) -> bytes:
        """Empty where there is nothing to say. `likely`: what is said of its log-probabilities."""
        if not (text or likely or reason):
            return b""
        if not self.is_chat:
            body = b'"text":"%b"' % json_escape(text)
        elif not self.has_begun:
            self.has_begun = True
            body = b'"delta":{"role":"assistant","content":"%b"}' % json_escape(text)
        elif text or likely:
            body = b'"delta":{"content":"%b"}' % json_escape(text)
        else:
            body = b'"delta":{}'
        self.offset += len(text)
        return self._start + body + LOGPROBS + (likely or b"null") + _end(REASONS[reason])
