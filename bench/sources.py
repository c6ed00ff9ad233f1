"""What five public documents ask of this layer, each in its own terms: ours beside the way that it complains of.

scripts/bench sources                          all of it, a table for each document: about 25 minutes
scripts/bench sources --quick                  small, one round: does it run?
scripts/bench sources --only images,steps      images and servers: vLLM #19702 and #32104; broadcast: #4440;
                                               steps: #6241; outputs: #6913
PENSTOCK_PEER_PYTHON=… scripts/bench sources   with vLLM beside it, on the same weights
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file, `bench` is a package

from bench.harness.options import side_by_side
from bench.harness.output import Output
from bench.harness.quiet import load_between, look
from bench.harness.targets import Target, conclude
from bench.serve import told_to_end
from bench.serve_cases.servers import OURS, THEIRS
from bench.source_cases import broadcast, images, outputs, steps
from bench.source_cases.context import Context

CASES = {
    "images": images.run,
    "servers": images.run_many,
    "broadcast": broadcast.run,
    "steps": steps.run,
    "outputs": outputs.run,
}
WAYS = (OURS, THEIRS)


@dataclass(frozen=True)
class Scale:
    rounds: int = 5
    patience: float = 60.0
    is_quick: bool = False


def main(arguments: Sequence[str]) -> int:
    parser = side_by_side("sources", __doc__, tuple(CASES), WAYS, quick="small, one round: does it run?")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, told_to_end)
    scale = Scale(rounds=1, patience=0.0, is_quick=True) if options.quick else Scale()
    given = {name: getattr(options, name) for name in ("rounds", "patience") if getattr(options, name) is not None}
    scale = replace(scale, **given)
    output = Output("sources", is_json=options.json, folder=options.out)
    output.begin()
    before = look()
    targets: list[Target] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        context = Context(
            output,
            Path(scratch),
            rounds=scale.rounds,
            patience=scale.patience,
            is_quick=scale.is_quick,
            is_noisy=options.noisy,
            ways=options.impl.split(","),
        )
        for name in options.only.split(","):
            targets += CASES[name](context)
    return conclude(output, OURS, targets, load_between(before, look()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
