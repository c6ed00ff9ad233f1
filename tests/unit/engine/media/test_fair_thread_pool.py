"""Threads that take turns: what goes first, what is dropped, and what becomes of a failure."""

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from penstock.engine.media.fair_thread_pool import HEAD_START, FairThreadPool
from tests.support.loops import in_a_loop


@contextlib.contextmanager
def one_thread() -> Iterator[tuple[FairThreadPool, threading.Event]]:
    """It is busy until the event is set."""
    goes_on = threading.Event()
    with contextlib.closing(FairThreadPool(1, "turns")) as turns:
        try:
            yield turns, goes_on
        finally:
            goes_on.set()


def order(*owners: str) -> list[str]:
    """In which their chunks are done that all came while the only thread was busy."""
    done: list[str] = []

    async def run() -> None:
        with one_thread() as (turns, goes_on):
            begun = threading.Event()
            first = asyncio.ensure_future(turns.run("first", lambda: begun.set() or goes_on.wait(10)))
            await asyncio.to_thread(begun.wait, 10)
            others = [
                asyncio.ensure_future(turns.run(owner, lambda owner=owner: done.append(owner))) for owner in owners
            ]
            await asyncio.sleep(0)  # each has been put
            goes_on.set()
            await asyncio.gather(first, *others)

    asyncio.run(run())
    return done


def test_thread_pool_serves_owners_in_rotation() -> None:
    assert order(*"aaab") == list("abaa")
    assert order(*"abab", *"cc") == list("abcabc")


def test_a_piece_is_overtaken_by_a_bounded_number_of_others() -> None:
    turns = order("a", "a", *map(str, range(2 * HEAD_START)))
    assert turns.index("a", 1) == HEAD_START  # as many as came before it was due


@in_a_loop
async def test_cancelled_task_is_not_run() -> None:
    with one_thread() as (turns, goes_on):
        done = []
        first = asyncio.ensure_future(turns.run("a", lambda: goes_on.wait(10)))
        second = asyncio.ensure_future(turns.run("a", lambda: done.append(2)))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        goes_on.set()
        await first
        assert await turns.run("a", lambda: 3) == 3 and not done
    assert not turns._open and not turns._waiting


@in_a_loop
async def test_closing_the_pool_cancels_waiting_tasks() -> None:
    with one_thread() as (turns, goes_on):
        begun = threading.Event()
        first = asyncio.ensure_future(turns.run("a", lambda: begun.set() or goes_on.wait(10)))
        await asyncio.to_thread(begun.wait, 10)
        second = asyncio.ensure_future(turns.run("a", lambda: 2))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.01, goes_on.set)
        await asyncio.to_thread(turns.close)
        assert await first
        with pytest.raises(asyncio.CancelledError):
            await second


class Much:
    pass


def fail(much: Much) -> Callable[[], None]:
    def work() -> None:
        raise ValueError(f"not with {type(much).__name__}")

    return work


def test_failed_task_raises_and_leaves_no_reference() -> None:
    async def run() -> weakref.ref[Much]:
        with contextlib.closing(FairThreadPool(1, "turns")) as turns:
            much = Much()
            with pytest.raises(ValueError, match="not with Much"):
                await turns.run("a", fail(much))
            return weakref.ref(much)

    gc.disable()  # not even until the next collection
    try:
        reference = asyncio.run(run())
        assert reference() is None
    finally:
        gc.enable()
