"""Seconds from the command `penstock serve` to its first answer, and processor time of all its processes until then.

scripts/bench start [--rounds 5] [MODEL]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.harness.run import Run, command_line
from bench.serve_cases.servers import Ours


def start(model: str | None, log: Path) -> tuple[float, float]:
    """Returns the seconds to the first answer, and the processor time of the processes until then in seconds."""
    server = Ours.of([model] if model else [], log)
    try:
        return server.wait_for_an_answer(), sum(server.cpu_seconds().values())
    finally:
        server.stop()


def main(arguments: Sequence[str]) -> int:
    parser = command_line("start", __doc__)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="directory of a model (default: the bundled model)")
    parser.add_argument("--rounds", type=int, default=5, help="starts (5)")
    options = parser.parse_args(arguments)
    with Run("start", options) as run:
        answers, cpu = zip(*(start(options.model, run.scratch / "log") for _ in range(run.rounds)), strict=True)
        run.output.record("start", "penstock", first_answer_s=answers, cpu_s=cpu)
        rows = [(name, [f"{of(values):.2f}" for of in (statistics.median, min, max)])
                for name, values in (("first answer", answers), ("processor time", cpu))]  # fmt: skip
        run.output.table("Start, s", ["median", "least", "most"], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
