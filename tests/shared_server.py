"""One server for all scenes of a module, each of which is a test of its own: a server takes seconds to start.

A scene that kills or stops a process has a server of its own.
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


class SharedServer:
    """A server that serves, and the event loop in which it lives; between scenes the loop rests."""

    def __init__(self, loop: asyncio.AbstractEventLoop, served: Served) -> None:
        self.loop = loop
        self.served = served

    def play(self, *scenes: Scene, within: float = 30.0) -> None:
        """One after the other, each within so many seconds, with a client that has no connection yet."""

        async def play_all() -> None:
            async with self.served.with_key(KEY) as self.served.client:
                for scene in scenes:
                    await asyncio.wait_for(scene(self.served), within)
            for _ in range(BREATHS):
                await asyncio.sleep(0)

        self.loop.run_until_complete(play_all())


@contextlib.contextmanager
def shared_server(served: AbstractAsyncContextManager[Served]) -> Iterator[SharedServer]:
    """Nothing is left behind when it ends, as by a test."""
    with must_leave_nothing():
        loop = asyncio.new_event_loop()
        try:
            shared = SharedServer(loop, loop.run_until_complete(served.__aenter__()))
            try:
                yield shared
            finally:
                del shared.served  # pytest keeps the fixture for longer, and a server holds its segments
                loop.run_until_complete(served.__aexit__(None, None, None))
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
