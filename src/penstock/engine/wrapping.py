"""Ready-made pieces of an answer: the lines of server-sent events that a server only has to pass on.

Leaves to the server what each of them begins with (`Announce.head`), and how an answer begins and ends.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.engine.protocol import Announce, FinishReason, Style
from penstock.engine.text import Vocabulary, quoted

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


class Likely(NamedTuple):
    """Log-probabilities of one sampled token: itself first, then the likeliest."""

    ids: list[int]
    values: list[float]


class Wrapping:
    """Of one sample. Text goes between `front` and `back`, quoted, where nothing else is to be said of it."""

    def __init__(self, announce: Announce, sample: int, vocabulary: Vocabulary) -> None:
        """`head` is a JSON object without its last brace, and has one field at least."""
        self._vocabulary = vocabulary
        self._is_chat = announce.style == Style.CHAT
        self._start = b'data: %b,"choices":[{"index":%d,' % (announce.head, sample)
        self.front = self._start + (b'"delta":{"content":"' if self._is_chat else b'"text":"')
        self.back = (b'"}' if self._is_chat else b'"') + _end(b"null", None)
        self.has_begun = not self._is_chat  # a chat's first piece says who speaks
        self._offset = 0  # characters shown

    def piece(self, text: str, likely: Likely | None, reason: FinishReason | None) -> bytes:
        """Empty where there is nothing to say."""
        if not (text or likely or reason):
            return b""
        if not self._is_chat:
            body = b'"text":"%b"' % quoted(text)
        elif not self.has_begun:
            self.has_begun = True
            body = b'"delta":{"role":"assistant","content":"%b"}' % quoted(text)
        elif text or likely:
            body = b'"delta":{"content":"%b"}' % quoted(text)
        else:
            body = b'"delta":{}'
        logprobs = b"null" if likely is None else self._logprobs(likely)
        self._offset += len(text)
        return self._start + body + _end(logprobs, reason)

    def _logprobs(self, likely: Likely) -> bytes:
        values = [b"%.6g" % max(value, LEAST_LOGPROB) for value in likely.values]
        if self._is_chat:
            told = map(self._vocabulary.told, likely.ids)
            first, *others = [b'%b,"logprob":%b' % pair for pair in zip(told, values, strict=True)]
            best = b",".join([b"%b}" % one for one in others])
            return b'{"content":[%b,"top_logprobs":[%b]}]}' % (first, best)
        names = [b'"%b"' % quoted(self._vocabulary.piece(one).decode(errors="replace")) for one in likely.ids]
        best = b",".join({name: b"%b:%b" % (name, value) for name, value in zip(names[1:], values[1:])}.values())
        return b'{"text_offset":[%d],"token_logprobs":[%b],"tokens":[%b],"top_logprobs":[{%b}]}' % (
            self._offset,
            values[0],
            names[0],
            best,
        )


def _end(logprobs: bytes, reason: FinishReason | None) -> bytes:
    return b',"logprobs":%b,"finish_reason":%b}]}\n\n' % (logprobs, REASONS[reason])
