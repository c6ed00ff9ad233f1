"""The cache's blocks: which are found again, which are emptied first, and what a hash is of."""

import numpy as np
import pytest

from penstock.engine._native import BlockCache
from penstock.engine.core.request import image_salt, root_hash
from tests.property.plain_cache import hash_of

A, B, C = (hash_of(root_hash(b""), bytes([n])) for n in range(3))


def filled(*hashes: bytes, blocks: int = 4, cache: BlockCache | None = None) -> tuple[BlockCache, list[int]]:
    """A cache in which these have been computed, by a request that still uses them."""
    cache = cache or BlockCache(blocks)
    taken = cache.take(len(hashes))
    assert taken is not None
    for block, digest in zip(taken.tolist(), hashes, strict=True):
        cache.publish(block, digest)
    return cache, taken.tolist()


def match(cache: BlockCache, *hashes: bytes) -> list[int]:
    blocks: list[int] = cache.match(b"".join(hashes)).tolist()
    return blocks


def release(cache: BlockCache, *blocks: int) -> None:
    cache.release(np.array(blocks, np.int32))


def test_releasing_a_block_too_often_is_an_assertion_error() -> None:
    cache, blocks = filled(A)
    release(cache, *blocks)
    with pytest.raises(AssertionError, match="more often than it was taken"):
        release(cache, *blocks)


def test_block_hash_covers_the_blocks_before_the_ids_and_the_images() -> None:
    image, other = b"k" * 32, b"l" * 32
    begins = [root_hash(b""), root_hash(b"salt"), hash_of(root_hash(b""), b"1111")]
    items = [
        [],
        [(image, 16, 4)],
        [(other, 16, 4)],
        [(image, 17, 4)],  # it lies elsewhere
        [(image, 12, 8)],  # another part of it lies here
        [(image, 16, 5)],
        [(image, 16, 4), (image, 20, 4)],
    ]
    hashes = {
        hash_of(begin, ids, image_salt(images, 16, 32))
        for begin in begins
        for ids in (b"2222", b"2223")
        for images in items
    }
    assert len(hashes) == len(begins) * 2 * len(items)


def test_image_of_another_block_does_not_change_the_hash() -> None:
    assert image_salt([(b"k" * 32, 8, 8), (b"k" * 32, 32, 1)], 16, 32) == b""
    assert image_salt([(b"k" * 32, 0, 17)], 16, 32) and image_salt([(b"k" * 32, 31, 9)], 16, 32)
