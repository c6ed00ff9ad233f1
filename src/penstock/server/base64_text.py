"""Decodes base64 piece by piece, so that other threads run between two pieces of a long text."""

from __future__ import annotations

import base64
from collections.abc import Iterator

PIECE = 1 << 18  # characters, a multiple of 4, that are decoded before other threads can run


def decode_base64(text: str, begin: int = 0) -> bytes:
    """Returns the bytes that the text says from `begin` on. Raises ValueError."""
    raw = bytearray()
    for piece in base64_pieces(text, begin):
        raw += piece
    return bytes(raw)


def base64_pieces(text: str, begin: int = 0) -> Iterator[bytes]:
    """Yields the bytes that the text says from `begin` on. Raises ValueError."""
    for at in range(begin, len(text), PIECE):
        piece = text[at : at + PIECE]
        yield base64.b64decode(piece, validate=True)
        if piece.endswith("=") and at + PIECE < len(text):
            raise ValueError("more comes after its end")


def decoded_nbytes(text: str, begin: int = 0) -> int:
    """Returns how many bytes the text says from `begin` on, or up to two fewer, without decoding it."""
    return (len(text) - begin) // 4 * 3 - 2
