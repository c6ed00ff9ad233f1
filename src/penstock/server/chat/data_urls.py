"""Cuts long data URLs out of a body before it is decoded, and puts them back after.

The JSON decoder looks at each character and holds the interpreter throughout, so a thread of its own would not help.
A search for the closing quotation mark is ten times as fast, and other threads run between two searches. `image_urls`
decodes the URLs.
"""

from __future__ import annotations

import secrets

BEGIN = b'"data:image/'
PIECE = 1 << 20  # bytes that are searched in one go
LONG = 64 << 10  # bytes of an image as it stands there: shorter ones are decoded in less than 0.1 ms


def extract_data_urls(body: bytes | bytearray) -> tuple[bytes | bytearray, dict[str, str]]:
    """Returns the body with a mark in place of each long data URL, and the URLs by their marks, which are random.

    A string that may be something else than a data URL stays in the body.
    """
    name = secrets.token_hex(16)
    urls: dict[str, str] = {}
    pieces: list[memoryview | bytes] = []
    view = memoryview(body)
    kept = at = 0  # up to there it is in the pieces, and has been looked at
    while (begin := _begin(body, at)) >= 0:
        at = body.find(b'"', begin + len(BEGIN))
        if at < 0:
            break
        url = _url(view[begin + 1 : at])
        if url is None or body[begin - 1 : begin] == b"\\":  # it is said in a text
            continue
        mark = f"{name} {len(urls)}"
        urls[mark] = url
        pieces += [view[kept : begin + 1], mark.encode()]
        kept = at
    return (b"".join([*pieces, view[kept:]]), urls) if urls else (body, urls)


def _begin(body: bytes | bytearray, at: int) -> int:
    """Returns the position of the next data URL, or -1. Searches piece by piece, so that other threads can run."""
    for start in range(at, len(body), PIECE):
        begin = body.find(BEGIN, start, start + PIECE + len(BEGIN) - 1)
        if begin >= 0:
            return begin
    return -1


def _url(literal: memoryview) -> str | None:
    """Returns the URL in a JSON string; None: it is short, or has escapes."""
    if len(literal) < LONG:
        return None
    try:
        url = str(literal, "ascii")
    except UnicodeDecodeError:
        return None
    if "\\" in url:
        url = url.replace("\\/", "/")  # as some encoders write it
    return None if "\\" in url else url
