"""Ready-made pieces of an answer: the lines of server-sent events that a server only has to pass on.

Leaves to the server what each of them begins with (`Announce.head`), and how an answer begins and ends.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from penstock.engine.protocol import Announce, FinishReason, Style
from penstock.engine.text import Vocabulary, quoted

LEAST_LOGPROB = -9999.0  # JSON has no infinity
REASONS = {
    None: b"null",
    FinishReason.STOP: b'"stop"',
    FinishReason.LENGTH: b'"length"',
    FinishReason.ABORT: b'"abort"',
    FinishReason.ERROR: b'"error"',
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
        logprobs = b"null" if likely is None else msgspec.json.encode(self._logprobs(likely))
        self._offset += len(text)
        return self._start + body + _end(logprobs, reason)

    def _logprobs(self, likely: Likely) -> Any:
        pieces = [self._vocabulary.piece(one) for one in likely.ids]
        names = [piece.decode(errors="replace") for piece in pieces]
        values = [max(value, LEAST_LOGPROB) for value in likely.values]
        if not self._is_chat:
            return {
                "text_offset": [self._offset],
                "token_logprobs": values[:1],
                "tokens": names[:1],
                "top_logprobs": [dict(zip(names[1:], values[1:], strict=True))],
            }
        told = [
            {"token": name, "logprob": value, "bytes": list(piece)}
            for name, value, piece in zip(names, values, pieces, strict=True)
        ]
        return {"content": [{**told[0], "top_logprobs": told[1:]}]}


def _end(logprobs: bytes, reason: FinishReason | None) -> bytes:
    return b',"logprobs":%b,"finish_reason":%b}]}\n\n' % (logprobs, REASONS[reason])
