"""One benchmark of two builds in turns, and the ratio of their medians: `scripts/bench NAME --beside PYTHON`.

    scripts/bench codec --beside ../other/.venv/bin/python --rounds 7 --quick

Each round runs NAME once for each build, as a process with `--json`; the builds take turns at being first. A build that
is installed from a source tree runs the `bench/` of that tree, because benchmarks use internals. All other options are
passed on. The exit status is 1 where a figure of this build is more than `--limit` times that of the other build.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness.output import ROOT, Output, short
from bench.harness.turns import in_turn

OURS, OTHER = "this build", "the other build"
FIGURES = r"(?<!p99)(?<!p999)(?<!max)(?<!least)_(us|ns|ms|s|bytes|nbytes|cores|kb)$"  # less is better
RATES = r"(^|_)per_s$"  # more is better
NO_ROWS = {"machine", "load", "target", "failed", "skipped", "duration"}
NOT_COMPARED = {"bench", "case", "impl", "rounds", "quiet", "foreign_cores"}
Record = Mapping[str, Any]
Row = tuple[str, str, int]  # case, implementation, and which of their records


class Comparison(NamedTuple):
    """A figure of both builds. `ratio` is above 1 where this build is worse."""

    row: str
    figure: str
    ours: float
    other: float
    ratio: float


def rows_of(lines: Iterable[str]) -> dict[Row, Record]:
    """Returns the records of a run, with the medians of lists. The order of records is the same in each run."""
    rows: dict[Row, Record] = {}
    for record in map(json.loads, lines):
        if record["case"] not in NO_ROWS:
            same = sum(row[:2] == (record["case"], record["impl"]) for row in rows)
            medians = {key: statistics.median(value) for key, value in record.items() if isinstance(value, list)}
            rows[record["case"], record["impl"], same] = record | medians
    return rows


def compare(
    ours: Sequence[Mapping[Row, Record]], other: Sequence[Mapping[Row, Record]], figures: str = FIGURES
) -> Iterator[Comparison]:
    """Yields the figures that differ, of common rows. A value of all runs is a parameter: it names the row."""
    runs = [*ours, *other]
    for row in runs[0]:
        if not all(row in run for run in runs):
            continue
        names = list(row[:2])
        for key, value in runs[0][row].items():
            if key in NOT_COMPARED or not all(key in run[row] for run in runs):
                continue
            if all(run[row][key] == value for run in runs):
                names.append(f"{key} {value}")
            elif re.search(f"{figures}|{RATES}", key):
                medians = [statistics.median(run[row][key] for run in build) for build in (ours, other)]
                worse, better = medians[::-1] if re.search(RATES, key) else medians
                yield Comparison(", ".join(names), key, medians[0], medians[1], worse / (better or 1e-9))


def tree_of(python: str) -> Path:
    """Returns the source tree of which this interpreter has penstock; this one if it is installed from a wheel."""
    command = [python, "-c", "import penstock; print(penstock.__file__)"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd="/")
    tree = Path(done.stdout.strip()).parents[2]
    return tree if (tree / "bench").is_dir() else ROOT


def run(name: str, python: str, tree: Path, options: Sequence[str]) -> dict[Row, Record]:
    """Runs a benchmark. Its exit status is 1 where it misses a target."""
    command = [python, "-m", f"bench.{name}", "--json", *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tree)
    if done.returncode not in (0, 1) or not done.stdout:
        sys.exit(f"{' '.join(command)} (in {tree}) ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return rows_of(done.stdout.splitlines())


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("name", metavar="NAME", help="of the benchmark")
    parser.add_argument(
        "--beside", metavar="PYTHON", required=True, type=os.path.abspath, help="the interpreter of the other build"
    )
    parser.add_argument("--rounds", type=int, default=7, help="runs of each build (%(default)s)")
    parser.add_argument("--limit", type=float, default=1.05, help="marks figures above (%(default)s times the other)")
    parser.add_argument("--figures", default=FIGURES, help="regular expression of the names of costs (%(default)s)")
    options, more = parser.parse_known_args(arguments)
    builds = {OURS: (sys.executable, ROOT), OTHER: (options.beside, tree_of(options.beside))}
    runs: dict[str, list[dict[Row, Record]]] = {build: [] for build in builds}
    output = Output(options.name, is_json=False, folder=None)
    for turn in range(options.rounds):
        for build in in_turn(list(builds), turn):
            runs[build].append(run(options.name, *builds[build], more))
    compared = list(compare(runs[OURS], runs[OTHER], options.figures))
    if not compared:
        sys.exit(f"bench {options.name}: no record of all runs has a figure like {options.figures}")
    cells = [(f"{row}: {figure}", [short(ours), short(other), f"{ratio:.3f}", "ABOVE" * (ratio > options.limit)])
             for row, figure, ours, other, ratio in compared]  # fmt: skip
    title = f"{options.name}: medians of {options.rounds} rounds beside {builds[OTHER][1]}"
    output.table(title, [OURS, OTHER, "ratio", f"> {options.limit:g}"], cells)
    return int(any(item.ratio > options.limit for item in compared))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
