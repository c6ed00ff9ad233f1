"""Log-probabilities as JSON, for the SSE chunks of all rows of a step at once.

One format writes all numbers; the text of each token id is prepared once. `sse_chunks` writes the lines around it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain

import msgspec
import numpy as np

from penstock.engine.output.detokenizer import Vocabulary, json_escape
from penstock.engine.output.sse_chunks import LEAST_LOGPROB, ChunkWriter
from penstock.engine.protocol.columns import LogprobRows
from penstock.engine.protocol.messages import Logprobs

MAX_READY = 1 << 15  # ids for which it stands ready, in some 10 MB: what is likely here is likely elsewhere
ROW_END = b"\0"  # JSON writes it otherwise
CHAT = b'{"content":['
COMPLETION = b'{"text_offset":[%d],"token_logprobs":[%.6g],"tokens":['


class LogprobsWriter:
    """Writes the log-probabilities of rows: of each row the sampled token first, then the likeliest."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._name = functools.lru_cache(MAX_READY)(self._make_name)
        self._object = functools.lru_cache(MAX_READY)(self._make_object)

    def told(self, found: LogprobRows, wrappings: Sequence[ChunkWriter | None]) -> dict[int, bytes]:
        """Returns the JSON of each row's logprobs, keyed by row: of rows with logprobs and a `ChunkWriter`."""
        told: dict[int, bytes] = {}
        chats, completions, offsets = [], [], []
        for row in np.flatnonzero(found.counts).tolist():
            wrapping = wrappings[row]
            if wrapping is None:
                continue
            if wrapping.is_chat:
                chats.append(row)
            else:
                completions.append(row)
                offsets.append(wrapping.offset)
        columns = found.of(np.array(chats, np.intp)).columns([])
        if columns is not None:
            told.update(zip(chats, self.of_chats(columns), strict=True))
        columns = found.of(np.array(completions, np.intp)).columns([])
        if columns is not None:
            told.update(zip(completions, self.of_completions(columns, offsets), strict=True))
        return told

    def of_chats(self, found: Logprobs) -> list[bytes]:
        formats = [b""] * (2 * found.ids.size)
        formats[::2] = map(self._object, found.ids.tolist())
        formats[1::2] = chain.from_iterable(map(_after_objects, _counts(found)))
        return _written([CHAT, *formats], _values(found))

    def of_completions(self, found: Logprobs, offsets: Sequence[int]) -> list[bytes]:
        """`offsets`: where each row's text begins. Of likely tokens that look alike, the last is told."""
        names, values = list(map(self._name, found.ids.tolist())), _values(found)
        formats: list[bytes] = []
        kept: list[float] = []
        start = 0
        for count, offset in zip(_counts(found), offsets, strict=True):
            end = start + count
            best = dict(zip(names[start + 1 : end], values[start + 1 : end], strict=True)) if count > 1 else {}
            kept += offset, values[start], *best.values()
            told = b":%.6g,".join(best) + b":%.6g" if best else b""
            formats += COMPLETION, names[start], b'],"top_logprobs":[{', told, b"}]}" + ROW_END
            start = end
        return _written(formats, kept)

    def _make_name(self, one: int) -> bytes:
        """Returns the text of an id as a JSON string, within a format string."""
        name = json_escape(self._vocabulary.piece(one).decode(errors="replace"))
        return b'"%b"' % name.replace(b"%", b"%%")

    def _make_object(self, one: int) -> bytes:
        """What an id is and how likely, in a format: an object of JSON without its last brace."""
        numbers = msgspec.json.encode(list(self._vocabulary.piece(one)))
        return b'{"token":%b,"bytes":%b,"logprob":%%.6g' % (self._make_name(one), numbers)


@functools.lru_cache(64)
def _after_objects(count: int) -> tuple[bytes, ...]:
    """What follows each object of a chat's row: the sampled token's, and those within it. The next row is begun."""
    if count == 1:
        return (b',"top_logprobs":[]}]}' + ROW_END + CHAT,)
    return b',"top_logprobs":[', *[b"},"] * (count - 2), b"}]}]}" + ROW_END + CHAT


def _counts(found: Logprobs) -> list[int]:
    assert found.counts is not None, "rows in columns have counts"
    counts: list[int] = found.counts.tolist()
    return counts


def _values(found: Logprobs) -> list[float]:
    values: list[float] = np.maximum(found.values, np.float32(LEAST_LOGPROB)).tolist()
    return values


def _written(formats: Sequence[bytes], values: Sequence[float]) -> list[bytes]:
    *rows, _ = (b"".join(formats) % tuple(values)).split(ROW_END)
    return rows
