"""How few bytes a decode step needs, and how little time: public vLLM issue #6241's experiment, and its targets.

The same decode steps in vLLM's formats and in ours, bytes and times of each, and what sampling parameters take.

    scripts/bench codec                      everything, in about a minute
    scripts/bench codec --quick              fewer rounds
    scripts/bench codec --requests 4,256     fewer batch sizes
    PENSTOCK_PEER_PYTHON=… scripts/bench codec   with vLLM's own classes
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bench.harness.output import Output
from bench.harness.run import Run, command_line
from bench.harness.targets import Target
from bench.vs_vllm import comparison, vllm_peer
from bench.vs_vllm.formats import OURS
from penstock.tools.tables import Row, Table

STEADY_NBYTES = 24
BLOCKS_NBYTES = {4: 40, 32: 60, 256: 300, 1024: 1000}
ROUNDS, QUICK_ROUNDS = 9, 3

Summary = dict[tuple[str, int], dict[str, dict[str, Any]]]


def targets(summary: Summary, params: Sequence[Row]) -> Iterator[Target]:
    def ours(case: str, requests: int, key: str) -> float | None:
        figures = summary.get((case, requests), {}).get(OURS)
        return figures[key] if figures else None

    for requests in comparison.REQUESTS:
        yield Target(f"steady decode step, {requests} requests", STEADY_NBYTES, "B",
                     ours("step_steady", requests, "bytes"))  # fmt: skip
    for requests, limit in BLOCKS_NBYTES.items():
        yield Target(f"decode step with new blocks, {requests} requests", limit, "B",
                     ours("step_blocks", requests, "bytes"))  # fmt: skip
    yield Target("encode + decode + apply, 256 requests, steady", 8, "µs",
                 ours("step_steady", 256, "encode_decode_us"))  # fmt: skip
    yield Target("worker output of 256 tokens, encode + decode", 4, "µs",
                 ours("worker_output", 256, "encode_decode_us"))  # fmt: skip
    yield Target("worker output of 256 tokens", 1100, "B", ours("worker_output", 256, "bytes"))
    yield Target("outputs to the API server, 256 requests, encode + decode", 6, "µs",
                 ours("api_outputs", 256, "encode_decode_us"))  # fmt: skip
    yield Target("outputs to the API server, 256 requests", 5000, "B", ours("api_outputs", 256, "bytes"))
    nbytes = [param["bytes"] for param in params if param["impl"] == OURS]
    yield Target("default sampling parameters", 80, "B", nbytes[0])
    yield Target(f"request with {comparison.LONG_PROMPT:,} prompt tokens, encode + decode", 30, "µs",
                 ours("long_prompt", 1, "encode_decode_us"))  # fmt: skip


def show(output: Output, rows: Iterator[Row] | Sequence[Row], table: Table) -> None:
    for row in rows:
        output.record(row["case"], row["impl"], **{k: v for k, v in row.items() if k not in ("bench", "case", "impl")})
    if table.rows:
        output.table(table.title, table.columns[1:], [(cells[0], cells[1:]) for cells in table.rows])
    else:
        output.say(f"\n{table.title}")
    for note in table.notes:
        output.say(f"  {note}")


def measure(run: Run) -> list[Target]:
    """Prints each table as soon as it is measured."""
    output, outcomes = run.output, []
    try:
        for outcome in comparison.run(run.options.requests, run.rounds):
            outcomes.append(outcome)
            show(output, list(comparison.rows_of(outcome)), comparison.table_of(outcome))
    finally:
        vllm_peer.close()
    params, table = comparison.params_told()
    show(output, params, table)
    return list(targets(comparison.summary(outcomes), params))


def parse_positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"1 to 100000, not {text!r}")
    return int(text)


def parse_counts(text: str) -> tuple[int, ...]:
    return tuple(parse_positive(part) for part in text.split(","))


def main(arguments: Sequence[str]) -> int:
    parser = command_line("codec", __doc__, quick=f"{QUICK_ROUNDS} rounds, not {ROUNDS}")
    parser.add_argument("--requests", metavar="N,…", type=parse_counts, default=comparison.REQUESTS, help="batch sizes")
    parser.add_argument("--rounds", metavar="N", type=parse_positive, help="how many times each format is measured")
    with Run("codec", parser.parse_args(arguments), rounds=ROUNDS, quick_rounds=QUICK_ROUNDS) as run:
        return run.conclude(OURS, measure(run))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
