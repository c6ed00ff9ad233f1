"""The memory that the C library keeps when it is freed, given back to the machine after what was large.

glibc keeps a heap for each thread: after prompts of 7 MB and images of 40 megapixels, 2 GB stayed with a process that
used 60 MB. `malloc_trim` gives back what is free amid a heap, but of other threads than the first not the free end;
that goes when something is freed, if it is longer than a threshold, which grows to 64 MB unless it is said. Another C
library has no such calls, and nothing is done.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT_NBYTES = 1 << 20  # at the end of each heap; and what is longer than that has a mapping of its own
PAUSE = 5.0  # seconds between something large and the giving back, which takes 0.1 s for 1 GB


class Heap:
    """Of this process. Made before anything large is, and used by the event loop."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._trim: Callable[[int], object] | None = getattr(library, "malloc_trim", None)
        if self._trim is not None:
            library.mallopt(M_TRIM_THRESHOLD, KEPT_NBYTES)
            library.mallopt(M_MMAP_THRESHOLD, KEPT_NBYTES)
        self._alarm: asyncio.TimerHandle | None = None
        self._is_used = False  # since the last time that memory was given back

    def was_used(self) -> None:
        """Something large has ended, or will soon."""
        self._is_used = True
        if self._alarm is None and self._trim is not None:
            self._alarm = asyncio.get_running_loop().call_later(PAUSE, self._give_back)

    def _give_back(self) -> None:
        """In a thread, as the loop goes on; and once more, where what was used last may not have ended."""
        assert self._trim is not None, "there is an alarm only with it"
        self._alarm = None
        if self._is_used:
            self.was_used()
        self._is_used = False
        asyncio.get_running_loop().run_in_executor(None, _collect_and_trim, self._trim)


def _collect_and_trim(trim: Callable[[int], object]) -> None:
    gc.collect()  # errors refer to what they were about
    trim(0)
