"""Counts the values in a JSON body before it is decoded, as the decoder blocks all other threads until it has ended.

Decoding takes longer for many values than for long texts: 64 MB of empty lists took 11 s. The values are counted a part
of the body at a time, and other threads run between two parts. The body need not be valid JSON: the count is right up
to the first error, and the decoder decodes nothing beyond it.
"""

from __future__ import annotations

from penstock.server.errors import ApiError

MAX_NBYTES = 8 << 20  # besides long images and embeddings: two million tokens of text
MAX_THINGS = 1 << 16  # strings (names, too), lists and objects: a message of one text is five of them
MAX_VALUES = 1 << 19  # of any kind, but for the first of each list or object: ids, mostly
CHUNK = 64 << 10


def check_json_size(body: bytes | bytearray) -> None:
    """Raises ApiError if decoding the body would block other threads for too long."""
    if len(body) > MAX_NBYTES:
        besides = "images in data URLs and prompt embeddings"
        raise ApiError(413, f"a body has at most {MAX_NBYTES} bytes besides {besides}, this one has more")
    quotes = opened = commas = at = 0
    while at < len(body):
        chunk = body[at : at + CHUNK]
        if len(chunk) == CHUNK and (len(chunk) - len(chunk.rstrip(b"\\"))) % 2:  # what is escaped by it comes next
            chunk = chunk[:-1]
        at += len(chunk)
        # Without quotation marks that end nothing; a backslash that is left stands before something else.
        parts = chunk.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
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
