"""Long images in a body, taken out of it before it is decoded and put back after.

A decoder looks at each character, and no thread goes on before it has seen the last: a thread of its own wins nothing.
Where an image ends, the search for its quotation mark knows ten times as fast, and between two of them others go on.
Leaves to `image_urls` whether it is one.
"""

from __future__ import annotations

import secrets

BEGIN = b'"data:image/'
PIECE = 1 << 20  # bytes that are searched in one go
LONG = 64 << 10  # bytes of an image as it stands there: shorter ones are decoded in less than 0.1 ms


def extract_data_urls(body: bytes | bytearray) -> tuple[bytes | bytearray, dict[str, str]]:
    """The body with a mark for each long data URL, and these by their marks, which no client can know.

    What is no URL without doubt stays where it is; of what is cut out, nothing but an image's URL has any meaning.
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
    """Of the next one; -1: there is none. Piece by piece, so that others go on meanwhile."""
    for start in range(at, len(body), PIECE):
        begin = body.find(BEGIN, start, start + PIECE + len(BEGIN) - 1)
        if begin >= 0:
            return begin
    return -1


def _url(literal: memoryview) -> str | None:
    """As JSON says it; None: it is short, or not just said as it is."""
    if len(literal) < LONG:
        return None
    try:
        url = str(literal, "ascii")
    except UnicodeDecodeError:
        return None
    if "\\" in url:
        url = url.replace("\\/", "/")  # as some encoders write it
    return None if "\\" in url else url
