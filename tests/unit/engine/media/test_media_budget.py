"""The byte semaphore: bytes held, turns of clients, and cancelled waits."""

import asyncio
import random

import pytest

from penstock.engine.media.media_budget import STAGES, ByteLease, ByteSemaphore, MediaBudget
from tests.support.loops import in_a_loop


class Granted:
    """Waits of a semaphore, and the order in which they were granted."""

    def __init__(self, semaphore: ByteSemaphore) -> None:
        self.semaphore = semaphore
        self.order: list[str] = []
        self.leases: dict[str, ByteLease] = {}

    def start(self, name: str, client: str, nbytes: int) -> "asyncio.Task[None]":
        async def wait() -> None:
            self.leases[name] = await self.semaphore.acquire(client, nbytes)
            self.order.append(name)

        return asyncio.ensure_future(wait())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@in_a_loop
async def test_bytes_are_granted_at_once_where_they_are_free_and_counted() -> None:
    observed: list[tuple[int, int]] = []
    semaphore = ByteSemaphore(10, lambda held, waiting: observed.append((held, waiting)))
    with await semaphore.acquire("a", 6) as lease:
        assert (lease.nbytes, semaphore.held, semaphore.waiting) == (6, 6, 0)
        lease.shrink(8)
        assert lease.nbytes == 6, "a lease does not grow"
        lease.shrink(2)
        assert (lease.nbytes, semaphore.held) == (2, 2)
    lease.release()
    assert semaphore.held == 0
    assert observed[0] == (6, 0) and observed[-1] == (0, 0)


@in_a_loop
async def test_more_than_the_semaphore_has_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="11 bytes, and at most 10 are held at a time"):
        await ByteSemaphore(10).acquire("a", 11)


@in_a_loop
async def test_media_budget_wait_ends_when_enough_bytes_are_free() -> None:
    semaphore = ByteSemaphore(10)
    granted = Granted(semaphore)
    first = await semaphore.acquire("a", 8)
    granted.start("second", "a", 5)
    await settle()
    assert semaphore.waiting == 1 and not granted.order
    first.shrink(6)
    await settle()
    assert not granted.order
    first.shrink(5)
    await settle()
    assert granted.order == ["second"] and (semaphore.held, semaphore.waiting) == (10, 0)


@in_a_loop
async def test_media_budget_serves_clients_in_rotation() -> None:
    semaphore = ByteSemaphore(1)
    granted = Granted(semaphore)
    lease = await semaphore.acquire("a", 1)
    for name, client in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("c1", "c"), ("b2", "b")):
        granted.start(name, client, 1)
        await settle()
    while True:
        lease.release()
        await settle()
        if semaphore.waiting == 0 and semaphore.held == 0:
            break
        lease = granted.leases[granted.order[-1]]
    assert granted.order == ["a1", "b1", "c1", "a2", "b2", "a3"]


@in_a_loop
async def test_a_large_wait_is_not_overtaken_for_ever() -> None:
    semaphore = ByteSemaphore(10)
    granted = Granted(semaphore)
    small = await semaphore.acquire("small", 1)
    granted.start("large", "large", 10)
    await settle()
    granted.start("later", "small", 1)
    await settle()
    assert not granted.order, "what is free is kept for the wait whose turn it is"
    small.release()
    await settle()
    assert granted.order == ["large"]
    granted.leases["large"].release()
    await settle()
    assert granted.order == ["large", "later"]


@in_a_loop
async def test_cancelled_budget_wait_lets_the_next_pass() -> None:
    semaphore = ByteSemaphore(10)
    granted = Granted(semaphore)
    held = await semaphore.acquire("a", 5)
    large = granted.start("large", "b", 10)
    await settle()
    granted.start("small", "c", 5)
    await settle()
    large.cancel()
    await settle()
    assert granted.order == ["small"] and semaphore.held == 10
    held.release()
    granted.leases["small"].release()
    assert (semaphore.held, semaphore.waiting) == (0, 0)


@in_a_loop
async def test_a_wait_that_is_cancelled_as_it_is_granted_gives_its_bytes_back() -> None:
    semaphore = ByteSemaphore(10)
    granted = Granted(semaphore)
    held = await semaphore.acquire("a", 10)
    task = granted.start("late", "b", 10)
    await settle()
    held.release()  # grants it; its task has not run since
    assert semaphore.held == 10
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert semaphore.held == 0 and not granted.order


@in_a_loop
async def test_bytes_already_in_memory_exceed_the_limit_and_others_wait() -> None:
    semaphore = ByteSemaphore(10)
    granted = Granted(semaphore)
    lease = semaphore.take(15)
    granted.start("other", "a", 1)
    await settle()
    assert (semaphore.held, semaphore.waiting) == (15, 1)
    lease.shrink(9)
    await settle()
    assert granted.order == ["other"] and semaphore.held == 10


@in_a_loop
async def test_random_use_never_holds_more_and_leaves_nothing(seed: int) -> None:
    chance = random.Random(seed)
    semaphore = ByteSemaphore(100)
    granted = 0

    async def use() -> None:
        nonlocal granted
        with await semaphore.acquire(chance.choice("abcd"), chance.randint(1, 100)) as lease:
            granted += 1
            assert semaphore.held <= 100
            await asyncio.sleep(chance.random() * 1e-4)
            lease.shrink(chance.randint(0, 100))
            await asyncio.sleep(0)

    tasks = []
    for _ in range(400):
        tasks.append(asyncio.ensure_future(use()))
        if chance.random() < 0.2:
            chance.choice(tasks).cancel()
        if chance.random() < 0.3:
            await asyncio.sleep(0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [result for result in results if isinstance(result, Exception)]
    assert granted > 200, "most were not cancelled"
    assert (semaphore.held, semaphore.waiting) == (0, 0)


@in_a_loop
async def test_the_stages_of_a_budget_do_not_wait_for_each_other() -> None:
    observed: dict[int, tuple[int, int]] = {}
    budget = MediaBudget(1000, lambda stage, held, waiting: observed.update({stage: (held, waiting)}))
    parts = [getattr(budget, stage).nbytes for stage in STAGES]
    assert parts == [250, 250, 500]
    for stage, nbytes in zip(STAGES, parts, strict=True):
        await getattr(budget, stage).acquire("a", nbytes)
    assert observed == {0: (250, 0), 1: (250, 0), 2: (500, 0)}
