"""Decodes base64 chunk by chunk, so that other threads run between two chunks of a long text."""

from __future__ import annotations

import base64
from collections.abc import Iterator

CHUNK = 1 << 18  # characters, a multiple of 4, that are decoded before other threads can run


def decode_base64(text: str, begin: int = 0) -> bytes:
    """Returns the bytes that the text says from `begin` on. Raises ValueError."""
    raw = bytearray()
    for chunk in base64_chunks(text, begin):
        raw += chunk
    return bytes(raw)


def base64_chunks(text: str, begin: int = 0) -> Iterator[bytes]:
    """Yields the bytes that the text says from `begin` on. Raises ValueError."""
    for at in range(begin, len(text), CHUNK):
        chunk = text[at : at + CHUNK]
        yield base64.b64decode(chunk, validate=True)
        if chunk.endswith("=") and at + CHUNK < len(text):
            raise ValueError("more comes after its end")


def decoded_nbytes(text: str, begin: int = 0) -> int:
    """Returns how many bytes the text says from `begin` on, or up to two fewer, without decoding it."""
    return (len(text) - begin) // 4 * 3 - 2
