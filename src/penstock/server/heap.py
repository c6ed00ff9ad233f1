"""The memory that the C library keeps when it is freed, given back to the machine after what was large.

glibc keeps a heap for each thread, and gives only the end of one back: after prompts of 7 MB and images of 40
megapixels, 2 GB stayed with a process that used 60 MB. Another C library has no such call, and nothing is done.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable

PAUSE = 5.0  # seconds between something large and the giving back, which takes 0.1 s for 1 GB


class Heap:
    """Of this process, and used by its event loop."""

    def __init__(self) -> None:
        self._trim: Callable[[int], object] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
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
