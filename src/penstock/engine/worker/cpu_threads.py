"""The number of threads that compute a step on a CPU: measured when a model is loaded. The model runner uses it.

Threads of one product wait for each other, which in a small step takes longer than the product; and a processor that
they use is one less for the cores and servers.

Only undisturbed measurements count and are remembered: those in which no thread of the process waited for a processor.
Beside a load without such measurements, the processor time of a step decides, which no other process changes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.engine.cluster.logs import event
from penstock.engine.worker.cpu_tensors import set_threads
from penstock.engine.worker.tensor_parallel import TPGroup
from penstock.environment import cache_directory

SHORT = 64  # tokens: the most of a short step; short and long steps have their own numbers of threads
TRIED = (16, 256)  # tokens of the short step and of the long one that are measured
GAIN = 1.3  # minimum speed-up for which the number of threads is doubled
TIMES = 3  # measurements that agree: others were disturbed by other processes
NEARLY = 0.95  # the least quotient of two times that agree
BUDGET = 100_000  # microseconds: then no more is measured, as a start waits for it
LONG = 100_000  # microseconds: a step that takes longer uses all threads, and is not measured with fewer
WAITED = 0.02  # of its time: a measurement in which threads waited for processors for longer is disturbed
WORK = 7_000  # microseconds of one processor: a step with more uses all threads, where measurements are disturbed
TUNE_AFTER_S = 5.0  # seconds without a step, after which a disturbed measurement is repeated


def share(of: int) -> int:
    """Returns the number of processors for each of `of` processes, of those that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // of)


class CpuThreads(NamedTuple):
    """The numbers of threads for short and for long steps, the same on all ranks."""

    short: int  # steps of up to SHORT tokens
    long: int


class TunedThreads(NamedTuple):
    threads: CpuThreads
    is_certain: bool  # no measurement was disturbed


class Measured(NamedTuple):
    """The microseconds of a step, or a number of threads."""

    value: int
    is_certain: bool


# ── measurements ─────────────────────────────────────────────────────────────────────────────────────────────────────
def tune_threads(limit: int, compute: Callable[[int], object], ranks: TPGroup) -> TunedThreads:
    """Measures the best numbers of threads. `compute` runs a step of so many tokens; all ranks run it together."""
    figures: dict[str, str] = {}
    short, long = (_choose(limit, partial(compute, tokens), ranks, figures, f"us_{tokens}") for tokens in TRIED)
    threads = CpuThreads(short.value, max(short.value, long.value))
    is_certain = short.is_certain and long.is_certain
    if limit > 1:
        fields = {"short_steps": threads.short, "long_steps": threads.long, "of": limit, "disturbed": not is_certain}
        event("threads", logging.INFO, **fields, **figures)
    return TunedThreads(threads, is_certain)


def _choose(limit: int, compute: Callable[[], object], ranks: TPGroup, figures: dict[str, str], name: str) -> Measured:
    """Returns the number of threads: halves it from `limit` on, as long as the step is not GAIN times slower. Adds the
    measured microseconds to `figures`."""
    best = limit
    if limit == 1:
        return Measured(best, True)
    best_time = _measure(best, compute, ranks)
    times = {best: best_time}
    while best > 1 and best_time.value < LONG and best_time.is_certain:
        fewer = best // 2
        times[fewer] = fewer_time = _measure(fewer, compute, ranks)
        if not fewer_time.is_certain or fewer_time.value > best_time.value * GAIN:
            break
        best, best_time = fewer, fewer_time
    figures[name] = " ".join(f"{threads}:{time.value}" for threads, time in times.items())
    is_certain = all(time.is_certain for time in times.values())
    if not is_certain:
        work = _processor_time(compute, ranks)
        figures[name] += f" work:{work}"
        best = limit if work > WORK else 1
    return Measured(best, is_certain)


def _measure(threads: int, compute: Callable[[], object], ranks: TPGroup) -> Measured:
    """Returns the step's time on the slowest rank, as the others wait for it."""
    set_threads(threads)
    compute()  # the first run is slower, and is not measured
    spent: list[int] = []
    undisturbed: list[int] = []
    # All ranks have the same times, so they stop together.
    while len(spent) < TIMES or sum(spent) < BUDGET:
        waited, began = waited_ns(), time.monotonic_ns()
        compute()
        elapsed = time.monotonic_ns() - began
        is_undisturbed = waited_ns() - waited <= WAITED * elapsed
        spent.append(-ranks.least(-(elapsed // 1000)))
        if not ranks.least(int(is_undisturbed)):
            continue
        undisturbed.append(spent[-1])
        agreeing = sum(NEARLY * each <= min(undisturbed) for each in undisturbed)
        if agreeing == TIMES or min(undisturbed) >= LONG:
            return Measured(min(undisturbed), True)
    return Measured(min(spent), False)


def waited_ns() -> int:
    """Returns for how long threads of this process have been runnable without a processor."""
    waited = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            waited += int((task / "schedstat").read_text().split()[1])
        except FileNotFoundError:  # the thread has ended
            continue
    return waited


def _processor_time(compute: Callable[[], object], ranks: TPGroup) -> int:
    """Returns the microseconds of processor time that a step takes with one thread."""
    set_threads(1)
    compute()
    spent: list[int] = []
    while len(spent) < TIMES and sum(spent) < LONG:
        began = time.process_time_ns()
        compute()
        spent.append(-ranks.least(-((time.process_time_ns() - began) // 1000)))
    return min(spent)


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class ThreadRecord(msgspec.Struct, forbid_unknown_fields=True):
    key: list[str]
    short: int
    long: int


class ThreadMemory:
    """The numbers of threads of one model on one kind of machine, in a file that outlives the process."""

    def __init__(self, *key: object) -> None:
        """`key`: all that the numbers depend on, besides the processors of this machine."""
        self._key = [*map(str, key), cpu_model(), str(len(os.sched_getaffinity(0)))]
        self._name = f"threads-{hashlib.sha256(repr(self._key).encode()).hexdigest()[:24]}.json"

    def read(self, limit: int) -> CpuThreads | None:
        """Returns None, with a line in the log, for a file that is damaged or of another key."""
        try:
            record = msgspec.json.decode((cache_directory() / self._name).read_bytes(), type=ThreadRecord)
            if record.key != self._key or not 1 <= record.short <= record.long <= limit:
                raise ValueError(f"expected at most {limit} threads for {self._key}, got {record}")
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError, ValueError) as error:
            event("threads are not remembered", logging.WARNING, file=self._name, error=error)
            return None
        event("threads", short_steps=record.short, long_steps=record.long, of=limit, remembered=True)
        return CpuThreads(record.short, record.long)

    def write(self, threads: CpuThreads) -> None:
        """Logs a line, and raises nothing, if the file cannot be written."""
        try:
            directory = cache_directory()
            directory.mkdir(parents=True, exist_ok=True)
            new = directory / f"{self._name}.{os.getpid()}"
            new.write_bytes(msgspec.json.encode(ThreadRecord(self._key, *threads)))
            new.replace(directory / self._name)
        except (OSError, RuntimeError) as error:
            event("threads are not remembered", logging.WARNING, file=self._name, error=error)


def cpu_model() -> str:
    """Returns what Linux calls the processor: on ARM its parts are numbers."""
    text = Path("/proc/cpuinfo").read_text()
    names = dict.fromkeys(re.findall(r"^(?:model name|CPU implementer|CPU part)\s*:\s*(.*)$", text, re.MULTILINE))
    return " ".join(names) or platform.machine()
