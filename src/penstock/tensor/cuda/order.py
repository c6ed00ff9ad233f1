"""Stream order: memory released while the device may still be at work on it is kept until that work is done.

A device works through its streams long after the calls that filled them have returned. So a release records a marker on
each stream, and the memory is given back when all its markers have been passed. No event reports that: a process
queries its markers when it next takes or releases memory, and in flush(), which it calls when it turns idle.

A process that dies needs none of this. The kernel closes its files before it reports the death, and the context goes
with the driver's file: no work of the process is left when its peers learn of the death and take the memory back. Nor
does a process that ends: no process sees what its work would still have read.
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
    """A marker that is never passed, for memory with unknown work. It is given back with the end of the process."""

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


class DeferredReleases:
    """What one process waits to give back. No lock: it is filled from destructors, which run anywhere, even in here.

    Popping from a deque and appending to it are atomic, so the thread that popped an entry is the only one to have it.
    """

    def __init__(self) -> None:
        self._entries: deque[tuple[tuple[Marker, ...], Holding]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def keep(self, markers: Iterable[Marker], holding: Holding) -> None:
        """Keeps `holding`, to be given back when all the markers have been passed."""
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
                self._entries.append(entry)  # it is unknown whether its work is done: it stays
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
