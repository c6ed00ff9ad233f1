"""From a SIGKILL to the next id of a stream, with and without the former life's KV cache; and what the ledger costs.

scripts/bench kept_kv [--shape small|qwen3-0.6b] [--rounds 3] [--victim worker|core]    one group, a prompt of 2,000 ids
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.harness.run import Run, command_line
from bench.serve_cases import model
from penstock.engine._native import LEDGER_NBYTES, BlockCache
from penstock.engine.client.client import Client
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.launcher.launcher import Launcher
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import SamplingParams

PROMPT, TOKENS, KILL_AT = 2000, 80, 20
ROWS, BLOCK_SIZE, STEPS = 64, 16, 16 * 500


async def pause(path: Path, victim: str, keeps: bool) -> tuple[float, float, int]:
    """Returns the seconds from the kill to the next id, the median gap between ids, and the ids computed again."""
    config = EngineConfig(
        model=str(path), max_model_len=2560, max_num_seqs=8, num_gpu_blocks_override=2000, keep_kv_cache=keeps
    )
    launcher = Launcher(config)
    launcher.start()
    try:
        await launcher.serving(600)
        async with Client(launcher.cluster, 0) as client:
            ids = np.random.default_rng(7).integers(3, model.IDS, PROMPT)
            params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
            times: list[float] = []
            killed = 0.0
            async with await client.submit(ids, params) as stream:
                async for chunk in stream:
                    times += [time.monotonic()] * len(chunk.ids)
                    if not killed and len(times) >= KILL_AT:
                        (target,) = [
                            child for child in launcher.units[0].children.values() if child.member.kind == victim
                        ]
                        os.kill(target.pid, signal.SIGKILL)
                        killed = time.monotonic()
            row = launcher.board.row(0)
            gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
            first = next(at for at, gap in zip(times[1:], gaps, strict=True) if gap == max(gaps))
            return first - killed, statistics.median(gaps), row[StatusBoard.RESUMED_TOKENS.at["computed"]]
    finally:
        await launcher.stop()


def ledger_cost() -> dict[str, float]:
    """Returns medians, by `with` and `without`, of the microseconds in which a decode step of ROWS rows publishes its
    blocks and takes new ones. Rows end their blocks one after the other."""
    medians = {}
    per_step, blocks = ROWS // BLOCK_SIZE, 1 << 17
    digests = [number.to_bytes(32, "little") for number in range(per_step * STEPS)]
    for name in ("without", "with"):
        cache = BlockCache(blocks, np.zeros(blocks * LEDGER_NBYTES, np.uint8) if name == "with" else None)
        spent = []
        for step in range(STEPS):
            begin = time.perf_counter_ns()
            taken = cache.take(per_step)
            assert taken is not None
            for row, block in enumerate(taken.tolist()):
                cache.publish(block, digests[per_step * step + row])
            cache.release(taken)
            spent.append(time.perf_counter_ns() - begin)
        medians[name] = statistics.median(spent) / 1e3
    return medians


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
        run.output.say(f"{ROWS} rows: a step takes and publishes {ROWS // BLOCK_SIZE} blocks in {least} µs")
        path = run.scratch / options.shape
        model.make(path, options.shape)
        for _ in range(options.rounds):
            for keeps in (False, True):
                seconds, gap, computed = asyncio.run(pause(path, options.victim, keeps))
                run.output.record("pause", "penstock", keeps=keeps, pause_s=seconds, gap_ms=gap * 1e3, again=computed)
                way = "kept" if keeps else "not kept"
                run.output.say(f"{way}: {seconds:.2f} s, {computed} ids again, {gap * 1e3:.2f} ms an id")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
