"""Streams of a killed worker: how long they pause, and what a server keeps of them so that they can go on.

The restart of a group is measured with the same kill: from the signal until the next core serves, by its log.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.harness.figures import Figures, median_figures
from bench.harness.output import short
from bench.harness.turns import in_turn
from bench.serve_cases.cases import Servers
from bench.serve_cases.servers import NAME, OURS, Failed, Ours
from penstock.tools.inspect.processes import private_nbytes_of

ANSWERED = 120.0  # seconds; for one round
BEFORE_KILL = 20  # events of each stream
AFTER_KILL = 20
LEAST_PAUSE = 5.0  # times the median gap of a stream's events: a longer gap at the kill is a pause
ANOTHER, ONLY = "another group is there", "the only group"
KEPT, NOT_KEPT = "kept", "not kept"
KEPT_TOKENS = 4000


class Stream:
    """One streamed completion, with the times of its events."""

    def __init__(self, server: Ours, number: int, tokens: int, **params: Any) -> None:
        self._server = server
        self._body = {"model": NAME, "prompt": f"stream {number}", "max_tokens": tokens, "ignore_eos": True, **params}
        self.events: list[float] = []

    async def run(self, keeps_times: bool = True) -> None:
        """Raises Failed if the stream ends with an error, or without its end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port, limit=1 << 20)
        try:
            body = json.dumps({**self._body, "stream": True}).encode()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            while (line := await reader.readline()) != b"data: [DONE]\n":
                if not line or b'"error":{' in line:
                    raise Failed(f"{self._server.name}: a stream ended with {line[:200]!r}")
                if line.startswith(b"data: "):
                    self.events.append(time.monotonic() if keeps_times else 0.0)
                    self.on_event(line[len(b"data: ") :])
        finally:
            writer.transport.abort()

    def on_event(self, data: bytes) -> None:
        """Takes the JSON of an event."""

    def pause(self, killed: float) -> float:
        """Returns the seconds between the last event before the kill and the first one after it, if it is longer than
        those between other events; 0 otherwise. Events on their way at the kill are part of the time before."""
        gaps = [later - earlier for earlier, later in zip(self.events, self.events[1:], strict=False)]
        after = [gap for gap, later in zip(gaps, self.events[1:], strict=True) if later > killed]
        longest = max(after, default=0.0)
        return longest if longest > LEAST_PAUSE * statistics.median(gaps) else 0.0


# ── the pause ────────────────────────────────────────────────────────────────────────────────────────────────────────
def pauses(servers: Servers, directory: Path, longest: int, rounds: int, streams: int) -> dict[str, Figures]:
    """Kills the worker of group 0 in each of two trees in turn. Returns the medians over the rounds, by tree."""
    trees = {
        name: Ours.of_model(
            directory,
            servers.scratch / f"groups-{groups}.log",
            longest=longest,
            options=("--data-parallel-size", str(groups)),
        )
        for name, groups in ((ANOTHER, 2), (ONLY, 1))
    }
    try:
        for cluster in trees.values():
            cluster.wait_for_an_answer()
            cluster.wait_until_whole()
        result: dict[str, list[Figures]] = {name: [] for name in trees}
        for turn in range(rounds):
            for name in in_turn(list(trees), turn):
                result[name].append(
                    asyncio.run(one_kill(trees[name], streams, longest * 7 // 8, has_other=name == ANOTHER))
                )
    finally:
        for cluster in trees.values():
            cluster.stop()
    figures = {name: median_figures(found_rounds) for name, found_rounds in result.items()}
    for name, medians in figures.items():
        servers.output.record("migration", OURS, cluster=name, rounds=rounds, streams=streams, **medians)
    columns = ["streams that paused", "pause, ms p50", "longest", "restart, ms", "longest pause - restart, ms"]
    keys = ("paused", "pause_p50_ms", "pause_max_ms", "restart_ms", "beyond_restart_ms")
    rows = [(name, [short(medians[key]) for key in keys]) for name, medians in figures.items()]
    servers.output.table(f"A worker is killed under {streams} streams; medians of {rounds} rounds", columns, rows)
    return figures


async def one_kill(server: Ours, streams: int, tokens: int, *, has_other: bool) -> Figures:
    """Raises Failed if a stream is not answered as a whole, or none has paused."""
    opened = [Stream(server, number, tokens) for number in range(streams)]
    running = asyncio.gather(*(stream.run() for stream in opened))
    try:
        await until(lambda: all(len(stream.events) > BEFORE_KILL for stream in opened), running)
        killed, restarted_in = server.kill_worker()
        await until(lambda: restarted_in() is not None, running)
        if not has_other:
            counts = [len(stream.events) for stream in opened]
            await until(
                lambda: all(
                    len(stream.events) > count + AFTER_KILL for stream, count in zip(opened, counts, strict=True)
                ),
                running,
            )
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    restart = restarted_in()
    assert restart is not None, "it has been waited for"
    took = sorted(pause for stream in opened if (pause := stream.pause(killed)))
    if not took:
        raise Failed(f"{server.name}: no stream has paused when its worker was killed")
    server.wait_until_whole()
    return {
        "paused": len(took),
        "pause_p50_ms": statistics.median(took) * 1e3,
        "pause_max_ms": took[-1] * 1e3,
        "restart_ms": restart * 1e3,
        "beyond_restart_ms": (took[-1] - restart) * 1e3,
    }


async def until(condition: Callable[[], bool], running: asyncio.Future[list[None]]) -> None:
    """Raises Failed if it does not become true, or if a stream has failed."""
    deadline = time.monotonic() + ANSWERED
    while not condition():
        if running.done():
            running.result()
            raise Failed("all streams ended before their worker was killed: the model's answers are too short")
        if time.monotonic() > deadline:
            raise Failed(f"streams have not gone on within {ANSWERED:g} s")
        await asyncio.sleep(0.005)


# ── what is kept ─────────────────────────────────────────────────────────────────────────────────────────────────────
def kept_memory(servers: Servers, rounds: int, streams: int) -> Figures:
    """Private memory of a server process for each open request of KEPT_TOKENS tokens, with and without migration."""
    result: dict[str, list[float]] = {KEPT: [], NOT_KEPT: []}
    for turn in range(rounds):
        for name in in_turn(list(result), turn):
            limit = "0" if name == NOT_KEPT else "3"
            log = servers.scratch / f"{name.replace(' ', '-')}-{turn}.log"
            options = ("--migration-limit", limit, "--max-model-len", str(2 * KEPT_TOKENS))
            server = Ours.simulated(streams, log, step_ms=2.0, options=options)
            try:
                server.wait_for_an_answer()
                result[name].append(asyncio.run(growth(server, streams)))
            finally:
                server.stop()
    figures = {name: statistics.median(values) for name, values in result.items()}
    figures["difference"] = figures[KEPT] - figures[NOT_KEPT]
    servers.output.record("migration memory", OURS, rounds=rounds, streams=streams, **figures)
    rows = [(OURS, [short(value) for value in figures.values()])]
    title = f"A server's private memory for each of {streams} open requests of {KEPT_TOKENS:,} tokens; KB"
    servers.output.table(title, list(figures), rows)
    return figures


async def growth(server: Ours, streams: int) -> float:
    """Returns the growth of the server's private memory, in KB for each stream, when all have KEPT_TOKENS tokens."""
    await asyncio.gather(*(Stream(server, number, 100).run(False) for number in range(streams)))  # a warm-up
    before = private(server)
    opened = [Stream(server, number, 2 * KEPT_TOKENS - 100) for number in range(streams)]
    running = asyncio.gather(*(stream.run(False) for stream in opened))
    try:
        await until(lambda: all(len(stream.events) >= KEPT_TOKENS for stream in opened), running)
        return (private(server) - before) / streams / 1e3
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def private(server: Ours) -> int:
    """Raises Failed if it cannot be read."""
    sizes = [private_nbytes_of(process.pid) for role, process in server.processes() if role == "server"]
    if not sizes or None in sizes:
        raise Failed(f"{server.name}: the memory of its server process cannot be read")
    return sum(size for size in sizes if size is not None)
