"""Long bodies and the budget of bytes: a body is read when its bytes have been granted, and gives the bytes back."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("starlette")
from starlette.requests import Request

from penstock.engine.media.media_budget import BODY_COPIES, MediaBudget
from penstock.server.errors import ApiError
from penstock.server.heap import Heap
from penstock.server.http.endpoint import LONG, BodyReader
from tests.support.loops import in_a_loop

MOST = 40 * LONG  # bytes of a body
BUDGET = 4 * 4 * BODY_COPIES * 4 * LONG  # four bodies of 256 KB at a time, in the quarter that bodies have


class Upload:
    """A body in parts, as a connection brings it. Counts the parts that were taken."""

    def __init__(self, nbytes: int, *, has_length: bool = True, client: str = "a") -> None:
        self.parts = [b"x" * min(LONG, nbytes - at) for at in range(0, nbytes, LONG)]
        self.taken = 0
        headers = [(b"content-length", b"%d" % nbytes)] if has_length else []
        self.request = Request(
            {"type": "http", "method": "POST", "path": "/", "headers": headers, "client": (client, 1)}, self.receive
        )

    async def receive(self) -> dict[str, Any]:
        part = self.parts[self.taken]
        self.taken += 1
        return {"type": "http.request", "body": part, "more_body": self.taken < len(self.parts)}


class Scene:
    def __init__(self) -> None:
        self.budget = MediaBudget(BUDGET)
        absent: Any = None
        self.reader = BodyReader(MOST, absent, Heap(), self.budget)

    def start(self, upload: Upload, until: asyncio.Event) -> "asyncio.Task[int]":
        async def hold() -> int:
            async with self.reader.receive(upload.request) as body:
                await until.wait()
                return len(body)

        return asyncio.ensure_future(hold())


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    created = Scene()
    yield created
    assert (created.budget.bodies.held, created.budget.bodies.waiting, created.reader.reading_nbytes) == (0, 0, 0)


@in_a_loop
async def test_a_long_body_is_not_read_before_its_bytes_are_granted() -> None:
    async with scene() as item:
        done = asyncio.Event()
        first = [item.start(Upload(4 * LONG), done) for _ in range(4)]
        await settle()
        assert item.budget.bodies.held == item.budget.bodies.nbytes
        late = Upload(4 * LONG)
        waiting = item.start(late, done)
        await settle()
        assert late.taken == 0 and item.budget.bodies.waiting == 1
        done.set()
        assert await asyncio.gather(*first, waiting) == [4 * LONG] * 5


@in_a_loop
async def test_a_short_body_waits_for_nothing() -> None:
    async with scene() as item:
        lease = await item.budget.bodies.acquire("a", item.budget.bodies.nbytes)
        done = asyncio.Event()
        done.set()
        assert await item.start(Upload(LONG), done) == LONG
        lease.release()


@in_a_loop
async def test_body_without_length_holds_its_maximum_until_it_is_read() -> None:
    async with scene() as item:
        done = asyncio.Event()
        task = item.start(Upload(3 * LONG, has_length=False), done)
        await settle()
        assert item.budget.bodies.held == BODY_COPIES * 3 * LONG, "it has come, and the rest was given back"
        done.set()
        assert await task == 3 * LONG


@pytest.mark.parametrize("has_length", [True, False])
@in_a_loop
async def test_a_body_beyond_the_budget_is_refused_with_both_numbers(has_length: bool) -> None:
    async with scene() as item:
        most = item.budget.bodies.nbytes // BODY_COPIES
        upload = Upload(most + LONG, has_length=has_length)
        with pytest.raises(ApiError, match=rf"at most {most} bytes here .*, this one has {most + LONG}") as caught:
            await item.start(upload, asyncio.Event())
        assert caught.value.status == 413 and (upload.taken == 0) == has_length


@in_a_loop
async def test_request_that_leaves_returns_the_bytes_of_its_body() -> None:
    async with scene() as item:
        never = asyncio.Event()
        tasks = [item.start(Upload(16 * LONG), never), item.start(Upload(16 * LONG), never)]
        await settle()
        assert item.budget.bodies.waiting == 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@in_a_loop
async def test_clients_take_turns_by_their_addresses() -> None:
    async with scene() as item:
        lease = await item.budget.bodies.acquire("other", item.budget.bodies.nbytes)
        order: list[str] = []

        async def read(client: str) -> None:
            async with item.reader.receive(Upload(16 * LONG, client=client).request):
                order.append(client)

        tasks = []
        for client in ("a", "a", "a", "b"):
            tasks.append(asyncio.ensure_future(read(client)))
            await settle()
        lease.release()
        await asyncio.gather(*tasks)
        assert order == ["a", "b", "a", "a"]
