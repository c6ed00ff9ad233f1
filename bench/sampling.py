"""The choice of tokens by a CPU worker: rows of a real vocabulary, in two threads, without and with a grammar.

scripts/bench sampling [--rows 8,64] [--ids 151936] [--rounds 7]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from bench.harness.output import short
from bench.harness.run import Run, command_line
from penstock.engine.protocol.messages import SamplingParams

WAYS = {
    "the likeliest": SamplingParams(temperature=0),
    "temperature 1": SamplingParams(),
    "0.6, top_k 20, top_p 0.95": SamplingParams(temperature=0.6, top_k=20, top_p=0.95),  # of Qwen3's files
    "0.8, top_p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
}


def sampling(rows: int, ids: int, params: SamplingParams, *, is_masked: bool) -> Callable[[], float]:
    """Returns a function that samples a step and returns its milliseconds."""
    import torch

    from penstock.engine.worker.grammars import TokenMasks
    from penstock.engine.worker.sampler import Sampler

    chance = np.random.default_rng(0)
    logits = torch.from_numpy(chance.normal(0, 2, (rows, ids)).astype(np.float32))
    sampler = Sampler(rows, ids, (2,))
    for slot in range(rows):
        sampler.join(slot, params, np.ones(1, np.int32), seed=slot)
    slots = np.arange(rows, dtype=np.intp)
    bits = chance.integers(-(1 << 31), 1 << 31, (rows, -(-ids // 32))).astype(np.int32)
    masks = TokenMasks(slots, bits, {}) if is_masked else None

    def step() -> float:
        copy = logits.clone()
        began = time.perf_counter()
        sampler.sample(copy, slots, masks)
        return (time.perf_counter() - began) * 1e3

    return step


def measure(run: Run, options: Any) -> None:
    from penstock.engine.worker.cpu_kernels import set_threads

    set_threads(2)
    for rows in map(int, options.rows.split(",")):
        steps = {
            (way, is_masked): sampling(rows, options.ids, params, is_masked=is_masked)
            for way, params in WAYS.items()
            for is_masked in (False, True)
        }
        times: dict[tuple[str, bool], list[float]] = {case: [] for case in steps}
        for number in range(run.rounds + 1):
            for case, step in steps.items():
                took = step()
                if number:  # the first one takes memory
                    times[case].append(took)
        for (way, is_masked), took_ms in times.items():
            run.output.record("step", "penstock", rows=rows, way=way, is_masked=is_masked, took_ms=took_ms)
        cells = {way: [short(median(times[way, is_masked])) for is_masked in (False, True)] for way in WAYS}
        run.output.table(f"{rows} rows of {options.ids} ids, ms", ["plain", "with a grammar"], [*cells.items()])


def main(arguments: Sequence[str]) -> int:
    parser = command_line("sampling", __doc__)
    parser.add_argument("--rows", default="8,64", help="numbers of rows (8,64)")
    parser.add_argument("--ids", type=int, default=151_936)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    with Run("sampling", options) as run:
        measure(run, options)
        return run.conclude("penstock", [])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
