"""Public vLLM issue #6241's experiment: the same decode steps in vLLM's formats and in ours, bytes and times of each.

Also what sampling parameters take, and one broadcast beside gloo's (public vLLM issue #4440).

    scripts/bench compare                               every format, in about a minute
    scripts/bench compare --requests 4,256 --rounds 3   fewer
    PENSTOCK_PEER_PYTHON=… scripts/bench compare        with vLLM's own classes and gloo, of that interpreter
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file, `bench` is a package

from bench.vs_vllm import collective, comparison, vllm_peer
from penstock.tools.tables import Row, Table, print_rows, print_tables


def run(requests: Sequence[int], rounds: int, chart: Path | None, *, is_json: bool) -> None:
    """Prints each table as soon as it is measured; draws what has been measured, also when it is interrupted."""
    outcomes: list[comparison.Outcome] = []

    def show(rows: Iterable[Row], table: Table) -> None:
        if is_json:
            print_rows(rows)
        else:
            print_tables([table])

    try:
        for outcome in comparison.run(requests, rounds):
            outcomes.append(outcome)
            show(comparison.rows_of(outcome), comparison.table_of(outcome))
        show(*comparison.params_told())
        show(*collective.told(rounds))
    finally:
        vllm_peer.close()
        if chart is not None and outcomes:
            comparison.draw(outcomes, chart)


def parse_positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"1 to 100000, not {text!r}")
    return int(text)


def parse_counts(text: str) -> tuple[int, ...]:
    return tuple(parse_positive(part) for part in text.split(","))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench compare", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--requests", metavar="N,…", type=parse_counts, default=comparison.REQUESTS,
        help=f"batch sizes (default: {','.join(map(str, comparison.REQUESTS))})",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", metavar="N", type=parse_positive, default=comparison.ROUNDS,
        help="how many times each format is measured (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--plot", metavar="FILE.svg", type=Path, help="a chart of the bytes")
    parser.add_argument("--json", action="store_true", help="one object per line on stdout, no tables")
    options = parser.parse_args(arguments)
    run(options.requests, options.rounds, options.plot, is_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
