"""The native cache of blocks and the rows that fill it, on random traces, against the same in plain Python."""

from __future__ import annotations

import random
from hashlib import sha256

import numpy as np
import pytest

from penstock._native import BlockCache, Growth, chain
from tests import tiers
from tests.property.plain_cache import PlainCache, PlainRow, hash_of

ROWS, SIZE, BLOCKS, COLUMNS = 5, 4, 48, 16
FREE, RUNNING, PREEMPTED = 0, 1, 2
ROOTS = [sha256(bytes([one])).digest() for one in range(2)]


def ints(numbers: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(numbers, np.int32)


class Both:
    """Steps of which some are in flight, as a scheduler sends them. Everything is done twice, and compared."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.cache, self.plain = BlockCache(BLOCKS), PlainCache(BLOCKS)
        self.growth = Growth(self.cache, ROWS, SIZE)
        self.rows: list[PlainRow | None] = [None] * ROWS
        self.status = np.zeros(ROWS, np.uint8)
        self.computed, self.known = np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int32)
        self.table = np.zeros((ROWS, COLUMNS), np.int32)
        self.blocks: list[list[int]] = [[] for _ in range(ROWS)]
        self.flights: list[tuple[int, np.ndarray, list[int]]] = []  # type: ignore[type-arg]
        self.comers: list[int] = []
        self.step = 0
        self.found = self.resumed = self.passed_over = 0  # how often something happened

    def row(self, row: int) -> PlainRow:
        its = self.rows[row]
        assert its is not None
        return its

    def take(self, count: int) -> list[int] | None:
        taken, plain = self.cache.take(count), self.plain.take(count)
        assert (None if taken is None else taken.tolist()) == plain
        return plain

    def match(self, hashes: list[bytes]) -> list[int]:
        found = self.cache.match(b"".join(hashes)).tolist()
        assert found == self.plain.match(hashes)
        return found

    def release(self, blocks: list[int]) -> None:
        self.cache.release(ints(blocks))
        self.plain.release(blocks)

    def join(self, row: int) -> None:
        root = self.chance.choice(ROOTS)
        prompt = [self.chance.randrange(2) for _ in range(self.chance.randint(1, 3 * SIZE))]
        more = self.chance.choice([b"", b"an image"])
        full = len(prompt) // SIZE * SIZE
        its = PlainRow(root, prompt, SIZE, more)
        hashes = chain(root, ints(prompt), SIZE)
        assert hashes == b"".join([root, *its.hashes()])
        if self.has_begun(row, its, its.hashes()):
            self.known[row] = len(prompt)
            self.growth.join(row, hashes, ints(prompt[full:]), more)
            self.growth.begin(row, its.next)

    def has_begun(self, row: int, its: PlainRow, hashes: list[bytes]) -> bool:
        found = self.match(hashes[: (len(its.numbers) - 1) // SIZE])
        self.found += len(found)
        taken = self.take(-(-len(its.numbers) // SIZE) - len(found))
        if taken is None:
            self.release(found)
            return False
        self.rows[row], self.blocks[row] = its, found + taken
        self.computed[row] = len(found) * SIZE
        self.status[row], its.next = RUNNING, len(found)
        self.comers.append(row)
        return True

    def resume(self, row: int) -> None:
        its = self.row(row)
        assert self.growth.hashes(row) == b"".join(its.hashes())
        if its.born is not None and self.has_begun(row, its, its.hashes()):
            self.resumed += 1
            self.growth.begin(row, its.next)

    def give_up(self, row: int, status: int) -> None:
        if self.status[row] == RUNNING:
            self.release(self.blocks[row])
        self.status[row] = status
        self.computed[row], self.blocks[row] = 0, []
        if status == FREE and (its := self.row(row)).born is not None:
            its.born = None
            self.growth.end(row)

    def send(self) -> None:
        """A step: all who run compute something, and who has computed all that is known samples."""
        self.step += 1
        self.comers.clear()
        for row in range(ROWS):
            if self.status[row] == FREE and self.chance.random() < 0.5:
                self.join(row)
            elif self.status[row] == PREEMPTED and self.chance.random() < 0.5:
                self.resume(row)
            elif self.status[row] == RUNNING and self.chance.random() < 0.05:
                self.give_up(row, self.chance.choice([FREE, PREEMPTED]))
        sampled = []
        for row in np.flatnonzero(self.status == RUNNING).tolist():
            need = self.known[row] // SIZE + 1 - len(self.blocks[row])
            more = self.take(need) if need > 0 else []
            if more is None or len(self.blocks[row]) + need > COLUMNS:
                if more:
                    self.release(more)
                self.give_up(row, FREE)
                if row in self.comers:
                    self.comers.remove(row)
                continue
            self.blocks[row] += more
            self.table[row, : len(self.blocks[row])] = self.blocks[row]
            self.computed[row] = min(self.known[row], self.computed[row] + self.chance.choice([1, 1, SIZE, 3 * SIZE]))
            if self.computed[row] == self.known[row]:
                self.known[row] += 1
                sampled.append(row)
        for row in self.comers:
            self.row(row).since = self.step
            self.row(row).born = self.row(row).born or self.step
            self.growth.since(row, self.step)
        self.flights.append((self.step, self.computed.copy(), sampled))

    def land(self) -> None:
        step, computed, sampled = self.flights.pop(0)
        self.growth.publish(step, computed, self.status, RUNNING, self.table)
        for row, its in enumerate(self.rows):
            if its is not None:
                its.publish(
                    step, int(computed[row]), self.blocks[row] if self.status[row] == RUNNING else None, self.plain
                )
        ids = [self.chance.randrange(2) for _ in sampled]
        theirs = self.growth.keep(step, np.array(sampled, np.int64), ints(ids))
        expected = []
        for at, (row, one) in enumerate(zip(sampled, ids, strict=True)):
            its = self.row(row)
            if its.born is not None and its.born <= step:
                its.numbers.append(one)
                expected.append(at)
        assert (list(range(len(sampled))) if theirs is None else theirs.tolist()) == expected
        self.passed_over += theirs is not None
        self.check()

    def check(self) -> None:
        self.cache.check()
        assert self.cache.free == self.plain.free
        assert [self.cache.references(one) for one in range(BLOCKS)] == [
            self.plain.references(b) for b in range(BLOCKS)
        ]
        told = dict(self.growth.filled())
        for row, its in enumerate(self.rows):
            if its is None or its.born is None:
                assert row not in told
                continue
            assert self.growth.born(row) == its.born and self.growth.count(row) == len(its.numbers)
            assert self.growth.hashes(row) == b"".join(its.hashes())
            assert told.get(row) == (its.full * SIZE if its.full != its.told else None)
            its.told = its.full


@pytest.mark.parametrize("seed", range(tiers.GROWTH_SEEDS))
def test_rows_fill_the_same_blocks_and_find_the_same_again_as_in_plain_python(seed: int) -> None:
    both = Both(seed)
    for _ in range(600):
        if len(both.flights) < 4 and both.chance.random() < 0.7:
            both.send()
        elif both.flights:
            both.land()
    assert both.found > 20 and both.resumed > 2 and both.passed_over > 2, "the trace has shown too little"


def test_a_chain_is_what_hashlib_says_of_blocks_of_any_length_with_anything_else_in_them() -> None:
    chance = random.Random(1)
    for size in range(1, 60):
        numbers = [chance.randrange(-5, 1 << 31) for _ in range(3 * size + chance.randrange(size))]
        more = [chance.randbytes(chance.randrange(200)) for _ in range(3)]
        expected = [ROOTS[0]]
        for block in range(3):
            expected.append(
                hash_of(expected[-1], ints(numbers[block * size : (block + 1) * size]).tobytes(), more[block])
            )
        assert chain(ROOTS[0], ints(numbers), size, more) == b"".join(expected)
        assert chain(ROOTS[0], ints(numbers), size)[:32] == ROOTS[0]


def test_what_does_not_fit_is_refused() -> None:
    cache = BlockCache(4)
    growth = Growth(cache, 2, SIZE)
    for call in (
        lambda: growth.born(2),
        lambda: growth.begin(-1, 0),
        lambda: growth.join(0, b"", ints([])),
        lambda: growth.join(0, ROOTS[0], ints([1, 2, 3, 4])),
        lambda: growth.keep(1, np.array([2]), ints([1])),
        lambda: growth.keep(1, np.array([0]), ints([])),
        lambda: growth.publish(1, ints([1]), np.zeros(2, np.uint8), RUNNING, np.zeros((2, 1), np.int32)),
        lambda: cache.release(ints([4])),
        lambda: cache.match(b"short"),
        lambda: chain(b"short", ints([]), SIZE),
        lambda: chain(ROOTS[0], ints([1, 2, 3, 4]), SIZE, [b"", b""]),
    ):
        with pytest.raises(ValueError, match=r"expected|there is no|hashes have"):
            call()
