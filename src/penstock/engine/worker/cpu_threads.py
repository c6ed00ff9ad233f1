"""The number of threads that compute a step on a CPU: measured when a model is loaded. The model runner uses it.

Threads of one product wait for each other, which in a small step takes longer than the product; and a processor that
they use is one less for the cores and servers.

Other programs may compute meanwhile. The kernel counts how long each thread could have run and did not; that is
subtracted, so that a worker that starts beside a load chooses what it chooses on a quiet machine.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from penstock.engine.cluster.logs import event
from penstock.engine.worker.tensor_parallel import TPGroup

SHORT = 64  # tokens: the most of a short step; short and long steps have their own numbers of threads
TRIED = (16, 256)  # tokens of the short step and of the long one that are measured
GAIN = 1.3  # minimum speed-up for which the number of threads is doubled
TIMES = 5  # measurements of each number of threads; the fastest counts
THREADS = Path("/proc/self/task")
LONG = 100_000  # microseconds: a step that takes longer uses all threads, and is not measured with fewer


def share(of: int) -> int:
    """Returns the number of processors for each of `of` processes, of those that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // of)


class CpuThreads(NamedTuple):
    """The numbers of threads for short and for long steps, the same on all ranks."""

    short: int  # steps of up to SHORT tokens
    long: int


class Trial(NamedTuple):
    """The fastest step with this number of threads, as the slowest rank has it."""

    threads: int
    microseconds: int  # without the time that other programs had the processors
    waited: int  # microseconds of that step in which other programs had the processors

    def __str__(self) -> str:
        return f"{self.threads}:{self.microseconds}us+{self.waited}us"


def tune_threads(limit: int, compute: Callable[[int], object], ranks: TPGroup) -> CpuThreads:
    """Measures the best numbers of threads. `compute` runs a step of so many tokens; all ranks run it together."""
    limit = ranks.least(limit)
    if limit == 1:
        return CpuThreads(1, 1)
    trials = [_try_threads(limit, partial(compute, tokens), ranks) for tokens in TRIED]
    (short, short_trials), (long, long_trials) = trials
    event(
        "threads",
        short_steps=short,
        long_steps=max(short, long),
        of=limit,
        short_trials=",".join(map(str, short_trials)),
        long_trials=",".join(map(str, long_trials)),
    )
    return CpuThreads(short, max(short, long))


def _try_threads(limit: int, compute: Callable[[], object], ranks: TPGroup) -> tuple[int, list[Trial]]:
    """Halves the number of threads from `limit` on, as long as the step is not GAIN times slower. Returns the best
    number and all trials."""
    trials = [_measure(limit, compute, ranks)]
    while trials[-1].threads > 1 and trials[-1].microseconds < LONG:
        trials.append(_measure(trials[-1].threads // 2, compute, ranks))
        if trials[-1].microseconds > trials[-2].microseconds * GAIN:
            return trials[-2].threads, trials
    return trials[-1].threads, trials


def _measure(threads: int, compute: Callable[[], object], ranks: TPGroup) -> Trial:
    torch.set_num_threads(threads)
    compute()  # the first run is slower, and is not measured
    trials: list[Trial] = []
    while len(trials) < TIMES and (not trials or trials[-1].microseconds < LONG):
        before, began = _run_delays(), time.monotonic_ns()
        compute()
        spent, after = time.monotonic_ns() - began, _run_delays()
        waited = max((after[thread] - before.get(thread, 0) for thread in after), default=0)
        slowest = -ranks.least(-(max(spent - waited, 0) // 1000))  # the others wait for that rank
        trials.append(Trial(threads, slowest, waited // 1000))
    return min(trials, key=lambda trial: trial.microseconds)


def _run_delays() -> dict[str, int]:
    """Returns the nanoseconds that each thread of this process has waited for a processor; empty: not known."""
    delays: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):  # a kernel without these counters
        for thread in THREADS.iterdir():
            with contextlib.suppress(FileNotFoundError):  # the thread has ended
                delays[thread.name] = int((thread / "schedstat").read_text().split()[1])
    return delays
