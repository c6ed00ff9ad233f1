"""The number of threads that compute a step on a CPU: measured when a model is loaded. The model runner uses it.

Threads of one product wait for each other, which in a small step takes longer than the product; and a processor that
they use is one less for the cores and servers.

Measurements count, and are remembered, if other processes left the processors alone meanwhile. Otherwise the processor
time of a step decides, which other processes change little; it is remembered for the next lives of the engine only.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import platform
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock._native import start_ticks
from penstock.engine.cluster.logs import event
from penstock.engine.worker.cpu_kernels import set_threads
from penstock.engine.worker.tensor_parallel import TPGroup
from penstock.environment import cache_directory

SHORT = 128  # tokens: the most of a short step. Two threads gain 0.4 to 1.24 at 128 tokens of small models, 1.4 at 192
TRIED = (16, 256)  # requests of the short step that is measured, and tokens of the chunk of the long one
GAIN = 1.3  # minimum speed-up for which the number of threads is doubled
TIMES = 3  # measurements that agree: others were disturbed by other processes
NEARLY = 0.95  # the least quotient of two times that agree
BUDGET = 100_000  # microseconds: then no more is measured, as a start waits for it
LONG = 100_000  # microseconds: a step that takes longer uses all threads, and is not measured with fewer
OTHERS = 0.3  # processors, besides idle ones: the most that other processes take of an undisturbed measurement
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
    is_certain: bool  # no other process has disturbed the measurements


# ── measurements ─────────────────────────────────────────────────────────────────────────────────────────────────────
def tune_threads(limit: int, compute: Callable[[int], object], ranks: TPGroup) -> TunedThreads:
    """Measures the best numbers of threads. `compute` runs a step of so many tokens; all ranks run it together."""
    if limit == 1:
        return TunedThreads(CpuThreads(1, 1), True)
    figures: dict[str, str] = {}
    began, others = time.monotonic_ns(), others_ns()
    short, long = (_fastest(limit, partial(compute, tokens), ranks, figures, f"us_{tokens}") for tokens in TRIED)
    elapsed, others = time.monotonic_ns() - began, others_ns() - others
    idle = max(0, (os.cpu_count() or 1) - limit)
    is_certain = bool(ranks.least(int(others <= (idle + OTHERS) * elapsed)))
    if not is_certain:
        works = [_processor_time(partial(compute, tokens), ranks) for tokens in TRIED]
        short, long = (limit if work > WORK else 1 for work in works)
        figures["us_of_one_processor"] = " ".join(map(str, works))
    threads = CpuThreads(short, max(short, long))
    fields = {"short_steps": threads.short, "long_steps": threads.long, "of": limit, "disturbed": not is_certain}
    event("threads", logging.INFO, **fields, others=round(others / elapsed, 2), **figures)
    return TunedThreads(threads, is_certain)


def _fastest(limit: int, compute: Callable[[], object], ranks: TPGroup, figures: dict[str, str], name: str) -> int:
    """Returns the number of threads: halves it from `limit` on, as long as the step is not GAIN times slower. Adds the
    measured microseconds to `figures`."""
    best, best_time = limit, _microseconds(limit, compute, ranks)
    times = {best: best_time}
    while best > 1 and best_time < LONG:
        fewer = best // 2
        times[fewer] = fewer_time = _microseconds(fewer, compute, ranks)
        if fewer_time > best_time * GAIN:
            break
        best, best_time = fewer, fewer_time
    figures[name] = " ".join(f"{threads}:{spent}" for threads, spent in times.items())
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


def others_ns() -> float:
    """Returns the processor time that other processes of this machine have had, in ticks of about 10 ms. NaN, which no
    limit allows: the kernel does not say."""
    try:
        user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
    except (OSError, ValueError):
        return math.nan
    ticks = user + nice + system + sum(interrupts)
    return ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK") - time.process_time_ns()


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
    launcher: int = 0  # see `_launcher`: its workers may use disturbed measurements; 0: undisturbed


def _launcher() -> int:
    """Returns a number for the launcher: in each container, a launcher may have the same pid."""
    return start_ticks(os.getppid()) << 22 | os.getppid()


class ThreadMemory:
    """The numbers of threads of one model on one kind of machine, in a file that outlives the process."""

    def __init__(self, *key: object) -> None:
        """`key`: all that the numbers depend on, besides the processors of this machine."""
        self._key = [*map(str, key), cpu_model(), str(len(os.sched_getaffinity(0)))]
        self._name = f"threads-{hashlib.sha256(repr(self._key).encode()).hexdigest()[:24]}.json"

    def read(self, limit: int) -> TunedThreads | None:
        """Returns None for disturbed measurements of another engine; with a line in the log, for a file that is damaged
        or of another key."""
        try:
            record = msgspec.json.decode((cache_directory() / self._name).read_bytes(), type=ThreadRecord)
            if record.key != self._key or not 1 <= record.short <= record.long <= limit:
                raise ValueError(f"expected at most {limit} threads for {self._key}, got {record}")
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError, ValueError) as error:
            event("threads are not remembered", logging.WARNING, file=self._name, error=error)
            return None
        if record.launcher not in (0, _launcher()):
            return None
        event("threads", short_steps=record.short, long_steps=record.long, of=limit, remembered=True)
        return TunedThreads(CpuThreads(record.short, record.long), record.launcher == 0)

    def write(self, tuned: TunedThreads) -> None:
        """Logs a line, and raises nothing, if the file cannot be written."""
        try:
            directory = cache_directory()
            directory.mkdir(parents=True, exist_ok=True)
            new = directory / f"{self._name}.{os.getpid()}"
            record = ThreadRecord(self._key, *tuned.threads, 0 if tuned.is_certain else _launcher())
            new.write_bytes(msgspec.json.encode(record))
            new.replace(directory / self._name)
        except (OSError, RuntimeError) as error:
            event("threads are not remembered", logging.WARNING, file=self._name, error=error)


def cpu_model() -> str:
    """Returns what Linux calls the processor: on ARM its parts are numbers."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    names = dict.fromkeys(re.findall(r"^(?:model name|CPU implementer|CPU part)\s*:\s*(.*)$", text, re.MULTILINE))
    return " ".join(names) or platform.machine()
