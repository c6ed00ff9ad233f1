"""A semaphore of bytes: work that needs memory waits until enough of it has been given back.

    with await semaphore.acquire("client", nbytes) as lease:
        …                                               the bytes are held
        lease.shrink(fewer)                             less is needed than was expected

Clients that wait take turns, and a client's own waits end in their order. The wait that is next blocks the others
until its bytes are free, so large waits do not starve either.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class ByteLease:
    """Bytes that are held until `release`."""

    def __init__(self, semaphore: ByteSemaphore, nbytes: int) -> None:
        self._semaphore = semaphore
        self.nbytes = nbytes

    def shrink(self, nbytes: int) -> None:
        """Gives back all but `nbytes`, if that is fewer."""
        if nbytes < self.nbytes:
            freed, self.nbytes = self.nbytes - nbytes, nbytes
            self._semaphore._give_back(freed)

    def release(self) -> None:
        """Gives back all bytes. May be called again."""
        self.shrink(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class ByteSemaphore:
    """Used by one event loop. `nbytes`: the most that is held at a time."""

    def __init__(self, nbytes: int, changed: Callable[[int, int], None] = lambda held, waiting: None) -> None:
        """`changed` gets the number of bytes held and of waits, after each change."""
        self.nbytes = nbytes
        self.held = 0
        self._changed = changed
        # Clients in the order of their turns, each with its waits.
        self._waits: dict[str, deque[tuple[int, asyncio.Future[ByteLease]]]] = {}

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waits.values()))

    async def acquire(self, client: str, nbytes: int) -> ByteLease:
        """Waits for the bytes. Raises ValueError for more than the semaphore has, which would wait for ever."""
        if nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes, and at most {self.nbytes} are held at a time")
        future: asyncio.Future[ByteLease] = asyncio.get_running_loop().create_future()
        wait = nbytes, future
        self._waits.setdefault(client, deque()).append(wait)
        self._grant()
        try:
            return await future
        except BaseException:
            if future.done() and not future.cancelled():  # cancelled at the moment when the bytes were granted
                future.result().release()
            else:
                self._forget(client, wait)
            raise

    def take(self, nbytes: int) -> ByteLease:
        """Holds bytes at once, also beyond what the semaphore has: they lie in the memory already."""
        self.held += nbytes
        self._changed(self.held, self.waiting)
        return ByteLease(self, nbytes)

    def _forget(self, client: str, wait: tuple[int, asyncio.Future[ByteLease]]) -> None:
        waits = self._waits.get(client, deque())
        if wait in waits:
            waits.remove(wait)
            if not waits:
                del self._waits[client]
        self._grant()  # the wait may have blocked others

    def _give_back(self, nbytes: int) -> None:
        self.held -= nbytes
        self._grant()

    def _grant(self) -> None:
        while self._waits:
            client, waits = next(iter(self._waits.items()))
            nbytes, future = waits[0]
            if not future.done():
                if self.held + nbytes > self.nbytes:
                    break
                self.held += nbytes
                future.set_result(ByteLease(self, nbytes))
            waits.popleft()
            del self._waits[client]
            if waits:  # the client's next wait comes after a turn of each other client
                self._waits[client] = waits
        self._changed(self.held, self.waiting)
