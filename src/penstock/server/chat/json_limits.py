"""How much a body says, found out before it is decoded: a decoder lets no other thread go on before it has ended.

That takes less for long texts than for many pieces: 64 MB of empty lists took 11 s. Here they are counted, a part of
the body at a time, and between two parts others go on. Leaves to the decoder whether it is JSON: up to where it is not,
the count is right, and beyond that nothing is decoded.
"""

from __future__ import annotations

from penstock.server.errors import ApiError

MAX_NBYTES = 8 << 20  # besides long images: two million tokens of text
MAX_THINGS = 1 << 16  # strings (names, too), lists and objects: a message of one text is five of them
MAX_VALUES = 1 << 19  # of any kind, but for the first of each list or object: ids, mostly
PIECE = 64 << 10


def check_json_size(body: bytes | bytearray) -> None:
    """Raises ApiError where decoding it would hold others up."""
    if len(body) > MAX_NBYTES:
        raise ApiError(413, f"a body has at most {MAX_NBYTES} bytes besides images in data URLs, this one has more")
    quotes = opened = commas = at = 0
    while at < len(body):
        piece = body[at : at + PIECE]
        if len(piece) == PIECE and (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # what is escaped by it comes next
            piece = piece[:-1]
        at += len(piece)
        # Without quotation marks that end nothing; a backslash that is left stands before something else.
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[quotes % 2 :: 2])  # of strings
        quotes += len(parts) - 1
        opened += outside.count(b"[") + outside.count(b"{")
        commas += outside.count(b",")
        if (quotes + 1) // 2 + opened > MAX_THINGS:
            raise _too_many(f"{MAX_THINGS} strings, lists and objects")
        if commas > MAX_VALUES:
            raise _too_many(f"{MAX_VALUES} values")


def _too_many(limit: str) -> ApiError:
    return ApiError(400, f"a body has at most {limit}, this one has more", code="invalid_body")
