"""Cuts long data URLs and prompt embeddings out of a body before it is decoded, and puts them back after.

The JSON decoder looks at each character and holds the interpreter throughout, so a thread of its own would not help.
A search for the closing quotation mark is ten times as fast, and other threads run between two searches. `media_urls`
decodes the URLs, and `embeds_prompts` the embeddings.
"""

from __future__ import annotations

import re
import secrets

# A data URL, or base64: of npy, of safetensors (8 bytes of a length below 64 KiB, then a brace), of a zip archive, or
# of an image (PNG, JPEG, GIF, WebP).
BEGIN = re.compile(rb'"(?:data:(?:image|video)/|k05VTVBZ|[A-Za-z0-9+/]{4}AAAAAAB7|UEsDB|iVBORw0K|/9j/|R0lGOD|UklGR)')
BEGIN_NBYTES = 13  # of the longest
CHUNK = 1 << 18  # bytes that are searched in one go: 0.2 ms, or 2 ms where every other character is a quotation mark
LONG = 64 << 10  # bytes of an image or a video as it stands there: shorter ones are decoded in less than 0.1 ms


def extract_data_urls(body: bytes | bytearray) -> tuple[bytes | bytearray, dict[str, str]]:
    """Returns the body with a mark in place of each long string that begins as one of these, and the strings by their
    marks, which are random. A string with other escapes than of slashes stays in the body."""
    name = secrets.token_hex(16)
    urls: dict[str, str] = {}
    chunks: list[memoryview | bytes] = []
    view = memoryview(body)
    copied = at = 0  # up to there it is in the chunks, and has been looked at
    while (begin := _begin(body, at)) >= 0:
        at = body.find(b'"', begin + 1)
        if at < 0:
            break
        url = _url(view[begin + 1 : at])
        if url is None or body[begin - 1 : begin] == b"\\":  # it is said in a text
            continue
        mark = f"{name} {len(urls)}"
        urls[mark] = url
        chunks += [view[copied : begin + 1], mark.encode()]
        copied = at
    return (b"".join([*chunks, view[copied:]]), urls) if urls else (body, urls)


def _begin(body: bytes | bytearray, at: int) -> int:
    """Returns the position of the next such string, or -1. Searches chunk by chunk, so that other threads can run."""
    for start in range(at, len(body), CHUNK):
        match = BEGIN.search(body, start, start + CHUNK + BEGIN_NBYTES - 1)
        if match is not None:
            return match.start()
    return -1


def _url(literal: memoryview) -> str | None:
    """Returns the text of a JSON string; None: it is short, or has escapes."""
    if len(literal) < LONG:
        return None
    try:
        url = str(literal, "ascii")
    except UnicodeDecodeError:
        return None
    if "\\" in url:
        url = url.replace("\\/", "/")  # as some encoders write it
    return None if "\\" in url else url
