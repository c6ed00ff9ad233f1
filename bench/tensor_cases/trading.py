"""Many threads of several processes put and get by key, at three times what the store has room for.

The longest operations are taken apart: time on a processor, time waiting for one, and time asleep. Asleep is a wait in
the native core (another writes the key, room, a lock) or for the interpreter's own lock; the same load by processes of
one thread each has no waits of the second kind.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench.harness.figures import quantile
from bench.harness.output import Output, short, short_nbytes
from bench.harness.quiet import load_between, look
from bench.harness.role import die_with_parent

SMALLEST_NBYTES, LARGEST_SHARE = 4 << 10, 64  # bytes; the largest value is that part of the store
DEMAND = 3  # times the store
LIMIT = 120.0  # seconds, for all of them
WORST = 5  # operations of each thread that are kept with their parts

now = time.perf_counter_ns


@dataclass(order=True)
class Took:
    """One operation, in nanoseconds. What is left of `wall` was asleep."""

    wall: int
    on_cpu: int
    queued: int
    what: str

    @property
    def asleep(self) -> int:
        return max(0, self.wall - self.on_cpu - self.queued)


@dataclass
class Traded:
    """What one process's threads did."""

    walls: dict[str, list[int]] = field(default_factory=lambda: {"get": [], "put": []})
    worst: list[Took] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def sizes_of(nbytes: int) -> list[int]:
    """Log-uniform, until they sum up to the demand on a store of so many bytes; always the same."""
    chance = random.Random(4)
    largest, demand_nbytes = nbytes // LARGEST_SHARE, DEMAND * nbytes
    sizes: list[int] = []
    while demand_nbytes > 0:
        sizes.append(round(SMALLEST_NBYTES * (largest / SMALLEST_NBYTES) ** chance.random()) // 8 * 8)
        demand_nbytes -= sizes[-1]
    return sizes


def key(name: int) -> bytes:
    return b"traded".ljust(24, b".") + name.to_bytes(8, "little")


class Thread:
    """One thread's load."""

    def __init__(self, store: Any, sizes: Sequence[int], operations: int, seed: int) -> None:
        self.store, self.sizes, self.operations = store, sizes, operations
        self.chance = random.Random(seed)
        self.traded = Traded()
        self.room = np.zeros(max(sizes) // 8, np.int64)
        self.held: Any = None  # the last value, while the next is got or put: as a request holds its image

    def run(self) -> None:
        self.schedstat = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        try:
            for _ in range(self.operations):
                self.get_or_put(int(len(self.sizes) * self.chance.random() ** 2))
        except BaseException as error:
            self.traded.faults.append(f"{type(error).__name__}: {error}")
        finally:
            self.held = None
            os.close(self.schedstat)

    def parts(self) -> tuple[int, int]:
        on_cpu, queued, _ = os.pread(self.schedstat, 64, 0).split()
        return int(on_cpu), int(queued)

    def get_or_put(self, name: int) -> None:
        from penstock import Missing

        try:
            stored = self.timed("get", lambda: self.store.get(key(name)))
        except Missing:
            self.traded.counts["miss"] += 1
            array = self.room[: self.sizes[name] // 8]
            array[0] = array[-1] = name
            stored = self.timed("put", lambda: self.store.put(array, key=key(name)))
        else:
            self.traded.counts["hit"] += 1
        observed = stored.value()
        if observed.nbytes != self.sizes[name] or observed[0] != name or observed[-1] != name:
            self.traded.faults.append(f"key {name} gave {observed.nbytes} bytes of {observed[0]}, {observed[-1]}")
        self.held = observed

    def timed(self, what: str, operation: Any) -> Any:
        on_cpu, queued = self.parts()
        began = now()
        try:
            return operation()
        finally:
            wall = now() - began
            self.traded.walls[what].append(wall)
            worst = self.traded.worst
            if len(worst) < WORST or wall > worst[0].wall:
                then_on_cpu, then_queued = self.parts()
                worst.append(Took(wall, then_on_cpu - on_cpu, then_queued - queued, what))
                worst.sort()
                del worst[: max(0, len(worst) - WORST)]


def trade(control: Connection, store: Any, threads: int, operations: int, nbytes: int, seed: int) -> None:
    """A process: all its threads are one peer, as those of a server are."""
    die_with_parent()
    sizes = sizes_of(nbytes)
    playing = [Thread(store, sizes, operations, seed + number) for number in range(threads)]
    store.pool.join()
    control.send("ready")
    control.recv()
    running = [threading.Thread(target=each.run) for each in playing]
    for each in running:
        each.start()
    for each in running:
        each.join()
    control.send([each.traded for each in playing])
    control.recv()  # its end would give back what it holds by mistake, so first that is looked at


@dataclass
class Trade:
    """What all of them did, and what the store was left with."""

    traded: list[Traded]
    seconds: float
    faults: list[str]
    is_quiet: bool
    foreign_cores: float

    def walls(self, *kinds: str) -> list[int]:
        return sorted(wall for each in self.traded for kind in kinds for wall in each.walls[kind])

    @property
    def longest(self) -> Took:
        return max(took for each in self.traded for took in each.worst)


def run(processes: int, threads: int, operations: int, nbytes: int) -> Trade:
    import penstock

    spawn = get_context("spawn")
    store = penstock.Store(nbytes, name="traded")
    pairs = [spawn.Pipe() for _ in range(processes)]
    started = []
    try:
        for index, (_, far) in enumerate(pairs):
            each = operations // processes // threads
            process = spawn.Process(target=trade, args=(far, store, threads, each, nbytes, 1000 * index), daemon=True)
            process.start()
            far.close()
            started.append(process)
        for near, _ in pairs:
            near.recv()
        before, began = look(), time.monotonic()
        for near, _ in pairs:
            near.send("go")
        traded: list[Traded] = []
        for near, _ in pairs:
            if not near.poll(max(0.0, LIMIT - (time.monotonic() - began))):
                raise RuntimeError(f"{processes} × {threads}: a process was not done within {LIMIT:.0f} s")
            traded += near.recv()
        seconds, load = time.monotonic() - began, load_between(before, look())
        faults = [fault for each in traded for fault in each.faults] + left_over(store)
        for near, _ in pairs:
            near.send("end")
        for process in started:
            process.join(10)
        return Trade(traded, seconds, faults, load.is_quiet, load.cores)
    finally:
        for process in started:
            process.kill()
            process.join()


def left_over(store: Any) -> list[str]:
    """Returns faults of a store without holders: a key twice, bytes that no key has, blocks after a clear()."""
    faults = []
    items = store.stats().items
    if len({item.key for item in items}) != len(items):
        faults.append("a key is there twice")
    faults += [f"{item.holders} still hold a value" for item in items if item.holders]
    taken, saved = store.stats().pool.taken_nbytes, sum(-(-item.nbytes // 64) * 64 for item in items)
    if taken != saved:
        faults.append(f"{taken} bytes are taken, and the keys have {saved}")
    store.clear()
    if store.stats().pool.taken_nbytes:
        faults.append(f"{store.stats().pool.taken_nbytes} bytes are taken after everything was cleared")
    return faults


def run_trading(output: Output, traders: Sequence[tuple[int, int]], operations: int, nbytes: int) -> dict[str, Trade]:
    done: dict[str, Trade] = {}
    rows = []
    for processes, threads in traders:
        name = f"{processes} × {threads}"
        done[name] = value = run(processes, threads, operations, nbytes)
        counts: Counter[str] = sum((each.counts for each in value.traded), Counter())
        longest = value.longest
        figures: dict[str, float] = {"per_s": len(value.walls("get", "put")) / value.seconds}
        cells = [short(figures["per_s"]), f"{counts['hit'] / max(1, counts.total()):.0%}"]
        for kind in ("get", "put"):
            walls = value.walls(kind)
            for label, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999), ("max", 1.0)):
                figures[f"{kind}_{label}_us"] = quantile(walls, share) / 1e3
            cells.append(" / ".join(short(figures[f"{kind}_{label}_us"]) for label in ("p50", "p99", "p999", "max")))
        parts = {"on_cpu": longest.on_cpu, "queued": longest.queued, "asleep": longest.asleep}
        cells.append(f"{longest.what} {' + '.join(short(each / 1e6) for each in parts.values())}")
        cells.append(str(len(value.faults)))
        rows.append((name, cells))
        output.record(
            "trading", "penstock-store", processes=processes, threads=threads, nbytes=nbytes, **figures,
            longest_ms=longest.wall / 1e6, longest_what=longest.what,
            **{f"longest_{part}_ms": each / 1e6 for part, each in parts.items()},
            hits=counts["hit"], misses=counts["miss"], faults=len(value.faults),
            foreign_cores=value.foreign_cores, quiet=value.is_quiet,
        )  # fmt: skip
        for fault in value.faults[:5]:
            output.say(f"  {name}: {fault}")
    output.table(
        f"{operations:,} operations on keys of 4 KiB to {short_nbytes(nbytes // LARGEST_SHARE)}, "
        f"{DEMAND} times as many bytes as the store of {short_nbytes(nbytes)}; processes × threads",
        ["per second", "hits", "get µs p50 / p99 / p99.9 / max", "put µs", "the longest: ms on CPU + queued + asleep",
         "faults"],
        rows,
    )  # fmt: skip
    for name, value in done.items():
        if not value.is_quiet:
            output.say(f"  {name}: foreign processes took {value.foreign_cores:.2f} cores; its times say little")
    return done
