"""What five public documents ask of this layer, each in its own terms: ours beside the way that it complains of.

scripts/bench sources                          all of it, a table for each document: about 50 minutes
scripts/bench sources --quick                  small, one round: does it run?
scripts/bench sources --only images,steps      transfer, images: vLLM #19702; servers, videos: #32104; fronts: #16626,
                                               #58266; broadcast: #4440; steps: #6241; outputs: #6913
scripts/bench sources --payloads "23 MB,96 MB" images and transfers of these sizes alone
PENSTOCK_PEER_PYTHON=… scripts/bench sources   with vLLM beside it, on the same weights

A row with a missed target is printed as NO, and the exit status is 1.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file, `bench` is a package

from bench.harness.options import one_of, side_by_side
from bench.harness.output import Output
from bench.harness.quiet import load_between, look
from bench.harness.targets import Target, conclude
from bench.serve import told_to_end
from bench.serve_cases.servers import OURS
from bench.source_cases import broadcast, fronts, images, outputs, steps, transfer, videos
from bench.source_cases.context import Context
from bench.source_cases.payloads import PAYLOADS, WAYS

CASES = {
    "transfer": transfer.run,  # before images: their table has the share of the transfer
    "images": images.run,
    "servers": images.run_many,
    "videos": videos.run,
    "fronts": fronts.run,
    "broadcast": broadcast.run,
    "steps": steps.run,
    "outputs": outputs.run,
}


@dataclass(frozen=True)
class Scale:
    rounds: int = 5
    patience: float = 60.0
    is_quick: bool = False


def main(arguments: Sequence[str]) -> int:
    parser = side_by_side("sources", __doc__, tuple(CASES), WAYS, quick="small, one round: does it run?")
    names = [payload.name for payload in PAYLOADS]
    parser.add_argument(
        "--payloads", metavar="SIZE,…", type=one_of(names), default=",".join(names), help="of %(default)s"
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, told_to_end)
    scale = Scale(rounds=1, patience=0.0, is_quick=True) if options.quick else Scale()
    values = {name: getattr(options, name) for name in ("rounds", "patience") if getattr(options, name) is not None}
    scale = replace(scale, **values)
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
            payloads=options.payloads.split(","),
        )
        try:
            for name in options.only.split(","):
                targets += CASES[name](context)
        except SystemExit:  # told_to_end: what has been measured is shown
            conclude(output, OURS, targets, load_between(before, look()))
            raise
    return conclude(output, OURS, targets, load_between(before, look()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
