"""Stream order: released memory is kept until the device has done all work on the memory.

A device works through its streams long after the calls that filled the streams have returned. A release records a
marker on each stream, and the memory is given back when the device has passed all markers. No event reports a passed
marker: a process queries markers when it next takes or releases memory, and in flush(), which an idle process calls.

A dying process needs no markers. The kernel closes the process's files before it reports the death, and the context
goes with the driver's file: no work is left when peers learn of the death and take the memory back. An ending process
needs no markers either: no process sees the results of unfinished work.
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


class Passed:
    """A marker on a stream without work, for which a driver makes no event."""

    def query(self) -> bool:
        return True


PASSED = Passed()


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
    """The releases that a process defers. Without a lock, as destructors add entries, and run anywhere, even in here.

    Appending to a deque and popping are atomic: only the thread that popped an entry has the entry.
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
                self._entries.append(entry)  # whether the work is done is unknown: the entry stays
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
