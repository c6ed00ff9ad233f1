"""One value from the submit of its request to a view in each worker: the store beside inline messages (#19702, #51207).

The tree is a real one on a simulated device. Its workers open the values of a request and read a byte of each page.
What a request without a value takes is subtracted, in time and in processor time of all processes. The second part
carries the same bytes without an engine, beside vLLM's message queue, its arena and its ring.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from bench.engine_cases.load import SHORT, Server, until
from bench.engine_cases.trees import OURS as TREE
from bench.engine_cases.trees import WAYS, Bench
from bench.harness.figures import Figures
from bench.harness.output import short
from bench.harness.targets import Target
from bench.harness.turns import Turns, in_turn
from bench.impls import TENSORS
from bench.source_cases.context import Context
from bench.source_cases.images import HITS
from bench.source_cases.payloads import ARENA, INLINE, PAYLOADS, QUICK_PAYLOADS, RING, STORE, THEIRS, Payload
from bench.tensor_cases import carrying
from bench.tensors import available, with_options
from penstock import Scope
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.protocol.config import SimulatedDevice
from penstock.tensor import Handle

NOTHING = "nothing"
TENSOR_PARALLEL_SIZES, QUICK_TENSOR_PARALLEL_SIZES = (2, 4), (2,)
ROUNDS, QUICK_ROUNDS = 25, 5  # requests of each way
SMALL_NBYTES, MORE = 1 << 20, 8  # of smaller payloads so many times as many: they take less than requests vary
PLACEHOLDER = 64  # tokens that stand for a value
STEP = 0.001  # seconds of the simulated device
STORE_NBYTES, FILLING_NBYTES = 1 << 30, 1 << 26
SETTLED = 0.005  # seconds in which processes give back what a request has held
LARGE = ("23 MB", "96 MB")
AT_LEAST = 2.0  # times inline's time and processor time, of large payloads
CARRIED = {THEIRS: "vllm-queue", ARENA: "vllm-arena", RING: "vllm-cache"}
_numbers = itertools.count(1 << 29)


def run(context: Context) -> Iterator[Target]:
    payloads = context.select(QUICK_PAYLOADS if context.is_quick else PAYLOADS)
    for ranks in QUICK_TENSOR_PARALLEL_SIZES if context.is_quick else TENSOR_PARALLEL_SIZES:
        figures = asyncio.run(_measure(context, ranks, payloads))
        yield from _describe(context, f"TP {ranks}", payloads, figures)
    yield from _carry(context, payloads)


# ── through an engine ────────────────────────────────────────────────────────────────────────────────────────────────
Measured = dict[tuple[str, str], dict[str, Figures]]  # by payload and hits, by way


async def _measure(context: Context, ranks: int, payloads: Sequence[Payload]) -> Measured:
    simulated = SimulatedDevice(step_seconds=STEP)
    scratch = context.scratch / f"transfer-{ranks}"
    bench = Bench.of(WAYS[TREE], scratch, simulated=simulated, tensor_parallel_size=ranks, store_nbytes=STORE_NBYTES)
    rounds = QUICK_ROUNDS if context.is_quick else ROUNDS
    measured: Measured = {}
    try:
        bench.start()
        await bench.serving()
        asking = _Asking(bench)
        for payload in payloads:
            for hits in HITS:
                times = MORE if payload.nbytes < SMALL_NBYTES else 1
                measured[payload.name, hits] = asking.measure(payload.nbytes, hits == "hit", rounds * times)
        asking.server.close()
    finally:
        await bench.stop()
    return measured


class _Asking:
    """Requests to one tree, one at a time."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.server = Server(bench)
        self.random = np.random.default_rng(0)
        self._fill()

    def _fill(self) -> None:
        """Writes all of the store once: the first touch of a page of shared memory costs more than its copy."""
        store = self.bench.cluster.store
        value = np.zeros(FILLING_NBYTES, np.uint8)
        for _ in range(STORE_NBYTES // FILLING_NBYTES):
            with Scope(store, inline_nbytes=0) as scope:
                scope.put(value, key=os.urandom(32))

    def measure(self, nbytes: int, is_known: bool, rounds: int) -> dict[str, Figures]:
        """Returns milliseconds and processor milliseconds of each way, in turns; the medians, and the means."""
        value = self.random.integers(0, 256, nbytes, np.uint8)
        milliseconds: dict[str, list[float]] = {STORE: [], INLINE: [], NOTHING: []}
        processor: dict[str, list[float]] = {way: [] for way in milliseconds}
        known = os.urandom(32)
        for number in range(rounds + 2):
            for way in in_turn(list(milliseconds), number):  # each way also follows each other one
                key = known if is_known else os.urandom(32)
                before = self._used()
                took = self._ask(way, value, key)
                time.sleep(SETTLED)
                if number >= 2:  # the first ones touch pages for the first time
                    milliseconds[way].append(took * 1e3)
                    processor[way].append((self._used() - before) / 1e6)
        return {
            way: {"ms": statistics.median(milliseconds[way]), "cpu_ms": statistics.median(processor[way])}
            for way in milliseconds
        }

    def _ask(self, way: str, value: Any, key: bytes) -> float:
        """Returns the seconds from before the put to the first token, which follows the workers' views."""
        server = self.server
        store = self.bench.cluster.store if way == STORE else None
        prompt = self.random.integers(0, server.vocabulary, PLACEHOLDER + 16, np.int32)
        began = time.monotonic()
        with Scope(store, inline_nbytes=0) as scope:
            items: tuple[tuple[Handle, int, int], ...] = ()
            if way != NOTHING:
                items = ((scope.put(value, key=key), 0, PLACEHOLDER),)
            server.ask(next(_numbers), prompt, params=SHORT, items=items)
            delta = server.receive()
            took = time.monotonic() - began
            while delta.finished is None:
                delta = server.receive()
            until(lambda: server.row[StatusBoard.OPEN] == 0)
        return took

    def _used(self) -> int:
        """Returns the nanoseconds on a processor of all threads of the tree's processes, and of this one."""
        pids = [child.pid for unit in self.bench.units for child in unit.children.values()]
        return sum(_thread_nanoseconds(pid) for pid in (os.getpid(), *pids))


def _thread_nanoseconds(pid: int) -> int:
    nanoseconds = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # the thread has ended
            nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds


def _describe(context: Context, about: str, payloads: Sequence[Payload], measured: Measured) -> Iterator[Target]:
    rows = []
    for payload in payloads:
        for hits, share in HITS.items():
            figures = measured[payload.name, hits]
            cells = []
            for key in ("ms", "cpu_ms"):
                own = {way: figures[way][key] - figures[NOTHING][key] for way in (STORE, INLINE)}
                times = own[INLINE] / max(own[STORE], 1e-2)  # 10 us: less is noise
                cells += [short(own[STORE]), short(own[INLINE]), f"×{short(times)}"]
                yield from _target(f"{about}, {payload.name}, {share}", key, times, payload)
                if key == "ms":
                    context.transfers.update({(about, payload.name, hits, way): own[way] for way in own})
            rows.append((f"{payload.name}, {share}", cells))
            for way in (STORE, INLINE):
                context.output.record(
                    "transfer", way, about=about, payload=payload.name, nbytes=payload.nbytes, hits=hits,
                    **figures[way], nothing_ms=figures[NOTHING]["ms"], nothing_cpu_ms=figures[NOTHING]["cpu_ms"],
                )  # fmt: skip
    heads = ["store, ms", "inline", "times", "store, processor ms", "inline", "times"]
    context.output.table(f"From submit to view at {about}, less a request without a value (#19702)", heads, rows)


def _target(about: str, key: str, times: float, payload: Payload) -> Iterator[Target]:
    what = {"ms": "submit to view", "cpu_ms": "processor time of the transfer"}[key]
    limit = AT_LEAST if payload.name in LARGE else 1.0
    yield Target(f"{about}: {what}, inline's times the store's", limit, "x", times, is_least=True)


# ── without an engine, beside vLLM's ways ────────────────────────────────────────────────────────────────────────────
def _carry(context: Context, payloads: Sequence[Payload]) -> Iterator[Target]:
    ways = [CARRIED[way] for way in (THEIRS, ARENA, RING) if way in context.ways]
    for readers in QUICK_TENSOR_PARALLEL_SIZES if context.is_quick else TENSOR_PARALLEL_SIZES:
        turns = context.turns(carrying.STORE, Turns)
        sizes = [payload.nbytes for payload in payloads]
        usable = available(context, [carrying.STORE, *ways], TENSORS)
        try:
            turns.open(with_options(usable, largest=max(sizes)), readers)
            carrying.warm(turns, max(sizes))
            outcomes = carrying.run_sizes(turns, sizes, 0.05 if context.is_quick else 0.3)
            turns.close()
        finally:
            turns.kill()
        for payload in payloads:
            outcome = outcomes[payload.nbytes]
            ratios = [outcome.ratio(way, "view_p50_us", carrying.STORE) for way in ways if way in outcome.rounds]
            figure = min(ratios) if ratios and carrying.STORE in outcome.rounds else None
            about = f"{payload.name} to {readers} receivers, put to view: vLLM's best, times the store's"
            yield Target(about, 1, "x", figure, is_least=True)
