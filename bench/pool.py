"""How well the pool lends: what a take costs, and how often one fails although enough is free in all.

Objects of 4 KiB to 512 MiB, log-uniform, three times as many bytes as the pool has. One that is not there is taken;
when the pool refuses, objects chosen at random are released until it fits. So the pool is always nearly full, and its
free memory lies where chance left it. The bytes themselves are never touched.

    scripts/bench pool [--quick] [--json] [--nbytes 4294967296] [--takes 20000] [--seed 1]
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import penstock
from bench.harness.figures import quantile
from bench.harness.output import Output, short_nbytes
from bench.harness.quiet import Load, load_between, look
from bench.harness.run import Run, command_line
from penstock.lowlevel import Pool

SMALLEST_NBYTES = 4 << 10
LARGEST_NBYTES = 512 << 20
DEMAND = 3  # times the pool's size
SEEDS = 3

now = time.perf_counter_ns


@dataclass
class Trace:
    """What one seed's run saw. Times are nanoseconds with the clock's own cost taken off."""

    requests: int = 0
    refused: int = 0  # requests that did not fit at once
    fragmented: int = 0  # requests refused at least once although enough was free in all
    unexplained: int = 0  # refused although one free piece was large enough
    fragmentation: list[float] = field(default_factory=list)  # 1 - largest / free, at each refusal
    utilisation: list[float] = field(default_factory=list)  # taken / all, at each request's first refusal
    take_ns: list[int] = field(default_factory=list)
    refuse_ns: list[int] = field(default_factory=list)
    release_ns: list[int] = field(default_factory=list)
    left_fragmentation: float = 0.0  # when everything was released again: must be 0


def object_sizes(chance: random.Random, demand_nbytes: int, largest_nbytes: int) -> list[int]:
    """Log-uniform sizes that sum up to the demand."""
    sizes: list[int] = []
    low, high = math.log(SMALLEST_NBYTES), math.log(largest_nbytes)
    while demand_nbytes > 0:
        sizes.append(round(math.exp(chance.uniform(low, high))))
        demand_nbytes -= sizes[-1]
    return sizes


def clock_cost() -> int:
    return min(-now() + now() for _ in range(1000))


def swap_out(items: list[Any], index: int) -> Any:
    """Removes one without moving the others."""
    items[index], items[-1] = items[-1], items[index]
    return items.pop()


def churn(pool: Pool, takes: int, seed: int, largest_nbytes: int) -> Trace:
    """One seed's run; the pool is empty before and after."""
    chance = random.Random(seed)
    stats = pool.stats()
    total = stats.taken_nbytes + stats.free_nbytes
    absent = object_sizes(chance, DEMAND * total, min(largest_nbytes, stats.largest_free_nbytes // 2))
    present: list[tuple[int, Any]] = []
    clock = clock_cost()
    trace = Trace()

    def release_one() -> None:
        nbytes, lease = swap_out(present, chance.randrange(len(present)))
        begin = now()
        lease.release()
        trace.release_ns.append(now() - begin - clock)
        absent.append(nbytes)

    for _ in range(takes):
        nbytes = swap_out(absent, chance.randrange(len(absent)))
        trace.requests += 1
        refusals = 0
        is_fragmented = False
        while True:
            begin = now()
            try:
                lease = pool.take(nbytes)
            except penstock.MemoryExhausted:
                trace.refuse_ns.append(now() - begin - clock)
            else:
                trace.take_ns.append(now() - begin - clock)
                break
            stats = pool.stats()
            if not refusals:
                trace.utilisation.append(stats.taken_nbytes / total)
            refusals += 1
            trace.fragmentation.append(1 - stats.largest_free_nbytes / max(stats.free_nbytes, 1))
            trace.unexplained += stats.largest_free_nbytes >= nbytes
            is_fragmented |= stats.free_nbytes >= nbytes
            release_one()
        trace.refused += refusals > 0
        trace.fragmented += is_fragmented
        present.append((nbytes, lease))
        del lease
    while present:
        release_one()
    stats = pool.stats()
    if stats.taken_nbytes:
        raise RuntimeError(f"{stats.taken_nbytes} bytes in {stats.blocks} blocks are still taken after every release")
    trace.left_fragmentation = 1 - stats.largest_free_nbytes / stats.free_nbytes
    return trace


def figures_of(trace: Trace) -> dict[str, float]:
    def quantiles(name: str, values: Sequence[float], unit: str) -> dict[str, float]:
        if not values:
            return {}
        ordered = sorted(values)
        return {f"{name}_p50{unit}": quantile(ordered, 0.5), f"{name}_p99{unit}": quantile(ordered, 0.99)}

    return {
        "requests": trace.requests,
        "refused_share": trace.refused / trace.requests,
        "fragmented_share": trace.fragmented / trace.requests,
        "unexplained_refusals": trace.unexplained,
        **quantiles("fragmentation", trace.fragmentation, ""),
        **quantiles("utilisation", trace.utilisation, ""),
        **quantiles("take", trace.take_ns, "_ns"),
        **quantiles("refuse", trace.refuse_ns, "_ns"),
        **quantiles("release", trace.release_ns, "_ns"),
        "left_fragmentation": trace.left_fragmentation,
    }


def tell(output: Output, seeds: Sequence[int], result: Sequence[dict[str, float]], loads: Sequence[Load]) -> None:
    rows = []
    for seed, figures in zip(seeds, result, strict=True):
        cells = [
            f"{100 * figures['refused_share']:.1f} %",
            f"{100 * figures['fragmented_share']:.1f} %",
            f"{figures.get('fragmentation_p50', 0):.2f} / {figures.get('fragmentation_p99', 0):.2f}",
            f"{100 * figures.get('utilisation_p50', 0):.1f} %",
            f"{figures['take_p50_ns']:,.0f} / {figures['take_p99_ns']:,.0f}",
            f"{figures['release_p50_ns']:,.0f} / {figures['release_p99_ns']:,.0f}",
        ]
        rows.append((f"seed {seed}", cells))
    columns = [
        "refused",
        "though enough was free",
        "fragmentation p50 / p99",
        "in use when refused",
        "take ns p50 / p99",
        "release ns p50 / p99",
    ]
    output.table("Takes from a pool that is always nearly full", columns, rows)
    for seed, figures, load in zip(seeds, result, loads, strict=True):
        if figures["unexplained_refusals"]:
            count = int(figures["unexplained_refusals"])
            output.say(f"  seed {seed}: {count} takes were refused although one free piece was large enough")
        if figures["left_fragmentation"]:
            output.say(f"  seed {seed}: with everything released, the free memory is not one piece")
        if not load.is_quiet:
            output.say(f"  seed {seed}: foreign processes took {load.cores:.2f} cores; do not compare its times")


def available_nbytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def main(arguments: Sequence[str]) -> int:
    parser = command_line("pool", __doc__, quick="a smaller pool and fewer takes")
    parser.add_argument("--nbytes", type=int, help="of the pool; default 4 GiB, quick 1 GiB")
    parser.add_argument("--largest", type=int, default=LARGEST_NBYTES, help="the largest object; at most half the pool")
    parser.add_argument("--takes", type=int, help="per seed; default 20000, quick 4000")
    parser.add_argument("--seed", type=int, default=1, help=f"the first of {SEEDS}")
    options = parser.parse_args(arguments)
    nbytes = options.nbytes or (1 << 30 if options.quick else 4 << 30)
    takes = options.takes or (4000 if options.quick else 20_000)
    if nbytes > available_nbytes() // 2:
        parser.error(f"a pool of {short_nbytes(nbytes)} is more than half the memory available: lower --nbytes")
    with Run("pool", options) as run:
        measure(run.output, nbytes, takes, options)
    return 0


def measure(output: Output, nbytes: int, takes: int, options: argparse.Namespace) -> None:
    pool = Pool.create(nbytes)
    output.say(f"pool of {short_nbytes(nbytes)}, objects of 4 KiB to {short_nbytes(options.largest)}, {takes} takes")
    seeds = range(options.seed, options.seed + SEEDS)
    result, loads = [], []
    for seed in seeds:
        before = look()
        figures = figures_of(churn(pool, takes, seed, options.largest))
        load = load_between(before, look())
        output.record(
            "mixed",
            "penstock",
            nbytes=nbytes,
            seed=seed,
            **figures,
            foreign_cores=load.cores,
            quiet=load.is_quiet,
        )
        result.append(figures)
        loads.append(load)
    tell(output, seeds, result, loads)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
