"""Token ids of each request, packed: 32 bits of each id, and how many ids each row has."""

from __future__ import annotations

import itertools
import struct
from typing import Any

PackedTokens = tuple[int, bytes, bytes]  # rows; ids in each row, or nothing where each has one; ids
MAX_ROW = 255


def pack_tokens(rows: Any) -> PackedTokens | None:
    """Returns the rows packed, or None: not a list of lists of ints from 0 to 2**32 - 1, at most MAX_ROW in each.

    vLLM makes all rows alike, by one call: so the first one's type stands for all.
    """
    if type(rows) is not list or (rows and type(rows[0]) is not list):
        return None
    lengths = b""
    try:
        ids = [token for (token,) in rows]
    except ValueError:
        counts = list(map(len, rows))
        if max(counts) > MAX_ROW:
            return None
        lengths = bytes(counts)
        ids = list(itertools.chain.from_iterable(rows))
    if type(sum(ids)) is not int:  # that of ints with any other number among them is not
        return None
    try:
        packed = struct.pack(f"<{len(ids)}I", *ids)
    except struct.error:
        return None
    return len(rows), lengths, packed


def unpack_tokens(packed: PackedTokens) -> list[list[int]]:
    """Returns the rows, lists of their own."""
    count, lengths, ids = packed
    flat = struct.unpack(f"<{sum(lengths) if lengths else count}I", ids)
    if not lengths:
        return [[token] for token in flat]
    ends = list(itertools.accumulate(lengths))
    return [list(flat[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
