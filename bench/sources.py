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

import sys
from collections.abc import Sequence

from bench.harness.run import one_of, side_by_side
from bench.harness.targets import Target
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


def main(arguments: Sequence[str]) -> int:
    parser = side_by_side("sources", __doc__, tuple(CASES), WAYS, quick="small, one round: does it run?")
    names = [payload.name for payload in PAYLOADS]
    parser.add_argument(
        "--payloads", metavar="SIZE,…", type=one_of(names), default=",".join(names), help="of %(default)s"
    )
    options = parser.parse_args(arguments)
    targets: list[Target] = []
    with Context("sources", options, rounds=5, patience=60.0) as context:
        try:
            for name in context.named("only"):
                targets += CASES[name](context)
        except SystemExit:  # by a signal: what has been measured is shown
            context.conclude(OURS, targets)
            raise
        return context.conclude(OURS, targets)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
