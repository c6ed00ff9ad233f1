"""The ledger of blocks: what the next life of a core adopts, and ledgers that no core has written."""

import random

import numpy as np
import pytest

from penstock.engine._native import LEDGER_NBYTES, BlockCache
from tests.unit.engine.core.test_block_cache import A, B, C, filled, match, release

BLOCKS = 4


def ledger(blocks: int = BLOCKS) -> np.ndarray:
    return np.zeros(blocks * LEDGER_NBYTES, np.uint8)


def entry(state: int, digest: bytes) -> bytes:
    return state.to_bytes(8, "little") + digest


def adopted(words: np.ndarray) -> BlockCache:
    """Returns the cache of the next life."""
    cache = BlockCache(words.size // LEDGER_NBYTES, words)
    cache.check()
    return cache


def test_next_life_finds_published_blocks_and_has_all_blocks_free() -> None:
    words = ledger()
    _, blocks = filled(A, B, cache=BlockCache(BLOCKS, words))
    cache = adopted(words)
    assert (cache.num_adopted, cache.num_free, cache.damage) == (2, BLOCKS, "")
    assert match(cache, A, B, C) == blocks


def test_taken_block_is_withdrawn_before_any_step_can_overwrite_it() -> None:
    words = ledger()
    cache, blocks = filled(A, B, cache=BlockCache(BLOCKS, words))
    release(cache, *blocks)
    assert cache.take(3) is not None  # two empty blocks, and the end of the prefix
    assert adopted(words).num_adopted == 1 and match(adopted(words), A) == blocks[:1]


def evicted(words: np.ndarray) -> list[int]:
    """Returns the blocks in the order in which the next life takes them."""
    adopted(words)  # a life that uses none of its blocks changes no order
    cache = adopted(words)
    return [cache.take(1)[0] for _ in range(BLOCKS)]


def test_adopted_blocks_are_evicted_in_the_order_of_their_release() -> None:
    words = ledger()
    cache, (a, b, c) = filled(A, B, C, cache=BlockCache(BLOCKS, words))
    release(cache, a)
    release(cache, b)
    release(cache, *match(cache, A))
    assert evicted(words) == [3, b, a, c]  # an empty block, and last the block in use


def test_blocks_in_use_at_a_death_are_evicted_from_the_end_of_a_prefix() -> None:
    words = ledger()
    cache = BlockCache(BLOCKS, words)
    first = cache.take(2)
    release(cache, *reversed(first.tolist()))
    filled(A, B, cache=cache)
    match(cache, A, B)  # a second sample
    _, (c,) = filled(C, cache=cache)
    assert evicted(words) == [3, c, *first]


def test_second_block_of_a_hash_is_not_in_the_ledger() -> None:
    words = ledger()
    filled(A, A, cache=BlockCache(BLOCKS, words))
    assert adopted(words).num_adopted == 1


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        (entry(2, A), "block 0 has the state 2"),
        (entry(1, B) + entry(1, A) + entry(0, A) + entry(1, A), "block 3 has the hash of another block"),
        (random.Random(1).randbytes(BLOCKS * LEDGER_NBYTES), "has the state"),
    ],
    ids=["state that is none", "hash twice", "random bytes"],
)
def test_damaged_ledger_is_cleared_with_a_reason(entries: bytes, reason: str) -> None:
    words = ledger()
    words[: len(entries)] = np.frombuffer(entries, np.uint8)
    cache = adopted(words)
    assert reason in cache.damage and (cache.num_adopted, cache.num_free) == (0, BLOCKS)
    assert adopted(words).damage == ""


@pytest.mark.parametrize("nbytes", [LEDGER_NBYTES * BLOCKS - 1, LEDGER_NBYTES * (BLOCKS + 1), 0])
def test_ledger_of_another_size_is_an_error(nbytes: int) -> None:
    with pytest.raises(ValueError, match=r"ledger of 4 blocks|entries of 40 bytes"):
        BlockCache(BLOCKS, np.zeros(nbytes, np.uint8))


def test_copy_of_a_ledger_is_never_taken_for_it() -> None:
    with pytest.raises(TypeError):
        BlockCache(BLOCKS, np.zeros(2 * LEDGER_NBYTES * BLOCKS, np.uint8)[::2])
