"""Seconds from the command `penstock serve` to its first answer, and processor time of all its processes until then.

scripts/bench start [--rounds 5] [MODEL]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file, `bench` is a package

from bench.serve_cases.servers import Ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="directory of a model (default: the bundled model)")
    parser.add_argument("--rounds", type=int, default=5, help="starts (5)")
    options = parser.parse_args()
    starts = [start(options.model) for _ in range(options.rounds)]
    for name, values in zip(("first answer, s", "processor time, s"), zip(*starts, strict=True), strict=True):
        print(f"{name:18} median {statistics.median(values):.2f}, from {min(values):.2f} to {max(values):.2f}")


def start(model: str | None) -> tuple[float, float]:
    """Returns the seconds to the first answer, and the processor time of the processes until then in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        server = Ours.of([model] if model else [], Path(folder) / "log")
        try:
            return server.wait_for_an_answer(), sum(server.cpu_seconds().values())
        finally:
            server.stop()


if __name__ == "__main__":
    main()
