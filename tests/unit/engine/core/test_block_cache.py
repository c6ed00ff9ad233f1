"""The cache's blocks: which are found again, which are emptied first, and what a hash is of."""

import numpy as np
import pytest

from penstock.engine._native import BlockCache
from penstock.engine.core.request import image_salt, root_hash
from tests.property.plain_cache import hash_of

A, B, C = (hash_of(root_hash(b""), bytes([n])) for n in range(3))


def filled(*hashes: bytes, blocks: int = 4) -> tuple[BlockCache, list[int]]:
    """A cache in which these have been computed, by a request that still uses them."""
    cache = BlockCache(blocks)
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


def test_what_has_been_published_is_found_by_others_and_used_by_both() -> None:
    cache, blocks = filled(A, B)
    assert match(cache, A, B, C) == blocks and cache.num_free == 2
    release(cache, *blocks)
    assert cache.num_free == 2 and [cache.ref_count(block) for block in blocks] == [1, 1]
    release(cache, *blocks)
    assert cache.num_free == 4
    cache.check()


def test_what_has_not_been_published_is_not_found() -> None:
    cache, blocks = filled(A)
    assert match(cache, B) == []
    release(cache, *blocks)
    assert match(cache, A) == blocks


def test_prefix_matches_from_its_beginning_to_the_first_missing_block() -> None:
    cache, blocks = filled(A, C)
    assert match(cache, A, B, C) == blocks[:1]


def test_more_than_there_are_cannot_be_taken_and_nothing_is() -> None:
    cache, blocks = filled(A, B)
    assert cache.take(3) is None and cache.num_free == 2
    release(cache, *blocks)
    assert match(cache, A, B) == blocks


def test_empty_blocks_are_taken_before_those_that_can_be_found() -> None:
    cache, blocks = filled(A, B)
    release(cache, *blocks)
    taken = cache.take(2)
    assert taken is not None and not set(taken.tolist()) & set(blocks)
    assert match(cache, A, B) == blocks


def test_of_a_prefix_that_nobody_uses_the_end_is_emptied_first() -> None:
    cache, blocks = filled(A, B)
    release(cache, *blocks)
    cache.take(3)
    assert match(cache, A, B) == blocks[:1]
    cache.check()


def test_what_was_used_last_is_emptied_last() -> None:
    cache, (first, second) = filled(A, B, blocks=2)
    release(cache, first)
    release(cache, second)
    release(cache, *match(cache, A))
    taken = cache.take(1)
    assert taken is not None and taken.tolist() == [second]
    assert match(cache, B) == [] and match(cache, A) == [first]


def test_what_somebody_uses_is_not_emptied() -> None:
    cache, blocks = filled(A, blocks=2)
    release(cache, *blocks)
    assert match(cache, A) == blocks
    assert cache.take(2) is None and cache.take(1) is not None
    assert match(cache, A) == blocks


def test_what_was_computed_twice_is_found_once() -> None:
    cache, blocks = filled(A, A)
    assert match(cache, A) == blocks[:1]
    release(cache, *blocks, blocks[0])
    taken = cache.take(3)
    assert taken is not None and blocks[1] in taken and blocks[0] not in taken
    cache.check()


def test_releasing_too_often_is_a_bug_of_ours_and_says_so() -> None:
    cache, blocks = filled(A)
    release(cache, *blocks)
    with pytest.raises(AssertionError, match="more often than it was taken"):
        release(cache, *blocks)


def test_block_hash_covers_the_blocks_before_the_ids_and_the_images() -> None:
    image, other = b"k" * 32, b"l" * 32
    begins = [
        root_hash(b""),
        root_hash(b"salt"),
        hash_of(root_hash(b""), b"1111"),
    ]
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


def test_what_lies_in_other_blocks_does_not_count() -> None:
    assert image_salt([(b"k" * 32, 8, 8), (b"k" * 32, 32, 1)], 16, 32) == b""
    assert image_salt([(b"k" * 32, 0, 17)], 16, 32) and image_salt([(b"k" * 32, 31, 9)], 16, 32)
