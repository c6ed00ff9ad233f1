"""What lies between machines, on one machine: replicas by Ray Serve beside their own engines, the bridge
of nodes, and a server of two nodes.

scripts/bench nodes                    all of it: twelve minutes, with the extra ray, as root
scripts/bench nodes --quick            small, one round: does it run?
scripts/bench nodes --only first-token
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import partial
from types import ModuleType

from bench.harness.run import Run, side_by_side

MODULES = ("replicas", "bridge", "remote_group")  # each has CASES, functions by their names, and targets()
OURS = "penstock"


def modules() -> list[ModuleType]:
    return [importlib.import_module(f"bench.nodes.{name}") for name in MODULES]


def main(arguments: Sequence[str]) -> int:
    known = modules()
    cases = {name: case for module in known for name, case in module.CASES.items()}
    options = side_by_side("nodes", __doc__, list(cases), [OURS]).parse_args(arguments)
    with Run("nodes", options, rounds=5, patience=60.0) as run:
        chosen = run.named("only")
        for name in chosen:
            run.attempt(name, partial(cases[name], run))
        measured = [module for module in known if not module.CASES.keys().isdisjoint(chosen)]
        return run.conclude(OURS, [target for module in measured for target in module.targets(run)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
