"""Log-probabilities as JSON, for the SSE chunks of all rows of a step at once.

One format writes all numbers; the text of each token id is prepared once. `sse_chunks` writes the lines around it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain

import msgspec
import numpy as np

from penstock.engine.protocol.columns import LogprobRows
from penstock.engine.protocol.messages import Logprobs
from penstock.engine.text.detokenizer import Vocabulary, json_escape
from penstock.engine.text.sse_chunks import LEAST_LOGPROB, ChunkWriter

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

    def write(self, logprobs: LogprobRows, writers: Sequence[ChunkWriter | None]) -> dict[int, bytes]:
        """Returns the JSON of each row's logprobs, keyed by row: of rows with logprobs and a `ChunkWriter`."""
        written: dict[int, bytes] = {}
        chats, completions, offsets = [], [], []
        for row in np.flatnonzero(logprobs.counts).tolist():
            writer = writers[row]
            if writer is None:
                continue
            if writer.is_chat:
                chats.append(row)
            else:
                completions.append(row)
                offsets.append(writer.offset)
        columns = logprobs.of(np.array(chats, np.intp)).columns([])
        if columns is not None:
            written.update(zip(chats, self.of_chats(columns), strict=True))
        columns = logprobs.of(np.array(completions, np.intp)).columns([])
        if columns is not None:
            written.update(zip(completions, self.of_completions(columns, offsets), strict=True))
        return written

    def of_chats(self, logprobs: Logprobs) -> list[bytes]:
        formats = [b""] * (2 * logprobs.ids.size)
        formats[::2] = map(self._object, logprobs.ids.tolist())
        formats[1::2] = chain.from_iterable(map(_after_objects, _counts(logprobs)))
        return _written([CHAT, *formats], _values(logprobs))

    def of_completions(self, logprobs: Logprobs, offsets: Sequence[int]) -> list[bytes]:
        """`offsets`: where each row's text begins. Of likely tokens that look alike, the last is told."""
        names, values = list(map(self._name, logprobs.ids.tolist())), _values(logprobs)
        formats: list[bytes] = []
        numbers: list[float] = []
        start = 0
        for count, offset in zip(_counts(logprobs), offsets, strict=True):
            end = start + count
            likeliest = dict(zip(names[start:end], values[start:end], strict=True))  # and the sampled token, as OpenAI
            numbers += offset, values[start], *likeliest.values()
            written = b":%.6g,".join(likeliest)
            formats += COMPLETION, names[start], b'],"top_logprobs":[{', written, b":%.6g}]}" + ROW_END
            start = end
        return _written(formats, numbers)

    def _make_name(self, token_id: int) -> bytes:
        """Returns the text of an id as a JSON string, within a format string."""
        name = json_escape(self._vocabulary.token_bytes(token_id).decode(errors="replace"))
        return b'"%b"' % name.replace(b"%", b"%%")

    def _make_object(self, token_id: int) -> bytes:
        """What an id is and how likely, in a format: an object of JSON without its last brace."""
        numbers = msgspec.json.encode(list(self._vocabulary.token_bytes(token_id)))
        return b'{"token":%b,"bytes":%b,"logprob":%%.6g' % (self._make_name(token_id), numbers)


@functools.lru_cache(64)
def _after_objects(count: int) -> tuple[bytes, ...]:
    """What follows each object of a chat's row: the sampled token's, and those within it. The next row is begun."""
    if count == 1:
        return (b',"top_logprobs":[]}]}' + ROW_END + CHAT,)
    return b',"top_logprobs":[', *[b"},"] * (count - 2), b"}]}]}" + ROW_END + CHAT


def _counts(logprobs: Logprobs) -> list[int]:
    assert logprobs.counts is not None, "rows in columns have counts"
    counts: list[int] = logprobs.counts.tolist()
    return counts


def _values(logprobs: Logprobs) -> list[float]:
    values: list[float] = np.maximum(logprobs.values, np.float32(LEAST_LOGPROB)).tolist()
    return values


def _written(formats: Sequence[bytes], values: Sequence[float]) -> list[bytes]:
    *rows, _ = (b"".join(formats) % tuple(values)).split(ROW_END)
    return rows
