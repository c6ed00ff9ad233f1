"""The ledger of blocks: what the next life of a core adopts, and ledgers that no core has written."""

import random

import numpy as np
import pytest

from penstock.engine._native import BlockCache, PrefixHasher, ledger_nbytes
from tests.unit.engine.core.test_block_cache import A, B, C, filled, match, release

BLOCKS, SLOTS, SIZE = 4, 2, 4


def ledger(blocks: int = BLOCKS) -> np.ndarray:
    return np.zeros(ledger_nbytes(blocks), np.uint8)


def entry(state: int, digest: bytes) -> bytes:
    return state.to_bytes(8, "little") + digest


def adopted(words: np.ndarray) -> BlockCache:
    """Returns the cache of the next life."""
    cache = BlockCache(words.size // ledger_nbytes(1), words)
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


def unfinished() -> tuple[BlockCache, np.ndarray]:
    """Returns cache and ledger of a life with the ids 7, 8 and 9 after the block A in its first slot, in block 0."""
    words = np.zeros(ledger_nbytes(BLOCKS, SLOTS, SIZE), np.uint8)
    cache = BlockCache(BLOCKS, words, SLOTS, SIZE)
    hasher = PrefixHasher(cache, SLOTS, SIZE)
    hasher.add_sequence(0, A, np.array([7, 8], np.int32))
    hasher.allocate(0, 0)
    hasher.schedule(0, 1)
    table = np.array([cache.take(1), [0]], np.int32)
    for step, computed in ((1, 2), (2, 3)):
        hasher.publish(step, np.array([computed, 0], np.int32), np.array([1, 0], np.uint8), 1, table)
        hasher.append(step, np.array([0]), np.array([9], np.int32))
    return cache, words


@pytest.mark.parametrize(
    ("parent", "ids", "expected"),
    [
        (A, [7, 8, 9, 9], (0, 3)),
        (A, [7, 8, 5], (0, 2)),
        (A, [7], (0, 1)),
        (A, [8], None),
        (A, [], None),
        (B, [7], None),
    ],
)
def test_unfinished_block_is_taken_once_with_the_ids_that_are_equal(
    parent: bytes, ids: list[int], expected: tuple[int, int] | None
) -> None:
    cache = BlockCache(BLOCKS, unfinished()[1], SLOTS, SIZE)
    tail = np.array(ids, np.int32)
    assert (cache.take_tail(parent, tail), cache.take_tail(parent, tail)) == (expected, None)
    assert cache.num_free == BLOCKS - (expected is not None)
    cache.check()


def test_unfinished_block_is_taken_last_and_is_none_then() -> None:
    _, words = unfinished()
    cache = BlockCache(BLOCKS, words, SLOTS, SIZE)
    assert [cache.take(1)[0] for _ in range(BLOCKS)] == [1, 2, 3, 0]
    assert cache.take_tail(A, np.array([7], np.int32)) is None
    assert BlockCache(BLOCKS, words, SLOTS, SIZE).take_tail(A, np.array([7], np.int32)) is None


def test_unfinished_block_is_withdrawn_when_it_is_taken() -> None:
    cache, words = unfinished()
    release(cache, 0)
    assert cache.take(1).tolist() == [0]
    assert BlockCache(BLOCKS, words, SLOTS, SIZE).take_tail(A, np.array([7], np.int32)) is None


@pytest.mark.parametrize("word", [SIZE, BLOCKS << 32 | 1])
def test_unfinished_block_that_cannot_be_is_damage(word: int) -> None:
    _, words = unfinished()
    words[ledger_nbytes(BLOCKS) :][:8] = np.frombuffer(word.to_bytes(8, "little"), np.uint8)
    assert "slot 0 has" in BlockCache(BLOCKS, words, SLOTS, SIZE).damage
    assert BlockCache(BLOCKS, words, SLOTS, SIZE).damage == ""


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        (entry(2, A), "block 0 has the state 2"),
        (entry(1, B) + entry(1, A) + entry(0, A) + entry(1, A), "block 3 has the hash of another block"),
        (random.Random(1).randbytes(ledger_nbytes(BLOCKS)), "has the state"),
    ],
    ids=["state that is none", "hash twice", "random bytes"],
)
def test_damaged_ledger_is_cleared_with_a_reason(entries: bytes, reason: str) -> None:
    words = ledger()
    words[: len(entries)] = np.frombuffer(entries, np.uint8)
    cache = adopted(words)
    assert reason in cache.damage and (cache.num_adopted, cache.num_free) == (0, BLOCKS)
    assert adopted(words).damage == ""


@pytest.mark.parametrize("nbytes", [ledger_nbytes(BLOCKS) - 1, ledger_nbytes(BLOCKS + 1), 0])
def test_ledger_of_another_size_is_an_error(nbytes: int) -> None:
    with pytest.raises(ValueError, match="expected an aligned ledger of 160 bytes"):
        BlockCache(BLOCKS, np.zeros(nbytes, np.uint8))


def test_copy_of_a_ledger_is_never_taken_for_it() -> None:
    with pytest.raises(TypeError):
        BlockCache(BLOCKS, np.zeros(2 * ledger_nbytes(BLOCKS), np.uint8)[::2])
