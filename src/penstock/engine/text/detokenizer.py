"""Turns ids into text as they come: whole characters only, and nothing of a stop string or after it.

`output_state` knows the sample of each text, and `sse_chunks` writes texts into chunks.
"""

from __future__ import annotations

import codecs
import functools
import json
import logging
import re
import string
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.engine.cluster.logs import event
from penstock.engine.model_dir import load_tokenizer, tokenizer_path
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import CONTEXT, Ints


class TokenDecoder(Protocol):
    """Decodes the ids of one sample into text, complete characters only."""

    def decode(self, token_id: int) -> str:
        """Decodes one more id. Returns the text that is complete now, never a part of a character."""

    def rest(self) -> str:
        """Returns the text held back, after the last id: U+FFFD for bytes that are no character."""

    @property
    def is_waiting(self) -> bool:
        """Returns whether text is held back."""


class Vocabulary:
    """The text of every id, in tables where a text is just the bytes of its ids, one after the other.

    Three tables lie one after the other: with empty texts for special ids, with their texts, and with empty texts only.
    The row of an id in the first, say, is `SKIP_SPECIAL * stride + id`; an unknown id has the last row of each table.
    """

    SKIP_SPECIAL, KEEP_SPECIAL, NO_TEXT = 0, 1, 2

    def __init__(self, pieces: Sequence[bytes], special: Collection[int] = (), tokenizer: Any = None) -> None:
        """With a tokenizer (of `tokenizers`), it decodes all texts, and `pieces` are only the texts of single ids."""
        self.stride = len(pieces) + 1
        self._pieces = [*pieces, b""]
        self._special = frozenset(special)
        self._tokenizer = tokenizer
        without_special = [b"" if token_id in self._special else piece for token_id, piece in enumerate(self._pieces)]
        self.texts = [*without_special, *self._pieces, *[b""] * self.stride]
        is_complete = [_is_whole(piece) for piece in self._pieces] if tokenizer is None else [False] * self.stride
        is_complete_or_special = [
            token_id in self._special or is_whole for token_id, is_whole in enumerate(is_complete)
        ]
        self.is_table = tokenizer is None
        self.is_whole = np.array(
            [*(is_complete_or_special if self.is_table else is_complete), *is_complete, *[True] * self.stride], np.bool_
        )
        self.is_seen = np.array([len(text) > 0 for text in self.texts], np.bool_)
        masks = [char_bloom(text.decode(errors="replace")) for text in self._pieces]
        shown = [0 if token_id in self._special else mask for token_id, mask in enumerate(masks)]
        self.masks = np.array([*shown, *masks, *[0] * self.stride], np.uint64)  # of their characters: see `char_bloom`
        # Escaped, to stand between the quotes of a JSON string.
        self.quoted = [
            json_escape(text.decode()) if ok else b"" for text, ok in zip(self.texts, self.is_whole.tolist())
        ]

    def rows(self, ids: Ints, bases: Ints) -> Ints:
        """Returns the rows of these ids, each in the table that begins at its `base`."""
        rows: Ints = np.minimum(ids.view(np.uint32), self.stride - 1).astype(np.int32) + bases
        return rows

    def has_table_text(self, places: Ints, firsts: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Returns which of these rows have text that can be shown by itself: whole characters, none of them in the
        mask `firsts`."""
        shows: npt.NDArray[np.bool_] = self.is_whole[places] & (firsts & self.masks[places] == 0)
        return shows

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one id, which may be a part of a character."""
        return self._pieces[token_id] if 0 <= token_id < self.stride else b""

    def stream(self, context: Sequence[int], skip_special: bool) -> TokenDecoder:
        """`context`: the last ids before those of the stream."""
        if self._tokenizer is not None:
            return TokenizerDecoder(self._tokenizer, list(context), skip_special)
        return ByteDecoder(self, self._special if skip_special else frozenset())


def _is_whole(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def char_bloom(characters: str) -> int:
    """Returns 64 bits; each character sets one. Texts without a common bit have no character in common.

    A punctuation mark of ASCII has a bit of its own: marks of tool calls and of JSON are no letters.
    """
    mask = 0
    for character in characters:
        code = ord(character)
        mask |= ASCII_BITS[code] if code < 128 else 1 << 32 + code % 31
    return mask


def _ascii_bit(character: str) -> int:
    if character in string.punctuation:
        return 1 << string.punctuation.index(character)
    return 1 << (32 + ord(character) % 31 if character.isprintable() else 63)


ASCII_BITS = [_ascii_bit(chr(code)) for code in range(128)]


def json_escape(text: str) -> bytes:
    return msgspec.json.encode(text)[1:-1]


class ByteDecoder:
    """Decodes ids with texts that are just their bytes, one after the other."""

    def __init__(self, vocabulary: Vocabulary, without_text: Collection[int]) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._without_text = without_text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def decode(self, token_id: int) -> str:
        return "" if token_id in self._without_text else self._decoder.decode(self._token_bytes(token_id))

    def rest(self) -> str:
        return self._decoder.decode(b"", True)

    @property
    def is_waiting(self) -> bool:
        return bool(self._decoder.getstate()[0])


class TokenizerDecoder:
    """Decodes ids with the tokenizer's own decoder."""

    def __init__(self, tokenizer: Any, context: list[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._before = context  # ids with text that was returned: it decides how the next ones are written
        self._held: list[int] = []
        self._begin()

    def _begin(self) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream(ids=list(self._before), skip_special_tokens=self._skip_special)

    def decode(self, token_id: int) -> str:
        self._held.append(token_id)
        try:
            text: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:  # some decoders change text that they have returned already
            text = self._after()
            self._before, self._held = [token_id], []
            self._begin()
            return text
        if text is None:
            return ""
        self._before, self._held = self._held[-CONTEXT:], []
        return text

    def rest(self) -> str:
        return self._after() if self._held else ""

    def _after(self) -> str:
        before: str = self._decode(self._before)
        text = self._decode([*self._before, *self._held])
        return text[len(before) :] if text.startswith(before) else self._decode(self._held)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)
        return text

    @property
    def is_waiting(self) -> bool:
        return bool(self._held)


# ── what a tokenizer's ids are in bytes ──────────────────────────────────────────────────────────────────────────────
def build_vocabulary(tokenizer: Any) -> Vocabulary:
    """Builds the vocabulary of a `tokenizers.Tokenizer`, in tables if its decoder is one of the two that allow it."""
    added = tokenizer.get_added_tokens_decoder()
    special = [token_id for token_id, token in added.items() if token.special]
    tokens = {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    steps = [step["type"] for step in decoder.get("decoders", [decoder]) if step]
    ids = range(max(tokens, default=-1) + 1)
    if steps == ["ByteLevel"]:
        byte_of = _bytes_of_characters()
        return Vocabulary([_of_characters(tokens.get(token_id, ""), byte_of) for token_id in ids], special)
    if steps[:3] == ["Replace", "ByteFallback", "Fuse"] and decoder["decoders"][0]["pattern"] == {"String": "▁"}:
        return Vocabulary([_with_fallback(tokens.get(token_id, "")) for token_id in ids], special)
    alone = [
        tokenizer.decode([token_id], skip_special_tokens=False).encode() if token_id in tokens else b""
        for token_id in ids
    ]
    return Vocabulary(alone, special, tokenizer)


def _bytes_of_characters() -> Mapping[str, int]:
    """Returns the byte of each character that byte-level vocabularies write: printable ones as themselves, the others
    from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(0x100 + n): byte for n, byte in enumerate(others)}}


def _of_characters(token: str, byte_of: Mapping[str, int]) -> bytes:
    try:
        return bytes([byte_of[character] for character in token])
    except KeyError:
        return token.encode()


def _with_fallback(token: str) -> bytes:
    if re.fullmatch("<0x[0-9A-F]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


# ── stop strings ─────────────────────────────────────────────────────────────────────────────────────────────────────
class StopStrings:
    """An automaton that finds stop strings, one character at a time (Aho and Corasick's).

    A state is the longest suffix of the text that is a prefix of a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.shorter = [0]  # the state of the next shorter such suffix
        self.longest: list[str | None] = [None]  # the longest stop string that ends here
        self.held = [0]  # how many characters of the text may yet become part of one
        depths = [0]
        for stop in stops:
            state = 0
            for character in stop:
                if character not in self.next[state]:
                    self.next[state][character] = len(self.next)
                    self.next.append({})
                    self.shorter.append(0)
                    self.longest.append(None)
                    self.held.append(0)
                    depths.append(depths[state] + 1)
                state = self.next[state][character]
            self.longest[state] = stop
        level = [0]
        while level:
            for state in level:
                for character, after in self.next[state].items():
                    shorter = self.step(self.shorter[state], character) if state else 0
                    self.shorter[after] = shorter
                    self.longest[after] = self.longest[after] or self.longest[shorter]
                    self.held[after] = depths[after] if self.next[after] else self.held[shorter]
            level = [after for state in level for after in self.next[state].values()]

    def step(self, state: int, character: str) -> int:
        while state and character not in self.next[state]:
            state = self.shorter[state]
        return self.next[state].get(character, 0)


stops_of = functools.lru_cache(maxsize=1024)(StopStrings)


class StopStringFilter:
    """Filters the text of one sample: holds back text that may belong to a stop string."""

    __slots__ = ("_held", "_includes_stop", "_state", "_stops", "stop", "stream")

    def __init__(self, stream: TokenDecoder, stops: tuple[str, ...] = (), includes_stop: bool = False) -> None:
        self.stream = stream
        self.stop: str | None = None  # the stop string that has ended the text: no id is added after it
        self._stops = stops_of(stops) if stops else None
        self._includes_stop = includes_stop
        self._state = 0
        self._held = ""

    def add(self, token_id: int, may_stop: bool = True) -> str:
        """Adds an id. Returns the text that may be shown now. Where `may_stop` is False, no stop string ends the text.
        Of several stop strings, the first that is complete ends it; of those, the longest."""
        text = self.stream.decode(token_id)
        return self._show(text, may_stop) if self._stops is not None else text

    def end(self, may_stop: bool = True) -> str:
        """Returns the text held back, after the last id."""
        text = self.stream.rest()
        if self._stops is None:
            return text
        text = self._show(text, may_stop)
        if self.stop is None:
            text += self._held
            self._held = ""
        return text

    @property
    def is_waiting(self) -> bool:
        """Returns whether text is held back."""
        return bool(self._held) or self.stream.is_waiting

    def _show(self, text: str, may_stop: bool) -> str:
        stops = self._stops
        assert stops is not None, "searched for stop strings without any"
        state, step = self._state, stops.step
        for position, character in enumerate(text, len(self._held) + 1):
            state = step(state, character)
            stop = stops.longest[state]
            if stop is not None and may_stop:
                self.stop = stop
                shown = (self._held + text)[: position if self._includes_stop else position - len(stop)]
                self._held = ""
                return shown
        self._state = state
        text = self._held + text
        until = len(text) - stops.held[state]
        self._held = text[until:]
        return text[:until]


def load_vocabulary(config: EngineConfig, tokenizer: Any = None) -> Vocabulary:
    """Loads the vocabulary; without a tokenizer all texts are empty. `tokenizer`: the model's, if it is loaded."""
    if config.simulated is not None and not config.model:
        return Vocabulary([b" %d" % token_id for token_id in range(config.simulated.vocabulary)])
    if tokenizer is None and not tokenizer_path(config).exists():
        event("model without a tokenizer", logging.WARNING, missing=tokenizer_path(config))
        return Vocabulary([])
    return build_vocabulary(load_tokenizer(config) if tokenizer is None else tokenizer)
