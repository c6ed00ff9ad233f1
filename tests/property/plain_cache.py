"""The block cache and the prefix hasher in plain Python: what the native ones must agree with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256

import numpy as np


def hash_of(parent: bytes, ids: bytes, items: bytes = b"") -> bytes:
    """Of a full block: `parent` is the hash of the block before it, `items` what else stands in it."""
    return sha256(parent + ids + items).digest()


class PlainCache:
    """Every block is in use, or cached (no references, and found by its hash), or empty."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._references = [0] * blocks
        self._empty = list(range(blocks - 1, -1, -1))  # low ones first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._hashes: list[bytes | None] = [None] * blocks
        self._found: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Cached and empty blocks: as many can be taken."""
        return len(self._empty) + len(self._cached)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Returns the blocks with these hashes, up to the first that no block has; adds a reference to each."""
        blocks = []
        for digest in hashes:
            block = self._found.get(digest)
            if block is None:
                break
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1
            blocks.append(block)
        return blocks

    def take(self, count: int) -> list[int] | None:
        """Takes empty blocks first, then the least recently used cached blocks, which lose their hash.

        None, and nothing is taken, if fewer are free.
        """
        if count > self.num_free:
            return None
        at = max(0, len(self._empty) - count)
        blocks = self._empty[at:][::-1]
        del self._empty[at:]
        for _ in range(count - len(blocks)):
            block, _ = self._cached.popitem(last=False)
            digest = self._hashes[block]
            assert digest is not None, "a cached block without a hash"
            del self._found[digest]
            self._hashes[block] = None
            blocks.append(block)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Removes a reference from each, the last first: the end of a prefix is evicted before its beginning."""
        references, hashes = self._references, self._hashes
        for block in reversed(blocks):
            left = references[block] - 1
            assert left >= 0, "a block was released more often than it was taken"
            references[block] = left
            if left == 0:
                if hashes[block] is None:
                    self._empty.append(block)
                else:
                    self._cached[block] = None

    def publish(self, block: int, digest: bytes) -> None:
        """Makes a block in use findable by its hash, unless another block has that hash already."""
        assert self._references[block] > 0, "a block was published that is not in use"
        if self._hashes[block] is None and digest not in self._found:
            self._hashes[block] = digest
            self._found[digest] = block

    def ref_count(self, block: int) -> int:
        return self._references[block]


class PlainSequence:
    """All token ids of a sequence, and the state of its blocks."""

    def __init__(self, root: bytes, token_ids: list[int], size: int, extra: bytes) -> None:
        self.root, self.token_ids, self.size, self.extra = root, token_ids, size, extra
        self.first_open = len(token_ids) // size  # the block that the prompt does not fill; `extra` belongs to it
        self.full = self.first_open  # blocks with a hash
        self.next_to_publish = 0
        self.first_step: int | None = None
        self.allocated_step = 0
        self.reported = self.full

    def hashes(self) -> list[bytes]:
        hashes, parent = [], self.root
        for block in range(self.full):
            ids = np.array(self.token_ids[block * self.size : (block + 1) * self.size], np.int32).tobytes()
            parent = hash_of(parent, ids, self.extra if block == self.first_open else b"")
            hashes.append(parent)
        return hashes

    def publish(self, step: int, computed: int, blocks: list[int] | None, cache: PlainCache) -> None:
        """`blocks`: None where the sequence does not run any more."""
        full = computed // self.size
        if self.first_step is None or self.first_step > step or full <= self.next_to_publish:
            return
        self.full = max(self.full, full)
        if blocks is not None and self.allocated_step <= step:
            for at in range(self.next_to_publish, full):
                cache.publish(blocks[at], self.hashes()[at])
        self.next_to_publish = full
