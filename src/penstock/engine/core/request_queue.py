"""The queue of waiting requests: the better priority first, and within one priority the client served least.

Fairness is by tokens (a virtual token counter): each client has a count of the tokens computed and generated for it,
and the client with the smallest count is next. Requests would be the wrong unit, as one may cost a thousand times as
much as another; shares of time would leave the device idle. A client that comes, or comes again, begins at least at
the count of the client chosen last, so that no client saves up by staying away. The scheduler decides which
request fits.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection
from typing import Generic, Protocol, TypeVar

MAX_ABSENT = 4096  # counts that are kept of clients without a request


class Queueable(Protocol):
    """An entry of the queue."""

    priority: int
    client: str
    is_waiting: bool  # False: it was removed, and references to it in the queue are skipped


OneT = TypeVar("OneT", bound=Queueable)


class RequestQueue(Generic[OneT]):
    def __init__(self) -> None:
        self._levels: dict[int, _Level[OneT]] = {}
        self._priorities: list[int] = []  # a heap of the keys of `_levels`
        self._by_age: deque[OneT] = deque()
        self._served: dict[str, int] = {}  # tokens
        self._open: dict[str, int] = {}  # requests of each client that have not been closed
        self._chosen = 0  # the count of the client chosen last
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, one: OneT) -> None:
        client = one.client
        if client not in self._open:
            self._open[client] = 0
            self._served[client] = max(self._served.get(client, 0), self._chosen)
        self._open[client] += 1
        one.is_waiting = True
        self._size += 1
        self._by_age.append(one)
        level = self._levels.get(one.priority)
        if level is None:
            level = self._levels[one.priority] = _Level()
            heapq.heappush(self._priorities, one.priority)
        level.push(one, self._served[client])

    def first(self, blocked: Collection[str] = ()) -> OneT | None:
        """Returns the next request of the clients that are not `blocked`. It stays in the queue until `take`."""
        while self._priorities:
            level = self._levels[self._priorities[0]]
            one = level.first(self._served, blocked)
            if one is not None:
                return one
            if not level.is_empty:  # all of these are blocked
                others = (self._levels[priority] for priority in sorted(self._priorities)[1:])
                return next(filter(None, (level.first(self._served, blocked) for level in others)), None)
            del self._levels[heapq.heappop(self._priorities)]
        return None

    def oldest(self) -> OneT | None:
        """Returns the request that has waited longest, of any priority and client."""
        while self._by_age and not self._by_age[0].is_waiting:
            self._by_age.popleft()
        return self._by_age[0] if self._by_age else None

    def take(self, one: OneT) -> None:
        """Removes a request that is admitted: its client has been chosen."""
        self.drop(one)
        self._chosen = max(self._chosen, self._served[one.client])

    def drop(self, one: OneT) -> None:
        """Removes a request."""
        assert one.is_waiting, "taken twice from the queue"
        one.is_waiting = False
        self._size -= 1
        self.oldest()

    def charge(self, client: str, tokens: int) -> None:
        self._served[client] += tokens

    def close(self, client: str) -> None:
        """Closes a request of the client that has ended: it is not charged for that request any more."""
        self._open[client] -= 1
        if self._open[client]:
            return
        del self._open[client]
        if self._served[client] <= self._chosen:  # it would begin there anyway
            del self._served[client]
        elif len(self._served) - len(self._open) > MAX_ABSENT:
            self._served = {name: served for name, served in self._served.items() if name in self._open}


class _Level(Generic[OneT]):
    """Requests of one priority. The heap has each client once; its count there may be outdated: counts only grow."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[OneT]] = {}
        self._heap: list[tuple[int, int, str]] = []
        self._pushes = 0  # so that of equal counts the client that came first is first

    def push(self, one: OneT, served: int) -> None:
        queue = self._queues.get(one.client)
        if queue is None:
            queue = self._queues[one.client] = deque()
            self._pushes += 1
            heapq.heappush(self._heap, (served, self._pushes, one.client))
        queue.append(one)

    @property
    def is_empty(self) -> bool:
        return not self._heap

    def first(self, counts: dict[str, int], blocked: Collection[str] = ()) -> OneT | None:
        found, passed = None, []
        while self._heap and found is None:
            served, pushed, client = self._heap[0]
            queue = self._queues[client]
            while queue and not queue[0].is_waiting:
                queue.popleft()
            if not queue:
                heapq.heappop(self._heap)
                del self._queues[client]
            elif counts[client] > served:
                heapq.heapreplace(self._heap, (counts[client], pushed, client))
            elif client in blocked:
                passed.append(heapq.heappop(self._heap))
            else:
                found = queue[0]
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found
