"""Images between processes: the store beside inline messages and vLLM, over HTTP and without it (#19702, #32104).

A load is asked for twice with the same images: first the store has none of them, then all. The prefix cache is off, as
it would find the whole prompt the second time.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.engine_cases.load import SHORT, Server, until
from bench.engine_cases.trees import OURS as TREE
from bench.engine_cases.trees import WAYS, Bench
from bench.harness.figures import Figures
from bench.harness.output import short
from bench.harness.targets import Target
from bench.harness.turns import Outcome
from bench.serve_cases.cases import Load, asked
from bench.serve_cases.servers import OURS, THEIRS, Ours, Theirs
from bench.serve_cases.servers import Server as HttpServer
from bench.source_cases.context import Context
from penstock import Scope, Store
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.protocol.config import SHIPPED, SimulatedDevice
from penstock.tensor import Handle

STORE, INLINE = "store", "inline"
LOAD, QUICK_LOAD = Load(24, 4, "16", "1", images=1), Load(4, 2, "16", "1", images=1)
LONGEST = 1024
PIXELS = 4 << 20  # bytes
PLACES = 64  # ids that stand for an image
STEP = 0.001  # seconds of the simulated device
KEPT = {"miss": "0 % hits", "hit": "100 % hits"}
_keys, _numbers = itertools.count(), itertools.count(1 << 29)


# ── a vision model at TP 2 ───────────────────────────────────────────────────────────────────────────────────────────
def run(context: Context) -> Iterator[Target]:
    kinds = {
        STORE: partial(_ours, ("-tp", "2", "--tensor-transport", "store")),
        INLINE: partial(_ours, ("-tp", "2", "--tensor-transport", "inline")),
    }
    if THEIRS in context.ways:
        kinds[THEIRS] = partial(_theirs, ("--tensor-parallel-size", "2"))
    yield from _over_http(context, "a vision model at TP 2 (#19702)", kinds)
    yield from _put_to_value(context)


def run_many(context: Context) -> Iterator[Target]:
    """Two servers and two engines, with the store and without it."""
    several = ("-asc", "2", "-dp", "2")
    kinds = {
        STORE: partial(_ours, (*several, "--tensor-transport", "store")),
        INLINE: partial(_ours, (*several, "--tensor-transport", "inline")),
    }
    yield from _over_http(context, "2 API servers, 2 engines (#32104)", kinds)


def _ours(options: tuple[str, ...], log: Path) -> HttpServer:
    usual = (SHIPPED, "--max-model-len", str(LONGEST), "--dtype", "float32", "--no-enable-prefix-caching")
    return Ours.of([*usual, *options], log)


def _theirs(options: tuple[str, ...], log: Path) -> HttpServer:
    more = (*options, "--no-enable-prefix-caching")
    return Theirs.of_model(Path(SHIPPED), log, longest=LONGEST, is_compiled=False, more=more)


def _twice(server: HttpServer, load: Load, scratch: Path, seed: int) -> Figures:
    """The same requests twice: the images of the second time are known."""
    figures: Figures = {}
    for kept in KEPT:
        found = asked(server, load, scratch, seed)
        figures |= {f"{kept}.requests_per_s": found["requests_per_s"], f"{kept}.ttft_ms": found["ttft"]["p50"]}
    return figures


def _over_http(context: Context, about: str, kinds: Mapping[str, Any]) -> Iterator[Target]:
    load = QUICK_LOAD if context.is_quick else LOAD
    with context.servers(kinds, STORE) as servers:
        servers.take(servers.one_round_of(load), _twice, 1)  # warms up
        outcome = servers.take(servers.one_round_of(load), _twice, servers.rounds)
        is_compared = servers.compares(outcome)
    rows = []
    for name in outcome.rounds:
        figures = outcome.figures(name)
        cells = []
        for kept in KEPT:
            ratio = f" ×{short(outcome.ratio(name, f'{kept}.requests_per_s', STORE))}" if is_compared else ""
            cells += [f"{short(figures[f'{kept}.requests_per_s'])}{ratio}", short(figures[f"{kept}.ttft_ms"])]
        rows.append((name, cells))
        said = {key.replace(".", "_"): value for key, value in figures.items()}
        quiet = {"foreign_cores": outcome.foreign_cores, "quiet": outcome.is_quiet}
        context.output.record("images", name, about=about, **said, rounds=servers.rounds, **quiet)
    heads = [f"{share}: {what}" for share in KEPT.values() for what in ("requests/s", "TTFT, ms")]
    context.output.table(f"{about}: {load}, the shipped model", heads, rows)
    for kept, share in KEPT.items():
        for key, what, is_least in (("requests_per_s", "requests/s", True), ("ttft_ms", "TTFT", False)):
            ratio = _ratio(outcome, f"{kept}.{key}", THEIRS)
            if THEIRS in kinds:
                yield Target(f"{about}: {what}, {share}, over vLLM's", 1, "x", ratio, is_least=is_least)


def _ratio(outcome: Outcome, key: str, other: str) -> float | None:
    if not {STORE, other} <= outcome.rounds.keys():
        return None
    return 1 / outcome.ratio(other, key, STORE)


# ── from put to value ────────────────────────────────────────────────────────────────────────────────────────────────
def _put_to_value(context: Context) -> Iterator[Target]:
    """4 MB of pixels that the store has: from before the server's `put` to the first token, two workers."""
    figures = asyncio.run(_first_tokens(context))
    empty = figures.pop("nothing")
    rows = [(name, [short(ms), short(ms - empty)]) for name, ms in figures.items()]
    context.output.table(
        f"{PIXELS >> 20} MiB of pixels that are known, TP 2, steps of {STEP * 1e3:g} ms, ms",
        ["to the first token", "more than without an image"],
        rows,
    )
    ratio = (figures[STORE] - empty) / (figures[INLINE] - empty)
    context.output.record("put_to_value", OURS, nothing_ms=empty, store_ms=figures[STORE], inline_ms=figures[INLINE])
    yield Target("from put to value, 4 MB, TP 2, known: the store over inline", 0.6, "x", ratio)


async def _first_tokens(context: Context) -> dict[str, float]:
    """Medians in milliseconds, by how the image travels; `nothing`: there is none."""
    options = {
        "simulated": SimulatedDevice(step_seconds=STEP),
        "tensor_parallel_size": 2,
        "store_nbytes": 16 * PIXELS,
    }
    bench = Bench.of(WAYS[TREE], context.scratch, **options)
    took: dict[str, list[float]] = {STORE: [], INLINE: [], "nothing": []}
    try:
        bench.start()
        await bench.serving()
        server = Server(bench)
        chance = np.random.default_rng(0)
        pixels = chance.integers(0, 256, PIXELS, np.uint8)
        key = next(_keys).to_bytes(32, "little")
        for _ in range(5 if context.is_quick else 60):
            for name, times in took.items():
                store = bench.tree.store if name == STORE else None
                image = None if name == "nothing" else pixels
                times.append(_first_token(server, store, image, key, chance))
        server.close()
    finally:
        await bench.stop()
    return {name: statistics.median(times[len(times) // 5 :]) * 1e3 for name, times in took.items()}


def _first_token(server: Server, store: Store | None, pixels: Any, key: bytes, chance: np.random.Generator) -> float:
    prompt = chance.integers(0, server.vocabulary, PLACES + 16, np.int32)
    began = time.monotonic()
    with Scope(store, inline_nbytes=0) as scope:
        items: tuple[tuple[Handle, int, int], ...] = ()
        if pixels is not None:
            items = ((scope.put(pixels, key=key), 0, PLACES),)
        server.ask(next(_numbers), prompt, params=SHORT, items=items)
        delta = server.receive()
        took = time.monotonic() - began
        while delta.finished is None:
            delta = server.receive()
        until(lambda: server.row[StatusBoard.OPEN] == 0)
    return took
