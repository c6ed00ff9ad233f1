"""Memory that was freed and is still with the process: given back after something large, and again after the last."""

import asyncio
import ctypes
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from penstock.server import heap
from penstock.server.heap import Heap
from penstock.tools.inspect import private_nbytes_of
from tests.support.loops import in_a_loop, until

MB = 1 << 20


def private() -> int:
    result = private_nbytes_of(os.getpid())
    assert result is not None
    return result


class Cycle:
    """What is freed by a collection only."""

    def __init__(self, pieces: list[np.ndarray]) -> None:
        self.pieces = pieces
        self.me = self


def fill_a_heap(saved: list[np.ndarray]) -> None:
    """With 200 MB in pieces that glibc takes from a thread's heap, and one behind them that keeps it from its end."""
    pieces = [np.ones(100_000, np.uint8) for _ in range(2000)]
    saved.append(np.ones(100_000, np.uint8))
    Cycle(pieces)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
@in_a_loop
async def test_heap_returns_freed_memory_after_a_large_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "PAUSE", 0.01)
    ours, saved = Heap(), []
    before = private()
    thread = threading.Thread(target=fill_a_heap, args=(saved,))
    thread.start()
    thread.join()
    assert private() - before > 150 * MB, "nothing is left to be given back"
    ours.was_used()
    await until(lambda: private() - before < 50 * MB)


@in_a_loop
async def test_memory_is_given_back_once_more_after_the_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "PAUSE", 0.02)
    done: list[int] = []
    ours = Heap()
    ours._trim = done.append
    ours.was_used()
    await until(lambda: len(done) == 2)  # what was used when it was first done may not have ended
    await asyncio.sleep(0.1)
    assert len(done) == 2 and ours._alarm is None
    ours.was_used()
    await until(lambda: len(done) >= 3)  # the one after it may be as soon


@in_a_loop
async def test_another_c_library_is_left_alone() -> None:
    ours = Heap()
    ours._trim = None
    ours.was_used()
    assert ours._alarm is None


FREE_ENDS = """
import os, threading
import numpy as np
from penstock.tools.inspect import private_nbytes_of
from penstock.server.heap import Heap, _collect_and_trim

def use():
    large = np.ones(30 << 20, np.uint8)
    del large  # that is when glibc raises its thresholds
    pieces = [np.ones(100_000, np.uint8) for _ in range(500)]
    pieces.reverse()  # the end goes first

heap, before = Heap(), private_nbytes_of(os.getpid())
both = threading.Barrier(3)  # the heaps of threads that have ended would be used again
threads = [threading.Thread(target=lambda: (use(), use(), both.wait(), both.wait())) for _ in range(2)]
for thread in threads:
    thread.start()
both.wait()
_collect_and_trim(heap._trim)
print(private_nbytes_of(os.getpid()) - before)
both.wait()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_the_free_ends_of_the_heaps_of_threads_are_given_back_too() -> None:
    done = subprocess.run([sys.executable, "-c", FREE_ENDS], check=True, capture_output=True, text=True, timeout=60)
    assert int(done.stdout) < 10 * MB
