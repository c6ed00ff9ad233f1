"""How many threads compute a step on a CPU: found by trying when a model is loaded, as it depends on both of them.

Threads of one product wait for each other, which in a small step takes longer than the product, and a processor that
they use is one less for the processes that feed the device. Leaves to the backend which steps there are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import torch

from penstock.engine.cluster.logs import event
from penstock.engine.worker.tensor_parallel import TPGroup

SHORT = 64  # tokens: up to so many a step has its threads, beyond it has others
TRIED = (16, 256)  # tokens of a short step and of a long one
GAIN = 1.3  # what twice as many threads must gain, at least
TIMES = 3  # that each is tried; the best counts, as others may have been in the way
LONG = 100_000  # microseconds: such a step has use for all threads, and is not tried with fewer


def share(of: int) -> int:
    """Of the processors that this process may use, what each of so many processes has."""
    return max(1, len(os.sched_getaffinity(0)) // of)


class CpuThreads:
    """Of two kinds of steps, on all ranks alike."""

    def __init__(self, short: int, long: int) -> None:
        self._short, self._long = short, long
        self.use(1)

    def use(self, tokens: int) -> None:
        """A step of so many tokens comes next."""
        threads = self._short if tokens <= SHORT else self._long
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)


def tune_threads(limit: int, compute: Callable[[int], object], ranks: TPGroup) -> CpuThreads:
    """`compute` a step of so many tokens, which all ranks do together."""
    limit = ranks.least(limit)
    short, long = (_least(limit, partial(compute, tokens), ranks) for tokens in TRIED)
    if limit > 1:
        event("threads", short_steps=short, long_steps=long, of=limit)
    return CpuThreads(short, max(short, long))


def _least(limit: int, compute: Callable[[], object], ranks: TPGroup) -> int:
    """From the most downwards, as long as fewer do as well."""
    best = limit
    if limit == 1:
        return best
    best_time = _microseconds(best, compute, ranks)
    while best > 1 and best_time < LONG:
        fewer = best // 2
        fewer_time = _microseconds(fewer, compute, ranks)
        if fewer_time > best_time * GAIN:
            break
        best, best_time = fewer, fewer_time
    return best


def _microseconds(threads: int, compute: Callable[[], object], ranks: TPGroup) -> int:
    """Of the slowest rank, as the others wait for it."""
    torch.set_num_threads(threads)
    compute()  # the first time costs more
    spent: list[int] = []
    while len(spent) < TIMES and (not spent or min(spent) < LONG):
        began = time.monotonic_ns()
        compute()
        spent.append(-ranks.least(-((time.monotonic_ns() - began) // 1000)))
    return min(spent)
