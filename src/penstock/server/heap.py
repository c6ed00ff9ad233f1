"""Returns memory that the C library keeps to the machine, after large prompts and images.

glibc keeps a heap for each thread: after prompts of 7 MB and images of 40 megapixels, 2 GB stayed with a process that
used 60 MB. `malloc_trim` returns the free memory amid a heap, but not the free end of another thread's heap. That end
is returned by a later `free`, if it is longer than a threshold, which grows to 64 MB unless it is set. With another C
library, which has no such calls, nothing is done.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT_NBYTES = 1 << 20  # at the end of each heap; longer allocations get a mapping of their own
PAUSE = 5.0  # seconds from large work to the return of its memory, which takes 0.1 s for 1 GB


class Heap:
    """The heaps of this process. Created before any large allocation, and used by the event loop."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._trim: Callable[[int], object] | None = getattr(library, "malloc_trim", None)
        if self._trim is not None:
            library.mallopt(M_TRIM_THRESHOLD, KEPT_NBYTES)
            library.mallopt(M_MMAP_THRESHOLD, KEPT_NBYTES)
        self._alarm: asyncio.TimerHandle | None = None
        self._is_used = False  # since the last time that memory was given back

    def was_used(self) -> None:
        """Says that large work has ended, or will soon: its memory is returned PAUSE seconds later."""
        self._is_used = True
        if self._alarm is None and self._trim is not None:
            self._alarm = asyncio.get_running_loop().call_later(PAUSE, self._give_back)

    def _give_back(self) -> None:
        """Returns free memory, in a thread, as the loop goes on; and once more later, as the last work may not have
        ended."""
        assert self._trim is not None, "there is an alarm only with it"
        self._alarm = None
        if self._is_used:
            self.was_used()
        self._is_used = False
        asyncio.get_running_loop().run_in_executor(None, _collect_and_trim, self._trim)


def _collect_and_trim(trim: Callable[[int], object]) -> None:
    gc.collect()  # tracebacks of errors keep large objects in cycles
    trim(0)
