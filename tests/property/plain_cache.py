"""The cache of blocks and the rows that fill it in plain Python: what the native ones must agree with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256

import numpy as np


def hash_of(parent: bytes, ids: bytes, items: bytes = b"") -> bytes:
    """Of a full block: `parent` is the hash of the block before it, `items` what else stands in it."""
    return sha256(parent + ids + items).digest()


class PlainCache:
    """Every block is in use by somebody, or kept (nobody uses it, and it can be found), or empty."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._references = [0] * blocks
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
            if self._references[block] == 0:
                del self._kept[block]
            self._references[block] += 1
            blocks.append(block)
        return blocks

    def take(self, count: int) -> list[int] | None:
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
            self._references[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """One user less of each. Of a prefix the last are emptied before the first, without which they are lost."""
        references, hashes = self._references, self._hashes
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
        assert self._references[block] > 0, "a block is published that nobody uses"
        if self._hashes[block] is None and one not in self._found:
            self._hashes[block] = one
            self._found[one] = block

    def references(self, block: int) -> int:
        return self._references[block]


class PlainRow:
    """One row of a growth: all of its numbers, and what is known of its blocks."""

    def __init__(self, before: bytes, numbers: list[int], size: int, more: bytes) -> None:
        self.before, self.numbers, self.size, self.more = before, numbers, size, more
        self.own = len(numbers) // size  # the first block that is not full yet: `more` lies there
        self.full = self.own  # blocks of which the hash is known
        self.next = 0  # the next one to be published
        self.born: int | None = None
        self.since = 0
        self.told = self.full

    def hashes(self) -> list[bytes]:
        found, last = [], self.before
        for block in range(self.full):
            its = np.array(self.numbers[block * self.size : (block + 1) * self.size], np.int32).tobytes()
            last = hash_of(last, its, self.more if block == self.own else b"")
            found.append(last)
        return found

    def publish(self, step: int, computed: int, blocks: list[int] | None, cache: PlainCache) -> None:
        """`blocks`: None, as it runs no more."""
        full = computed // self.size
        if self.born is None or self.born > step or full <= self.next:
            return
        self.full = max(self.full, full)
        if blocks is not None and self.since <= step:
            for at in range(self.next, full):
                cache.publish(blocks[at], self.hashes()[at])
        self.next = full
