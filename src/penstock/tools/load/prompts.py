"""Bodies of requests: random prompts of so many tokens, images, videos, or lines of a file; the same for a seed."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from penstock.tools.load.videos import video_url

# Short words that most tokenizers know as one token each.
WORDS = (
    "a the of and to in is it you that he was for on are with as his they at be this from have or by one had not but "
    "what all were when we there can an your which their said if do will each about how up out them then she many some "
    "so these would other into has more her two like him see time could no make than first been its who now people my"
).split()
PROBES = (16, 144)  # words of two prompts, from which tokens per word and tokens of every prompt are computed
TOKENS_PER_WORD = 1.3  # if the server reports no usage
TILE = 16  # pixels on a side that have one colour: an image that can be compressed, as most can, but not to nothing


class Between(NamedTuple):
    """A number that is drawn evenly from a range, its ends included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Between:
        """Parses `128` or `64-256`. Raises ValueError."""
        low, _, high = text.partition("-")
        if not (low.isdecimal() and (high or low).isdecimal() and 1 <= int(low) <= int(high or low)):
            raise ValueError(f"a number like 128, or a range like 64-256, not {text!r}")
        return cls(int(low), int(high or low))

    def draw(self, chance: random.Random) -> int:
        return chance.randint(*self)


class Size(NamedTuple):
    """Tokens of a prompt by its words."""

    per_word: float = TOKENS_PER_WORD
    always: float = 0.0

    @classmethod
    def of(cls, tokens: Sequence[int]) -> Size:
        """Computes the size from the server's token counts of the two probes."""
        (few, many), (low, high) = PROBES, tokens
        per_word = max((high - low) / (many - few), 0.01)
        return cls(per_word, low - few * per_word)

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.always) / self.per_word))


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command line about requests."""

    model: str
    is_chat: bool
    input_len: Between
    output_len: Between
    images: int = 0
    image_size: tuple[int, int] = (256, 256)
    videos: int = 0
    video_seconds: Between = Between(4, 4)
    video_size: tuple[int, int] = (320, 240)
    video_fps: int = 12
    ignore_eos: bool = False
    seed: int = 0


Body = tuple[str, bytes]  # a path, and the body of the request
Lines = list[tuple[str, bytes]]  # of a file: the place of each line for errors, and its content


def text_of(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(WORDS, k=words))


def probe(options: RequestOptions, words: int) -> Body:
    """Builds a request with a prompt of so many words, without images or videos, that is answered with one token."""
    text = text_of(random.Random(f"{options.seed} probe {words}"), words)
    return _text_body(options, text, 1)


def build_body(options: RequestOptions, size: Size, index: int, purpose: str) -> Body:
    """Builds the request of that number; all differ."""
    chance = random.Random(f"{options.seed} {purpose} {index}")
    content: Any = text_of(chance, size.words(options.input_len.draw(chance)))
    if options.images or options.videos:
        images = [("image", image(chance, *options.image_size)) for _ in range(options.images)]
        videos = [_video(options, chance) for _ in range(options.videos)]
        parts = [{"type": f"{kind}_url", f"{kind}_url": {"url": url}} for kind, url in [*images, *videos]]
        content = [*parts, {"type": "text", "text": content}]
    return _text_body(options, content, options.output_len.draw(chance))


def _video(options: RequestOptions, chance: random.Random) -> tuple[str, str]:
    seconds = options.video_seconds.draw(chance)
    return "video", video_url(chance, seconds, *options.video_size, options.video_fps)


def _text_body(options: RequestOptions, content: Any, tokens: int, **more: Any) -> Body:
    fields = {"messages": [{"role": "user", "content": content}]} if options.is_chat else {"prompt": content}
    return _body(options, {"max_tokens": tokens, **fields, **more})


def _body(options: RequestOptions, fields: dict[str, Any]) -> Body:
    """Builds a request. `fields` take precedence over the defaults."""
    body: dict[str, Any] = {"model": options.model, "temperature": 0, "stream_options": {"include_usage": True}}
    if options.ignore_eos:
        body["ignore_eos"] = True
    path = "/v1/chat/completions" if options.is_chat else "/v1/completions"
    return path, msgspec.json.encode({**body, **fields, "stream": True})


# ── from a file ──────────────────────────────────────────────────────────────────────────────────────────────────────
def read(path: Path) -> Lines:
    """Reads the lines of a file that are not empty. Raises OSError, and ValueError if there is none."""
    lines = [(f"{path}, line {number}", line) for number, line in enumerate(path.read_bytes().splitlines(), 1)]
    if not (lines_with_text := [entry for entry in lines if entry[1].strip()]):
        raise ValueError(f"{path} has no lines")
    return lines_with_text


def build_from_lines(lines: Lines, options: RequestOptions, requests: int) -> list[Body]:
    """Builds so many requests, from the lines in turn. Raises ValueError if a line is not a prompt."""
    bodies = [_of_line(where, line, options) for where, line in lines]
    return [bodies[index % len(bodies)] for index in range(requests)]


def _of_line(where: str, line: bytes, options: RequestOptions) -> Body:
    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(f"{where}: {error}") from None
    if isinstance(value, str) or (isinstance(value, list) and not options.is_chat):
        return _text_body(options, value, options.output_len.high)
    key = "messages" if options.is_chat else "prompt"
    if not isinstance(value, dict) or not ({key, "prompt"} & value.keys()):
        kinds = "a text, or an object with" if options.is_chat else "a text, a list of ids, or an object with"
        raise ValueError(f"{where}: expected {kinds} {key!r}, and fields of the request's body")
    if key in value:
        return _body(options, {"max_tokens": options.output_len.high, **value})
    return _text_body(options, value.pop("prompt"), options.output_len.high, **value)


# ── images ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def image(chance: random.Random, width: int, height: int) -> str:
    """Returns a data URL of a PNG of random coloured tiles."""
    tiles = np.frombuffer(chance.randbytes(-(-width // TILE) * -(-height // TILE) * 3), np.uint8)
    tiles = tiles.reshape(-(-height // TILE), -(-width // TILE), 3)
    pixels = tiles.repeat(TILE, 0).repeat(TILE, 1)[:height, :width]
    lines = np.zeros((height, 1 + width * 3), np.uint8)  # each begins with the number of its filter: none
    lines[:, 1:] = pixels.reshape(height, width * 3)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # eight bits each of red, green and blue
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines.tobytes(), 1)), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
