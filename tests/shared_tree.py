"""One tree for all scenes of a module, each of which is a test of its own: a tree takes seconds to start.

A scene that kills or stops a process has a tree of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager

from tests.conftest import must_leave_nothing
from tests.e2e.test_server import KEY, Served

Scene = Callable[[Served], Awaitable[None]]
BREATHS = 5  # of the loop, in which connections that a scene has closed are closed


class SharedTree:
    """A tree that serves, and the event loop in which it lives; between scenes the loop rests."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tree: Served) -> None:
        self.loop = loop
        self.tree = tree

    def play(self, *scenes: Scene, within: float = 30.0) -> None:
        """One after the other, each within so many seconds, with a client that has no connection yet."""

        async def play_all() -> None:
            async with self.tree.with_key(KEY) as self.tree.client:
                for scene in scenes:
                    await asyncio.wait_for(scene(self.tree), within)
            for _ in range(BREATHS):
                await asyncio.sleep(0)

        self.loop.run_until_complete(play_all())


@contextlib.contextmanager
def shared_tree(tree: AbstractAsyncContextManager[Served]) -> Iterator[SharedTree]:
    """Nothing is left behind when it ends, as by a test."""
    with must_leave_nothing():
        loop = asyncio.new_event_loop()
        try:
            shared = SharedTree(loop, loop.run_until_complete(tree.__aenter__()))
            try:
                yield shared
            finally:
                del shared.tree  # pytest keeps the fixture for longer, and a tree holds its segments
                loop.run_until_complete(tree.__aexit__(None, None, None))
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
