"""Blocks of the key-value cache: which are free, how many read each, and which are found again by what lies in them.

Plain numbers: no tensor is touched here. Leaves to the scheduler who gets blocks, and when what lies in one has been
computed.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256

import numpy as np

from penstock.engine.protocol import Ints

_ITEM = struct.Struct("<qqq")


def root_of(salt: bytes) -> bytes:
    """What the first block of a prompt follows."""
    return sha256(salt).digest()


def hash_of(parent: bytes, ids: bytes, items: bytes = b"") -> bytes:
    """Of a full block: `parent` is the hash of the block before it, so equal hashes mean equal prefixes.

    It is cryptographic, as a collision would show one user what another wrote. `ids` are those of the block, always as
    many; `items` what else stands in it.
    """
    return sha256(parent + ids + items).digest()


def items_of(inputs: Iterable[tuple[bytes, int, int]], begin: int, end: int) -> bytes:
    """What stands between these positions instead of text (key, position, length each), and where in it they lie."""
    return b"".join(
        _ITEM.pack(position - begin, length, len(key)) + key
        for key, position, length in inputs
        if position < end and position + length > begin
    )


class KVCache:
    """Every block is in use by somebody, or kept (nobody uses it, and it can be found), or empty.

    All operations take the same time for each block, however many there are.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.references = [0] * blocks
        self._empty = list(range(blocks - 1, -1, -1))  # low ones first
        self._kept: OrderedDict[int, None] = OrderedDict()  # the first is the next to be emptied
        self._hashes: list[bytes | None] = [None] * blocks
        self._found: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """How many can be taken."""
        return len(self._empty) + len(self._kept)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks in which these lie, up to the first that nobody has. Each has one user more."""
        blocks = []
        for one in hashes:
            block = self._found.get(one)
            if block is None:
                break
            if self.references[block] == 0:
                del self._kept[block]
            self.references[block] += 1
            blocks.append(block)
        return blocks

    def take(self, count: int) -> Ints | None:
        """So many blocks for one user each; None, and nothing is taken, if there are fewer.

        Empty ones first; then those that nobody has used for the longest time, which can be found no more.
        """
        if count > self.free:
            return None
        at = max(0, len(self._empty) - count)
        blocks = self._empty[at:][::-1]
        del self._empty[at:]
        for _ in range(count - len(blocks)):
            block, _ = self._kept.popitem(last=False)
            one = self._hashes[block]
            assert one is not None, "a kept block without a hash"
            del self._found[one]
            self._hashes[block] = None
            blocks.append(block)
        for block in blocks:
            self.references[block] = 1
        return np.array(blocks, np.int32)

    def release(self, blocks: Sequence[int]) -> None:
        """One user less of each. Of a prefix the last are emptied before the first, without which they are lost."""
        references, hashes = self.references, self._hashes
        for block in reversed(blocks):
            left = references[block] - 1
            assert left >= 0, "a block was released more often than it was taken"
            references[block] = left
            if left == 0:
                if hashes[block] is None:
                    self._empty.append(block)
                else:
                    self._kept[block] = None

    def publish(self, block: int, one: bytes) -> None:
        """What lies in the block, which somebody uses, has been computed, and can be found by its hash from now on.

        If it lies in another block already, that one is found.
        """
        assert self.references[block] > 0, "a block is published that nobody uses"
        if self._hashes[block] is None and one not in self._found:
            self._hashes[block] = one
            self._found[one] = block

    def check(self) -> None:
        """For tests: raises AssertionError where the parts contradict each other."""
        empty, kept = set(self._empty), set(self._kept)
        assert len(empty) == len(self._empty) and not empty & kept
        for block in range(self.blocks):
            one = self._hashes[block]
            assert (self.references[block] == 0) == (block in empty or block in kept), block
            assert one is None or self._found[one] == block
            assert block not in kept or one is not None
            assert block not in empty or one is None
        assert len(self._found) == sum(one is not None for one in self._hashes)
