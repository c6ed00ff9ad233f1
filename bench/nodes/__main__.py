"""What lies between machines, on one machine: replicas by Ray Serve beside their own engines, the bridge
of nodes, and a server of two nodes.

scripts/bench nodes                    all of it: twelve minutes, with the extra ray, as root
scripts/bench nodes --quick            small, one round: does it run?
scripts/bench nodes --only first-token
"""

from __future__ import annotations

import importlib
import importlib.util
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from bench.harness.options import side_by_side
from bench.harness.output import Output
from bench.harness.quiet import Patience, load_between, look
from bench.harness.targets import conclude
from bench.impls import Unavailable
from bench.nodes.run import Run
from bench.serve import told_to_end

MODULES = ("replicas", "bridge", "remote_group")  # each has CASES, functions by their names, and targets()
OURS = "penstock"
ROUNDS, PATIENCE = 5, 60.0


def modules() -> list[ModuleType]:
    return [importlib.import_module(f"bench.nodes.{name}") for name in MODULES]


def main(arguments: Sequence[str]) -> int:
    known = modules()
    cases = {name: case for module in known for name, case in module.CASES.items()}
    parser = side_by_side("nodes", __doc__, list(cases), [OURS], quick="small, one round: does it run?")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, told_to_end)
    output = Output("nodes", is_json=options.json, folder=options.out)
    output.begin()
    before = look()
    patience = (0.0 if options.quick else PATIENCE) if options.patience is None else options.patience
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        rounds = options.rounds or (1 if options.quick else ROUNDS)
        run = Run(options, output, Patience(patience), Path(scratch), rounds)
        chosen = options.only.split(",")
        for name in chosen:
            try:
                cases[name](run)
            except Unavailable as reason:
                output.say(f"skipped {name}: {reason}")
                output.record("skipped", name, reason=str(reason))
            except Exception as failure:
                output.say(f"\n{name} failed: {traceback.format_exc()}")
                output.record("failed", name, reason=f"{type(failure).__name__}: {failure}")
        result = [
            target for module in known if not module.CASES.keys().isdisjoint(chosen) for target in module.targets(run)
        ]
        return conclude(output, OURS, result, load_between(before, look()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
