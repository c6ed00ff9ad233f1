"""Stream order: what was let go of while the device may still be at work on it is kept until that work is done.

A device works through its streams long after the calls that filled them have returned. So who lets go of memory marks
the place on each stream, and the memory is given back when all marks have been passed. Nobody is told of that: marks
are looked at when this process next takes or lets go of something, and by flush(), which whoever turns idle calls.

A process that dies needs none of this. The kernel closes its files before it says that the process is dead, and with
the driver's file goes its context: no work of it is left when the others learn of the death and take the memory back.
Nor does one that ends: what it would still have read, nobody sees.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Protocol

SPINS = 50  # looks before a wait begins to sleep: work that is nearly done, is
NAP = 50e-6  # seconds between two looks


class Marker(Protocol):
    """A place on a stream (`torch.cuda.Event` is one)."""

    def query(self) -> bool:
        """Whether all that was on the stream before it is done."""


class Never:
    """What is never passed: for what nobody can tell of. It is given back with the end of the process."""

    def query(self) -> bool:
        return False


NEVER = Never()


class Holding(Protocol):
    """Something to be given back."""

    def give_back(self) -> None: ...


def is_done(markers: Iterable[Marker]) -> bool:
    return all(marker.query() for marker in markers)


def wait_for(markers: Iterable[Marker], timeout: float | None) -> bool:
    """Waits until all are passed, up to `timeout` seconds (None: for ever). Returns whether they are."""
    left = [marker for marker in markers if not marker.query()]
    deadline = None if timeout is None else time.monotonic() + timeout
    looks = 0
    while left:
        if deadline is not None and time.monotonic() >= deadline:
            return False
        if looks >= SPINS:
            time.sleep(NAP)
        looks += 1
        left = [marker for marker in left if not marker.query()]
    return True


class InFlight:
    """What one process waits to give back. No lock: it is filled from destructors, which run anywhere, even in here.

    Taking from a deque and adding to it are atomic, and whoever has taken an entry is the only one to have it.
    """

    def __init__(self) -> None:
        self._entries: deque[tuple[tuple[Marker, ...], Holding]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def keep(self, markers: Iterable[Marker], holding: Holding) -> None:
        """Gives it back when all the markers have been passed."""
        self._entries.append((tuple(markers), holding))

    def poll(self) -> int:
        """Gives back whatever can be. Returns how much is left."""
        for _ in range(len(self._entries)):
            try:
                entry = self._entries.popleft()
            except IndexError:  # another thread has it
                break
            markers, holding = entry
            try:
                done = is_done(markers)
            except BaseException:
                self._entries.append(entry)  # nobody knows: so it stays, until the process ends
                raise
            if done:
                holding.give_back()
            else:
                self._entries.append(entry)
        return len(self._entries)

    def flush(self, timeout: float | None = 0) -> bool:
        """Gives back what can be, waiting up to `timeout` seconds (None: for ever). Returns whether that was all."""
        deadline = None if timeout is None else time.monotonic() + timeout
        looks = 0
        while self.poll():
            if deadline is not None and time.monotonic() >= deadline:
                return False
            if looks >= SPINS:
                time.sleep(NAP)
            looks += 1
        return True
