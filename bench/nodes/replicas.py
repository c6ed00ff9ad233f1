"""Replicas by Ray Serve: what the way through Serve adds to the first token, and how soon another replica answers.

Each stream goes to the same engine in two ways that take turns: through Serve, and to the engine's own port. So the
difference is that of the way, and neither of the engines nor of their load.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.harness.figures import Figures, median_figures
from bench.harness.output import short
from bench.harness.run import Run
from bench.harness.targets import Target
from bench.harness.turns import in_turn
from bench.impls import Unavailable
from bench.nodes import ray_client
from bench.nodes.ray_cluster import RayCluster, network_namespace, wait_for
from bench.serve_cases.cases import Load, run_load
from bench.serve_cases.servers import NAME
from penstock.server.status.snapshot_reader import SnapshotReader

HAPROXY, PROXY = "HAProxy", "Serve's proxy"
MODES = {HAPROXY: {"RAY_SERVE_ENABLE_HA_PROXY": "1"}, PROXY: {}}
DIRECT, SERVE = "direct", "through Serve"
CONCURRENCIES = (1, 8, 32)
TARGETS = {1: 5.0, 8: 5.0, 32: 25.0}  # ms of the first token over direct
REQUESTS, TOKENS = 6, 64  # requests for each stream that is open at a time
KILLS = 10
SERVES_WITHIN, NEXT_WITHIN = 120.0, 30.0  # seconds
NEXT_TARGET = 0.5  # seconds
ENGINE = {"device_model": "simulated", "step_ms": 5, "served_model_name": NAME}


@dataclass
class Way:
    """A server for `penstock bench serve`."""

    name: str
    url: str


@contextlib.contextmanager
def cluster(run: Run, mode: str, nodes: list[int], replicas: int) -> Iterator[RayCluster]:
    """With so many replicas that serve. Raises Unavailable."""
    if importlib.util.find_spec("ray") is None:
        raise Unavailable("Ray is not installed: pip install '.[engine,ray]'")
    if os.geteuid():
        raise Unavailable("a network namespace of its own needs root")
    folder = run.scratch / mode.replace(" ", "-")
    folder.mkdir(exist_ok=True)
    with network_namespace():
        started = RayCluster(nodes, folder, MODES[mode])
        try:
            started.result()
            started.run(**ENGINE, serve_options={"num_replicas": replicas})
            wait_for(lambda: len(started.engines()) == replicas, SERVES_WITHIN)
            yield started
        finally:
            started.close()


# ── the first token ──────────────────────────────────────────────────────────────────────────────────────────────────
def first_token(run: Run) -> None:
    run.results["first-token"] = {}
    for mode in MODES:
        with cluster(run, mode, [2], 1) as started:
            ((_, launcher),) = started.engines().values()
            ways = {DIRECT: Way(DIRECT, SnapshotReader(launcher).info().url), SERVE: Way(SERVE, started.url)}
            for concurrency in (1,) if run.is_quick else CONCURRENCIES:
                result = _rounds(run, ways, concurrency)
                run.results["first-token"][mode, concurrency] = result
                _show(run, mode, concurrency, result)


def _rounds(run: Run, ways: dict[str, Way], concurrency: int) -> dict[str, list[Figures]]:
    load = Load(REQUESTS * concurrency if not run.is_quick else 4, concurrency, "32", str(TOKENS))
    result: dict[str, list[Figures]] = {name: [] for name in ways}
    for turn in range(run.rounds):
        run.patience.wait_for_quiet()
        for name in in_turn(list(ways), turn):
            figures = run_load(ways[name], load, run.scratch, turn, concurrency)  # type: ignore[arg-type]
            result[name].append(
                {
                    "ttft_ms": figures["ttft"]["p50"],
                    "ttft_p99_ms": figures["ttft"]["p99"],
                    "tpot_ms": figures["tpot"]["p50"],
                }
            )
    return result


def added_ms(result: dict[str, list[Figures]]) -> float:
    """What Serve adds to the first token: the median over the rounds."""
    pairs = zip(result[SERVE], result[DIRECT], strict=True)
    return statistics.median(serve["ttft_ms"] - direct["ttft_ms"] for serve, direct in pairs)


def _show(run: Run, mode: str, concurrency: int, result: dict[str, list[Figures]]) -> None:
    rows = []
    for name, rounds in result.items():
        figures = median_figures(rounds)
        run.output.record("first-token", f"{mode}, {name}", concurrency=concurrency, **figures)
        rows.append((name, [short(figures[key]) for key in figures]))
    rows.append(("added", [short(added_ms(result)), "", ""]))
    title = f"{mode}: {concurrency} streams at a time of {TOKENS} tokens; ms"
    run.output.table(title, ["TTFT p50", "TTFT p99", "time per token"], rows)


# ── deaths ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def deaths(run: Run) -> None:
    """Kills one of two replicas, again and again: how long until the next request is served, by the other one."""
    run.results["deaths"] = {}
    for mode in MODES:
        with cluster(run, mode, [4], 2) as started:
            seconds = [asyncio.run(_next_after_kill(started)) for _ in range(1 if run.is_quick else KILLS)]
        run.results["deaths"][mode] = seconds
        figures = {"p50_s": statistics.median(seconds), "max_s": max(seconds), "kills": len(seconds)}
        run.output.record("deaths", mode, **figures)
        row = (mode, [short(figures["p50_s"]), short(figures["max_s"])])
        run.output.table("A replica is killed, until the next request is served; s", ["p50", "most"], [row])


async def _next_after_kill(started: RayCluster) -> float:
    async with ray_client.session() as client:

        async def server() -> int:
            async with client.get(f"{started.url}/health/live") as response:
                return int((await response.json())["pid"]) if response.status == 200 else 0

        await _until_both_answer(started, server)
        os.kill(next(iter(started.engines())), signal.SIGKILL)
        killed = time.monotonic()
        while not (answer := await ray_client.complete(client, started.url, "next", 1)).is_whole:
            if time.monotonic() > killed + NEXT_WITHIN:
                raise TimeoutError(f"no request is served {NEXT_WITHIN:g} s after a replica's death: {answer}")
        return time.monotonic() - killed


async def _until_both_answer(started: RayCluster, server: Any) -> None:
    observed, deadline = {0}, time.monotonic() + SERVES_WITHIN
    while len(observed) < 3 or len(started.engines()) < 2:
        if time.monotonic() > deadline:
            raise TimeoutError(f"two replicas do not answer within {SERVES_WITHIN:g} s")
        with contextlib.suppress(OSError):
            observed.add(await server())


CASES = {"first-token": first_token, "deaths": deaths}


def targets(run: Run) -> Iterator[Target]:
    value = run.results.get("first-token", {})
    for concurrency, limit in TARGETS.items():
        rounds = value.get((HAPROXY, concurrency))
        case = f"first token over direct, {HAPROXY}, {concurrency} at a time"
        yield Target(case, limit, "ms", added_ms(rounds) if rounds else None)
    for mode in MODES:
        seconds = run.results.get("deaths", {}).get(mode)
        yield Target(f"a replica is killed, {mode}: the next request is served", NEXT_TARGET, "s",
                     max(seconds) if seconds else None)  # fmt: skip
