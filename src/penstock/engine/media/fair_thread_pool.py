"""A thread pool that is fair between owners: a request with one image does not wait for a request with many.

An owner's second piece of work runs after the first pieces of up to `HEAD_START` owners, later owners included; the
third piece after twice as many. No piece waits for ever.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

HEAD_START = 64  # pieces that may overtake a piece, for each earlier open piece of its owner


class FairThreadPool:
    def __init__(self, threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(threads, name)
        self._lock = threading.Lock()  # of all below
        self._waiting: list[tuple[int, int, Hashable, Callable[[], Any], Future[Any]]] = []
        self._numbers = itertools.count()
        self._open: Counter[Hashable] = Counter()  # pieces of each owner that have not ended

    async def run(self, owner: Hashable, work: Callable[[], T]) -> T:
        """Runs `work` in a thread, and returns its result. If cancelled, work that has not begun is dropped."""
        future: Future[T] = Future()
        with self._lock:
            number = next(self._numbers)
            heapq.heappush(self._waiting, (number + HEAD_START * self._open[owner], number, owner, work, future))
            self._open[owner] += 1
        self._threads.submit(self._run_next)
        try:
            return await asyncio.wrap_future(future)
        finally:
            del work, future  # an error refers to this frame, and would be kept by it

    def _run_next(self) -> None:
        with self._lock:
            _, _, owner, work, future = heapq.heappop(self._waiting)
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
        del work, future  # as above
        with self._lock:
            self._open[owner] -= 1
            if not self._open[owner]:
                del self._open[owner]

    def close(self) -> None:
        """Waits for the work that threads have begun, and drops the rest."""
        self._threads.shutdown(cancel_futures=True)
        for *_, future in self._waiting:
            future.cancel()
