"""The number of threads that compute a step on a CPU: measured when a model is loaded. The model runner uses it.

Threads of one product wait for each other, which in a small step takes longer than the product; and a processor that
they use is one less for the cores and servers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from penstock.engine.cluster.logs import event
from penstock.engine.worker.cpu_tensors import set_threads
from penstock.engine.worker.tensor_parallel import TPGroup

SHORT = 64  # tokens: the most of a short step; short and long steps have their own numbers of threads
TRIED = (16, 256)  # tokens of the short step and of the long one that are measured
GAIN = 1.3  # minimum speed-up for which the number of threads is doubled
TIMES = 3  # measurements that agree: others were disturbed by other processes
NEARLY = 0.95  # the least quotient of two times that agree
BUDGET = 250_000  # microseconds: then the fastest of at least TIMES measurements counts
LONG = 100_000  # microseconds: a step that takes longer uses all threads, and is not measured with fewer


def share(of: int) -> int:
    """Returns the number of processors for each of `of` processes, of those that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // of)


class CpuThreads(NamedTuple):
    """The numbers of threads for short and for long steps, the same on all ranks."""

    short: int  # steps of up to SHORT tokens
    long: int


def tune_threads(limit: int, compute: Callable[[int], object], ranks: TPGroup) -> CpuThreads:
    """Measures the best numbers of threads. `compute` runs a step of so many tokens; all ranks run it together."""
    limit = ranks.least(limit)
    short, long = (_least(limit, partial(compute, tokens), ranks) for tokens in TRIED)
    if limit > 1:
        event("threads", short_steps=short, long_steps=long, of=limit)
    return CpuThreads(short, max(short, long))


def _least(limit: int, compute: Callable[[], object], ranks: TPGroup) -> int:
    """Returns the number of threads: halves it from `limit` on, as long as the step is not GAIN times slower."""
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
    """Returns the step's time on the slowest rank, as the others wait for it."""
    set_threads(threads)
    compute()  # the first run is slower, and is not measured
    spent: list[int] = []
    # All ranks have the same times, so they stop together.
    while not spent or min(spent) < LONG:
        began = time.monotonic_ns()
        compute()
        spent.append(-ranks.least(-((time.monotonic_ns() - began) // 1000)))
        agreeing = sum(NEARLY * each <= min(spent) for each in spent)
        if agreeing == TIMES or (len(spent) >= TIMES and sum(spent) >= BUDGET):
            break
    return min(spent)
