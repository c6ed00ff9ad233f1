"""From a SIGKILL to the next id of a stream, with and without the former life's KV cache and the fork server, part by
part; and what the ledger costs.

scripts/bench kept_kv [--shape small|qwen3-0.6b] [--rounds 3] [--victim worker|core]    one group, a prompt of 2,000 ids
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.harness.run import Run, command_line
from bench.serve_cases import model
from penstock.engine._native import BlockCache, PrefixHasher, ledger_nbytes
from penstock.engine.client.client import Client
from penstock.engine.cluster import logs
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.launcher.back_off import MIN_START_INTERVAL_S
from penstock.engine.launcher.launcher import Launcher
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import SamplingParams

PROMPT, TOKENS, KILL_AT = 2000, 80, 20
ROWS, BLOCK_SIZE, STEPS = 64, 16, 16 * 500


class Way(NamedTuple):
    """What survives the processes."""

    name: str
    keep_kv_cache: bool
    fork_server: str


WAYS = (Way("nothing", False, "off"), Way("KV cache", True, "off"), Way("KV cache and modules", True, "auto"))
# Parts of a pause, and the event that ends each: the last one of its name before the next id.
PARTS = {
    "all ended": "unit starts again",
    "started": "process started",
    "imported": "device is imported",
    "weights": "weights are loaded",
    "packed": "model is loaded",
    "threads": "threads",
    "pages": "kv cache is mapped",
    "ready": "worker ready",
    "served": "core serves",
}
DEATH, FIRST_ID = ("death seen", "process ended"), "next id"


class Pause(NamedTuple):
    seconds: float
    gap: float  # the median between two ids, in seconds
    computed: int  # ids that were computed again
    parts: dict[str, float]


@contextlib.contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """Sends standard error of this process, and of processes that start meanwhile, to a file."""
    before = os.dup(2)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(file, 2)
    os.close(file)
    logs.configure("launcher", "json", "debug")
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def read_parts(log: Path, killed: float, first: float) -> dict[str, float]:
    """Returns the seconds of each part between two times of day."""
    times: dict[str, list[float]] = {}
    for line in log.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            fields = json.loads(line)
            at = datetime.fromisoformat(fields["time"].replace("Z", "+00:00")).timestamp()
            if killed <= at <= first:
                times.setdefault(fields["event"], []).append(at)
    ends = {DEATH[0]: min(times.get(DEATH[1], [killed]))}
    ends |= {part: max(times[name]) for part, name in PARTS.items() if name in times}
    parts, before = {}, killed
    for part, at in (*ends.items(), (FIRST_ID, first)):
        parts[part], before = max(0.0, at - before), max(at, before)  # processes start beside each other
    return parts


async def pause(path: Path, victim: str, way: Way, log: Path) -> Pause:
    """Kills a process while a stream runs."""
    config = EngineConfig(
        model=str(path),
        max_model_len=2560,
        max_num_seqs=8,
        num_gpu_blocks_override=2000,
        keep_kv_cache=way.keep_kv_cache,
        fork_server=way.fork_server,
        log_format="json",
        log_level="debug",
    )
    launcher = Launcher(config)
    launcher.start()
    try:
        await launcher.serving(600)
        await asyncio.sleep(1.5 * MIN_START_INTERVAL_S)  # else the pause between two starts counts, too
        async with Client(launcher.cluster, 0) as client:
            ids = np.random.default_rng(7).integers(3, model.IDS, PROMPT)
            params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
            times: list[float] = []
            killed = 0.0
            async with await client.submit(ids, params) as stream:
                async for chunk in stream:
                    times += [time.time()] * len(chunk.ids)
                    if not killed and len(times) >= KILL_AT:
                        (target,) = [
                            child for child in launcher.units[0].children.values() if child.member.kind == victim
                        ]
                        killed = time.time()
                        os.kill(target.pid, signal.SIGKILL)
            row = launcher.board.row(0)
            gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
            first = next(at for at, gap in zip(times[1:], gaps, strict=True) if gap == max(gaps))
            computed = row[StatusBoard.RESUMED_TOKENS.at["computed"]]
            return Pause(first - killed, statistics.median(gaps), computed, read_parts(log, killed, first))
    finally:
        await launcher.stop()


def ledger_cost() -> dict[str, float]:
    """Returns medians, by `with` and `without`, of the microseconds in which a decode step of ROWS rows takes blocks,
    and publishes full blocks and ids. Rows end their blocks one after the other."""
    spent: dict[str, list[int]] = {"without": [], "with": []}
    lives = {name: DecodingRows(name == "with") for name in spent}
    for step in range(STEPS):
        for name, life in lives.items():
            spent[name].append(life.run(step))
    return {name: statistics.median(times) / 1e3 for name, times in spent.items()}


class DecodingRows:
    """What a core does with blocks in decode steps of ROWS rows."""

    def __init__(self, has_ledger: bool) -> None:
        blocks = ROWS * (STEPS // BLOCK_SIZE + 2)
        ledger = np.zeros(ledger_nbytes(blocks, ROWS, BLOCK_SIZE), np.uint8) if has_ledger else None
        self._cache = BlockCache(blocks, ledger, ROWS, BLOCK_SIZE)
        self._hasher = PrefixHasher(self._cache, ROWS, BLOCK_SIZE)
        self._computed = np.arange(ROWS, dtype=np.int32) % (BLOCK_SIZE - 1) + 1
        self._table = np.zeros((ROWS, blocks // ROWS), np.int32)
        self._slots, self._ids = np.arange(ROWS), np.arange(ROWS, dtype=np.int32)
        self._status = np.ones(ROWS, np.uint8)
        for row, length in enumerate(self._computed.tolist()):
            self._hasher.add_sequence(row, row.to_bytes(32, "little"), np.arange(length, dtype=np.int32))
            self._hasher.allocate(row, 0)
            self._hasher.schedule(row, 0)
            self._table[row, 0] = self._cache.take(1)[0]  # type: ignore[index]

    def run(self, step: int) -> int:
        """Returns the nanoseconds of a step."""
        full = np.flatnonzero((self._computed - 1) % BLOCK_SIZE == 0)
        begin = time.perf_counter_ns()
        taken = self._cache.take(full.size)
        assert taken is not None
        self._table[full, (self._computed[full] - 1) // BLOCK_SIZE] = taken
        self._hasher.publish(step, self._computed, self._status, 1, self._table)
        self._hasher.append(step, self._slots, self._ids)
        spent = time.perf_counter_ns() - begin
        self._computed += 1
        return spent


def median_of(results: list[Pause]) -> Pause:
    """Returns the pause of the median length: its parts add up."""
    return sorted(results)[len(results) // 2]


def main(arguments: Sequence[str]) -> int:
    parser = command_line("kept_kv", __doc__)
    parser.add_argument("--shape", default=model.SMALL, choices=(model.SMALL, model.REAL))
    parser.add_argument("--victim", default="worker", choices=("worker", "core"))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    with Run("kept_kv", options) as run:
        costs = [ledger_cost() for _ in range(3)]
        least = {name: min(cost[name] for cost in costs) for name in costs[0]}
        run.output.record("ledger", "penstock", **{f"{name}_us": value for name, value in least.items()})
        run.output.say(
            f"{ROWS} rows: a step takes {ROWS // BLOCK_SIZE} blocks, and publishes blocks and ids, in {least} µs"
        )
        path = run.scratch / options.shape
        model.make(path, options.shape)
        pauses: dict[Way, list[Pause]] = {way: [] for way in WAYS}
        log = run.scratch / "log"
        for _ in range(options.rounds):
            for way in WAYS:
                with logged_to(log):
                    result = asyncio.run(pause(path, options.victim, way, log))
                pauses[way].append(result)
                figures = {"pause_s": result.seconds, "gap_ms": result.gap * 1e3, "again": result.computed}
                run.output.record("pause", "penstock", keeps=way.name, **figures, parts=result.parts)
                run.output.say(f"{way.name}: {result.seconds:.2f} s, {result.computed} ids again")
        medians = {way: median_of(results) for way, results in pauses.items()}
        names = dict.fromkeys(part for result in medians.values() for part in result.parts)
        rows = [
            (way.name, [*(f"{result.parts.get(part, 0.0):.3f}" for part in names), f"{result.seconds:.3f}"])
            for way, result in medians.items()
        ]
        run.output.table("Pause by what is kept, in seconds", [*names, "pause"], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
