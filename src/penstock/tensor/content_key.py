"""A key by content, under which a store keeps a value."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.installing import how_to_install
from penstock.tensor.source import source


def content_key(*contents: Any, salt: bytes = b"") -> bytes:
    """Returns a key by content: blake3 of the bytes, dtypes and shapes of arrays, of bytes and of text.

    Two contents with one key cannot be made, so a hit never shows one user what another has put. Where the content has
    been hashed already (by SHA-256, say), those 32 bytes are as good a key.

    Args:
        contents: arrays, bytes or text, in an order that counts.
        salt: contents under different salts never share a key: give each tenant one if not even the existence of an
            equal value may show.

    Raises:
        ImportError: blake3 is not installed; the text has the command.
        UnsupportedTensor: of a content that has no bytes to hash.

    Examples:
        >>> content_key(b"image", "resized") == content_key(b"image", "resized")
        True
        >>> len(content_key(np.zeros(3), salt=b"tenant 7"))
        32
    """
    try:
        from blake3 import blake3
    except ImportError:
        hint = how_to_install("store")
        raise ImportError(f"content_key needs blake3 ({hint}), or pass keys of 32 bytes of your own") from None
    hashing = blake3()
    for content in (salt, *contents):
        if isinstance(content, str):
            content = content.encode()
            what = b"s"
        elif isinstance(content, (bytes, bytearray)) or _is_bytes(content):
            what = b"b"
        else:
            tensor = source(content)
            what = f"a{tensor.kind.name}{tensor.shape}".encode()
            array = tensor.array
            is_plain = isinstance(array, np.ndarray) and array.flags.c_contiguous and array.dtype.isnative
            content = memoryview(array.reshape(-1).view(np.uint8)) if is_plain and tensor.nbytes else tensor.tobytes()
        nbytes = memoryview(content).nbytes
        hashing.update(
            b"%d:%d:" % (len(what), nbytes) + what
        )  # different lists of contents must not become equal bytes
        hashing.update(content)
    digest: bytes = hashing.digest()
    return digest


def _is_bytes(content: Any) -> bool:
    return isinstance(content, memoryview) and content.format == "B" and content.c_contiguous
