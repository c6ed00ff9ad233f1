"""The block cache and the prefix hasher on random traces, against the same in plain Python."""

from __future__ import annotations

import random
from hashlib import sha256

import numpy as np
import pytest

from penstock.engine._native import BlockCache, PrefixHasher, hash_blocks
from tests import tiers
from tests.property.plain_cache import PlainCache, PlainSequence, hash_of

SLOTS, SIZE, BLOCKS, COLUMNS = 5, 4, 48, 16
FREE, RUNNING, PREEMPTED = 0, 1, 2
ROOTS = [sha256(bytes([number])).digest() for number in range(2)]


def ints(numbers: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(numbers, np.int32)


class Both:
    """Steps of which some are in flight, as a scheduler sends them. Everything is done twice, and compared."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.cache, self.plain = BlockCache(BLOCKS), PlainCache(BLOCKS)
        self.hasher = PrefixHasher(self.cache, SLOTS, SIZE)
        self.sequences: list[PlainSequence | None] = [None] * SLOTS
        self.status = np.zeros(SLOTS, np.uint8)
        self.computed, self.known = np.zeros(SLOTS, np.int32), np.zeros(SLOTS, np.int32)
        self.table = np.zeros((SLOTS, COLUMNS), np.int32)
        self.blocks: list[list[int]] = [[] for _ in range(SLOTS)]
        self.flights: list[tuple[int, np.ndarray, list[int]]] = []  # type: ignore[type-arg]
        self.scheduled: list[int] = []
        self.step = 0
        self.shared = self.resumed = self.passed_over = 0  # how often something happened

    def sequence(self, slot: int) -> PlainSequence:
        sequence = self.sequences[slot]
        assert sequence is not None
        return sequence

    def take(self, count: int) -> list[int] | None:
        taken, plain = self.cache.take(count), self.plain.take(count)
        assert (None if taken is None else taken.tolist()) == plain
        return plain

    def match(self, hashes: list[bytes]) -> list[int]:
        blocks = self.cache.match(b"".join(hashes)).tolist()
        assert blocks == self.plain.match(hashes)
        return blocks

    def release(self, blocks: list[int]) -> None:
        self.cache.release(ints(blocks))
        self.plain.release(blocks)

    def join(self, slot: int) -> None:
        root = self.chance.choice(ROOTS)
        prompt = [self.chance.randrange(2) for _ in range(self.chance.randint(1, 3 * SIZE))]
        more = self.chance.choice([b"", b"an image"])
        full = len(prompt) // SIZE * SIZE
        sequence = PlainSequence(root, prompt, SIZE, more)
        hashes = hash_blocks(root, ints(prompt), SIZE)
        assert hashes == b"".join([root, *sequence.hashes()])
        if self.has_begun(slot, sequence, sequence.hashes()):
            self.known[slot] = len(prompt)
            self.hasher.add_sequence(slot, hashes, ints(prompt[full:]), more)
            self.hasher.allocate(slot, sequence.next_to_publish)

    def has_begun(self, slot: int, sequence: PlainSequence, hashes: list[bytes]) -> bool:
        shared = self.match(hashes[: (len(sequence.token_ids) - 1) // SIZE])
        self.shared += len(shared)
        taken = self.take(-(-len(sequence.token_ids) // SIZE) - len(shared))
        if taken is None:
            self.release(shared)
            return False
        self.sequences[slot], self.blocks[slot] = sequence, shared + taken
        self.computed[slot] = len(shared) * SIZE
        self.status[slot], sequence.next_to_publish = RUNNING, len(shared)
        self.scheduled.append(slot)
        return True

    def resume(self, slot: int) -> None:
        sequence = self.sequence(slot)
        assert self.hasher.hashes(slot) == b"".join(sequence.hashes())
        if sequence.first_step is not None and self.has_begun(slot, sequence, sequence.hashes()):
            self.resumed += 1
            self.hasher.allocate(slot, sequence.next_to_publish)

    def give_up(self, slot: int, status: int) -> None:
        if self.status[slot] == RUNNING:
            self.release(self.blocks[slot])
        self.status[slot] = status
        self.computed[slot], self.blocks[slot] = 0, []
        if status == FREE and (sequence := self.sequence(slot)).first_step is not None:
            sequence.first_step = None
            self.hasher.finish(slot)

    def send(self) -> None:
        """Takes a step: all running rows compute, and a row with all known tokens computed samples."""
        self.step += 1
        self.scheduled.clear()
        for slot in range(SLOTS):
            if self.status[slot] == FREE and self.chance.random() < 0.5:
                self.join(slot)
            elif self.status[slot] == PREEMPTED and self.chance.random() < 0.5:
                self.resume(slot)
            elif self.status[slot] == RUNNING and self.chance.random() < 0.05:
                self.give_up(slot, self.chance.choice([FREE, PREEMPTED]))
        sampled = []
        for slot in np.flatnonzero(self.status == RUNNING).tolist():
            need = self.known[slot] // SIZE + 1 - len(self.blocks[slot])
            more = self.take(need) if need > 0 else []
            if more is None or len(self.blocks[slot]) + need > COLUMNS:
                if more:
                    self.release(more)
                self.give_up(slot, FREE)
                if slot in self.scheduled:
                    self.scheduled.remove(slot)
                continue
            self.blocks[slot] += more
            self.table[slot, : len(self.blocks[slot])] = self.blocks[slot]
            self.computed[slot] = min(
                self.known[slot], self.computed[slot] + self.chance.choice([1, 1, SIZE, 3 * SIZE])
            )
            if self.computed[slot] == self.known[slot]:
                self.known[slot] += 1
                sampled.append(slot)
        for slot in self.scheduled:
            self.sequence(slot).allocated_step = self.step
            self.sequence(slot).first_step = self.sequence(slot).first_step or self.step
            self.hasher.schedule(slot, self.step)
        self.flights.append((self.step, self.computed.copy(), sampled))

    def land(self) -> None:
        step, computed, sampled = self.flights.pop(0)
        self.hasher.publish(step, computed, self.status, RUNNING, self.table)
        for slot, sequence in enumerate(self.sequences):
            if sequence is not None:
                sequence.publish(
                    step, int(computed[slot]), self.blocks[slot] if self.status[slot] == RUNNING else None, self.plain
                )
        ids = [self.chance.randrange(2) for _ in sampled]
        filled = self.hasher.append(step, np.array(sampled, np.int64), ints(ids))
        expected = []
        for at, (slot, token) in enumerate(zip(sampled, ids, strict=True)):
            sequence = self.sequence(slot)
            if sequence.first_step is not None and sequence.first_step <= step:
                sequence.token_ids.append(token)
                expected.append(at)
        assert (list(range(len(sampled))) if filled is None else filled.tolist()) == expected
        self.passed_over += filled is not None
        self.check()

    def check(self) -> None:
        self.cache.check()
        assert self.cache.num_free == self.plain.num_free
        assert [self.cache.ref_count(block) for block in range(BLOCKS)] == [
            self.plain.ref_count(b) for b in range(BLOCKS)
        ]
        reported = dict(self.hasher.filled())
        for slot, sequence in enumerate(self.sequences):
            if sequence is None or sequence.first_step is None:
                assert slot not in reported
                continue
            assert self.hasher.first_step(slot) == sequence.first_step and self.hasher.num_tokens(slot) == len(
                sequence.token_ids
            )
            assert self.hasher.hashes(slot) == b"".join(sequence.hashes())
            assert reported.get(slot) == (sequence.full * SIZE if sequence.full != sequence.reported else None)
            sequence.reported = sequence.full


@pytest.mark.parametrize("seed", range(tiers.GROWTH_SEEDS))
def test_prefix_hasher_fills_and_finds_the_same_blocks_as_plain_python(seed: int) -> None:
    both = Both(seed)
    for _ in range(600):
        if len(both.flights) < 4 and both.chance.random() < 0.7:
            both.send()
        elif both.flights:
            both.land()
    assert both.shared > 20 and both.resumed > 2 and both.passed_over > 2, "the trace has shown too little"


def test_hash_blocks_equals_hashlib_for_any_block_size_and_extra_keys() -> None:
    chance = random.Random(1)
    for size in range(1, 60):
        numbers = [chance.randrange(-5, 1 << 31) for _ in range(3 * size + chance.randrange(size))]
        more = [chance.randbytes(chance.randrange(200)) for _ in range(3)]
        expected = [ROOTS[0]]
        for block in range(3):
            expected.append(
                hash_of(expected[-1], ints(numbers[block * size : (block + 1) * size]).tobytes(), more[block])
            )
        assert hash_blocks(ROOTS[0], ints(numbers), size, more) == b"".join(expected)
        assert hash_blocks(ROOTS[0], ints(numbers), size)[:32] == ROOTS[0]


def test_prefix_hasher_refuses_arguments_that_do_not_fit() -> None:
    cache = BlockCache(4)
    hasher = PrefixHasher(cache, 2, SIZE)
    for call in (
        lambda: hasher.first_step(2),
        lambda: hasher.allocate(-1, 0),
        lambda: hasher.add_sequence(0, b"", ints([])),
        lambda: hasher.add_sequence(0, ROOTS[0], ints([1, 2, 3, 4])),
        lambda: hasher.append(1, np.array([2]), ints([1])),
        lambda: hasher.append(1, np.array([0]), ints([])),
        lambda: hasher.publish(1, ints([1]), np.zeros(2, np.uint8), RUNNING, np.zeros((2, 1), np.int32)),
        lambda: cache.release(ints([4])),
        lambda: cache.match(b"short"),
        lambda: hash_blocks(b"short", ints([]), SIZE),
        lambda: hash_blocks(ROOTS[0], ints([1, 2, 3, 4]), SIZE, [b"", b""]),
    ):
        with pytest.raises(ValueError, match=r"expected|there is no"):
            call()
