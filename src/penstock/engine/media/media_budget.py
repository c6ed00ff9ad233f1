"""The bytes of images, videos and long bodies that a server process holds at a time: `--media-mb-in-flight`.

A request passes three stages, and each has a part of the budget:

| stage   | part | held                                          | from                 | to                      |
|---------|------|-----------------------------------------------|----------------------|-------------------------|
| bodies  | 1/4  | long bodies, and the data URLs cut from them  | the first byte       | the prompt is built     |
| files   | 1/4  | files read from a directory or another host   | before they are read | the medium is stored    |
| decoded | 1/2  | pixels, and the tensors made of them          | before decoding      | the medium is stored    |

A holder of bytes of a stage waits only for later stages, and a holder of the last stage for none: no deadlock. A pool
for all stages would deadlock: many half-received bodies could hold the whole pool.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from penstock.engine.media.media_kind import MediaRefused
from penstock.tensor import Handle, Scope, ScopeStats

if TYPE_CHECKING:
    from typing_extensions import Self

STAGES = ("bodies", "files", "decoded")
PARTS = (4, 4, 2)  # of the budget, each stage has one in so many
BODY_COPIES = 2  # a body as it was received, and the strings in it


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
    """Work that needs memory waits until enough of it has been given back. Used by one event loop.

        with await semaphore.acquire("client", nbytes) as lease:
            …                                               the bytes are held
            lease.shrink(fewer)                             less is needed than was expected

    Waiting clients alternate, and a client's waits end in their order. The next wait blocks all later waits until
    enough bytes are free: large waits do not starve either. `nbytes`: limit of the bytes held at a time.
    """

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


class MediaBudget:
    """The budget of one server process."""

    def __init__(
        self, nbytes: int, changed: Callable[[int, int, int], None] = lambda stage, held, waiting: None
    ) -> None:
        """`changed` gets the number of a stage, its bytes held, and its waits."""
        self.nbytes = nbytes
        self.bodies, self.files, self.decoded = (
            ByteSemaphore(nbytes // part, _bound(changed, stage)) for stage, part in enumerate(PARTS)
        )


def _bound(changed: Callable[[int, int, int], None], stage: int) -> Callable[[int, int], None]:
    return lambda held, waiting: changed(stage, held, waiting)


async def admit(stage: ByteSemaphore, client: str, nbytes: int, work: str) -> ByteLease:
    """Waits for the bytes of some work, as "decoding the video". Raises MediaRefused if the stage never has as many."""
    try:
        return await stage.acquire(client, nbytes)
    except ValueError:
        limit = f"at most {stage.nbytes} are held at a time (--media-mb-in-flight)"
        raise MediaRefused(413, f"{work} takes {nbytes} bytes, and {limit}") from None


class Releasable(Protocol):
    def release(self) -> None: ...


class MediaScope(Scope):
    """The scope of a request's media, with the bytes of the budget that its inline tensors hold.

    Used by one event loop, apart from `put` and `add`.

    Tensors in the store have left the budget: the store bounds them. Inline tensors lie in this process, and count,
    until the request ends. Inline tensors are counted when all media of the request have been loaded: requests that
    held bytes while waiting for more bytes could wait for each other.
    """

    _leases: tuple[Releasable, ...] = ()
    puts_elsewhere = 0  # of the hits: values that another process has made for this request

    def hold(self, *leases: Releasable) -> None:
        """Holds bytes until the scope is released: at once, if it has been."""
        self._leases += leases
        if self.is_released:
            self.release()

    def add_leases(self, handle: Handle, leases: Sequence[Releasable]) -> Handle:
        """Returns a handle of a value with tensors in other pools, and holds these. The value counts as a hit."""
        self.hold(*leases)
        return self._keep(handle, None, "hits")

    def stats(self) -> ScopeStats:
        stats = super().stats()
        stats.hits -= self.puts_elsewhere
        stats.puts += self.puts_elsewhere
        return stats

    def release(self) -> None:
        super().release()
        leases, self._leases = self._leases, ()
        for lease in leases:
            lease.release()
