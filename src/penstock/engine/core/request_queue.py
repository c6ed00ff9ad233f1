"""The queue of waiting requests and samples: chooses the next to admit. The scheduler decides whether the choice fits.

The better priority goes first, and within a priority the client served least. Fairness is by tokens (a virtual token
counter): each client has a count of computed and generated tokens, and the client with the smallest count is next.
Requests would be the wrong unit, as a long request costs a thousand times as much as a short request; shares of time
would leave the device idle. A new or returning client begins at least at the count of the client chosen last: no
client saves up by staying away.

A request that began in a lost group waits like a preempted sample, before newcomers of the priority. Its client paid in
the lost group for the prompt and the generated tokens, and is not charged again.

Every `OLDEST_EVERY`-th admission goes to the oldest sample, which is never preempted: no priority and no client
starves.

Slots are shared as well, as samples keep slots for the whole of long answers. A large client has 1/SLOT_SHARE of all
slots: the samples of smaller clients go first, and the last 1/SLOT_SHARE of the slots is left to smaller clients. Each
request without a client counts as a separate client here, and many small clients may have all slots.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

from penstock.engine.core.request import Arrival, Request, Sample, SortKey

OLDEST_EVERY = 8
OLDEST = -(1 << 40)  # a priority that no request has
SLOT_SHARE = 16  # a client with 1/SLOT_SHARE of the slots is large; 1/SLOT_SHARE is kept for small clients
MAX_ABSENT = 4096  # counts that are kept of clients without a request
MAX_STALE = 1024  # removed requests that the heaps hold besides as many as wait


class RequestQueue:
    """All requests and samples that wait, and how many slots each client has."""

    def __init__(self, slots: int) -> None:
        self._requests = FairQueue()
        self._aside: list[tuple[SortKey, Sample]] = []  # a heap: preempted samples, and others of admitted requests
        self._begun: dict[str, list[tuple[SortKey, Sample]]] = {}  # heaps, by client; the first of each is aside
        self._forking: dict[int, Request] = {}  # by slot of the first sample; the others wait for its prompt's blocks
        self._admissions = 0  # so far
        self._reserve = slots // SLOT_SHARE  # slots; none where there are few
        self._slots_of: dict[str, int] = {}  # by named client
        self._large: set[str] = set()  # named clients that are large

    def __len__(self) -> int:
        """Returns how many requests wait with no sample admitted yet."""
        return len(self._requests)

    def push(self, request: Request) -> None:
        if not request.has_begun:
            return self._requests.push(request)
        self._requests.open(request.client)
        sample, begun = request.first, self._begun.setdefault(request.client, [])
        if begun and sample.sort_key < begun[0][0]:
            begun[0][1].is_aside = False  # one of each client: steps would look at thousands
        heapq.heappush(begun, (sample.sort_key, sample))
        return self._put_begun_aside(request.client)

    def _put_begun_aside(self, client: str) -> None:
        """Lets the best request of the client wait that has begun in a group that was lost, and has no slot here."""
        begun = self._begun[client]
        while begun and (begun[0][1].is_ended or begun[0][1].slot is not None):
            heapq.heappop(begun)
        if not begun:
            del self._begun[client]
        elif not begun[0][1].is_aside:
            self.put_aside(begun[0][1])

    def put_aside(self, sample: Sample) -> None:
        """Lets a sample of a request that has begun wait: for blocks if it was preempted, else for a slot."""
        sample.is_aside = True  # its entries in the heap count, also one of an earlier time
        heapq.heappush(self._aside, (sample.sort_key, sample))

    def can_admit(self, free_slots: int) -> bool:
        """Returns whether a sample is aside, or a request is queued and a slot is free."""
        return bool(self._aside) or (free_slots > 0 and bool(self._requests))

    @property
    def is_oldest_next(self) -> bool:
        """Returns whether the next admission is that of the sample that has been here longest."""
        return self._admissions % OLDEST_EVERY == OLDEST_EVERY - 1

    def next(self, free_slots: int) -> Sample | None:
        """Returns the sample to be admitted next. No sample overtakes, even if this sample does not fit yet."""
        small, large = self._first_aside()
        if self.is_oldest_next:
            oldest = self._oldest()
            if oldest is None or free_slots > self._reserve or not self._is_large(oldest):
                return oldest
        first = self._requests.first(() if free_slots > self._reserve else self._large)
        if first is not None and (small is None or first.priority < small.request.priority):
            small = first.first
        if large is None or free_slots <= self._reserve:
            return small
        return large if small is None or large.request.priority < small.request.priority else small

    def _oldest(self) -> Sample | None:
        sample = min((entry for _, entry in self._aside if entry.is_aside), key=_age, default=None)
        request = self._requests.oldest()
        if request is not None and (sample is None or sample.request.arrival >= request.arrival):
            return request.first
        return sample

    def _first_aside(self) -> tuple[Sample | None, Sample | None]:
        """Returns the best sample aside that is not large (`_is_large`), and the best large one sorted before it."""
        small, large = None, []
        while self._aside and small is None:
            sample = self._aside[0][1]
            if not sample.is_aside:
                heapq.heappop(self._aside)
            elif self._is_large(sample):
                large.append(heapq.heappop(self._aside))
            else:
                small = sample
        for entry in large:
            heapq.heappush(self._aside, entry)
        return small, large[0][1] if large else None

    def _is_large(self, sample: Sample) -> bool:
        """Returns whether the sample needs a slot, and its client has a large share of them."""
        request = sample.request
        slots = self._slots_of.get(request.client, 0) if request.client else len(request.slots)
        return sample.slot is None and 0 < self._reserve <= slots

    def admit(self, sample: Sample) -> None:
        """Removes a sample that is admitted."""
        if sample.request.is_waiting:
            self._requests.take(sample.request)
        sample.is_aside = False
        if self.is_oldest_next:
            sample.sort_key = (OLDEST, *sample.sort_key[1:])
        self._admissions += 1

    # ── slots ──
    def take_slot(self, sample: Sample, slot: int) -> None:
        """Counts the slot of an admitted sample. The request's remaining samples wait until the prompt has been
        computed, and then follow one by one."""
        request = sample.request
        self._count_slot(request.client, 1)
        if request.client in self._begun:
            self._put_begun_aside(request.client)
        if sample is not request.first:
            self._put_next_aside(request, sample.index + 1)
        elif sample.index + 1 < len(request.samples):
            self._forking[slot] = request
            if request.prompt.size <= request.block_size:
                self.fork(slot)

    def leave_slot(self, sample: Sample) -> None:
        self._count_slot(sample.request.client, -1)

    @property
    def forking(self) -> list[tuple[int, Request]]:
        """Returns the requests with samples that wait for the prompt, by the slot that computes the prompt."""
        return list(self._forking.items())

    def fork(self, slot: int) -> None:
        """Lets the remaining samples wait for a slot: the shared blocks of the prompt exist now, or never will."""
        request = self._forking.pop(slot, None)
        if request is not None:
            self._put_next_aside(request, request.first.index + 1)

    def _put_next_aside(self, request: Request, index: int) -> None:
        """Puts the next sample, from `index` on, aside to wait for a slot; once it has one, the next one follows."""
        for sample in request.samples[index:]:
            if not sample.is_ended:
                self.put_aside(sample)
                return

    def _count_slot(self, client: str, change: int) -> None:
        if not client:
            return
        slots = self._slots_of[client] = self._slots_of.get(client, 0) + change
        if not slots:
            del self._slots_of[client]
        if 0 < self._reserve <= slots:
            self._large.add(client)
        else:
            self._large.discard(client)

    # ── tokens ──
    def charge(self, client: str, tokens: int) -> None:
        self._requests.charge(client, tokens)

    def close(self, request: Request) -> None:
        """Removes an ended request: the client is no longer charged."""
        if request.is_waiting:
            self._requests.drop(request)
        if request.client in self._begun:
            self._put_begun_aside(request.client)
        self._requests.close(request.client)


def _age(sample: Sample) -> tuple[Arrival, int]:
    return sample.request.arrival, sample.index


class FairQueue:
    """Requests without an admitted sample: the better priority first, and within one the client served least."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []  # a heap of the keys of `_levels`
        self._by_age: list[tuple[Arrival, Request]] = []  # a heap
        self._served: dict[str, int] = {}  # tokens
        self._open: dict[str, int] = {}  # requests of each client that have not been closed
        self._chosen = 0  # the count of the client chosen last
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def open(self, client: str) -> None:
        """Counts a request of the client, until it is closed."""
        if client not in self._open:
            self._open[client] = 0
            self._served[client] = max(self._served.get(client, 0), self._chosen)
        self._open[client] += 1

    def push(self, request: Request) -> None:
        """Opens a request, and queues it."""
        self.open(request.client)
        request.is_waiting = True
        self._size += 1
        heapq.heappush(self._by_age, (request.arrival, request))
        level = self._levels.get(request.priority)
        if level is None:
            level = self._levels[request.priority] = _Level()
            heapq.heappush(self._priorities, request.priority)
        level.push(request, self._served[request.client])

    def first(self, blocked: Collection[str] = ()) -> Request | None:
        """Returns the next request of the clients that are not `blocked`. It stays in the queue until `take`."""
        while self._priorities:
            level = self._levels[self._priorities[0]]
            request = level.first(self._served, blocked)
            if request is not None:
                return request
            if not level.is_empty:  # all of these are blocked
                others = (self._levels[priority] for priority in sorted(self._priorities)[1:])
                return next(filter(None, (level.first(self._served, blocked) for level in others)), None)
            del self._levels[heapq.heappop(self._priorities)]
        return None

    def oldest(self) -> Request | None:
        """Returns the request that has waited longest, of any priority and client."""
        while self._by_age and not self._by_age[0][1].is_waiting:
            heapq.heappop(self._by_age)
        return self._by_age[0][1] if self._by_age else None

    def take(self, request: Request) -> None:
        """Removes a request that is admitted: its client has been chosen."""
        self.drop(request)
        self._chosen = max(self._chosen, self._served[request.client])

    def drop(self, request: Request) -> None:
        """Removes a request."""
        assert request.is_waiting, "taken twice from the queue"
        request.is_waiting = False
        self._size -= 1
        self.oldest()
        if len(self._by_age) > 2 * self._size + MAX_STALE:
            self._forget_stale()

    def _forget_stale(self) -> None:
        """Forgets requests that have been removed and are not the first of a heap: else those that clients abort while
        an old request waits, and levels for each priority that was ever named, are held until it is admitted."""
        self._by_age = [entry for entry in self._by_age if entry[1].is_waiting]
        heapq.heapify(self._by_age)
        for level in self._levels.values():
            level.forget_stale()
        self._levels = {priority: level for priority, level in self._levels.items() if not level.is_empty}
        self._priorities = sorted(self._levels)

    def charge(self, client: str, tokens: int) -> None:
        self._served[client] += tokens

    def close(self, client: str) -> None:
        """Closes an ended request of the client: the client is no longer charged."""
        self._open[client] -= 1
        if self._open[client]:
            return
        del self._open[client]
        if self._served[client] <= self._chosen:  # it would begin there anyway
            del self._served[client]
        elif len(self._served) - len(self._open) > MAX_ABSENT:
            self._served = {name: served for name, served in self._served.items() if name in self._open}


class _Level:
    """Requests of one priority. The heap has each client once; its count there may be outdated: counts only grow."""

    def __init__(self) -> None:
        self._queues: dict[str, list[tuple[Arrival, Request]]] = {}  # heaps
        self._heap: list[tuple[int, int, str]] = []
        self._pushes = 0  # with equal counts, the earlier client is first

    def push(self, request: Request, served: int) -> None:
        queue = self._queues.get(request.client)
        if queue is None:
            queue = self._queues[request.client] = []
            self._pushes += 1
            heapq.heappush(self._heap, (served, self._pushes, request.client))
        heapq.heappush(queue, (request.arrival, request))

    def forget_stale(self) -> None:
        waiting = {client: [entry for entry in queue if entry[1].is_waiting] for client, queue in self._queues.items()}
        self._queues = {client: queue for client, queue in waiting.items() if queue}
        for queue in self._queues.values():
            heapq.heapify(queue)
        self._heap = [entry for entry in self._heap if entry[2] in self._queues]
        heapq.heapify(self._heap)

    @property
    def is_empty(self) -> bool:
        return not self._heap

    def first(self, counts: dict[str, int], blocked: Collection[str] = ()) -> Request | None:
        first, passed = None, []
        while self._heap and first is None:
            served, pushed, client = self._heap[0]
            queue = self._queues[client]
            while queue and not queue[0][1].is_waiting:
                heapq.heappop(queue)
            if not queue:
                heapq.heappop(self._heap)
                del self._queues[client]
            elif counts[client] > served:
                heapq.heapreplace(self._heap, (counts[client], pushed, client))
            elif client in blocked:
                passed.append(heapq.heappop(self._heap))
            else:
                first = queue[0][1]
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return first
