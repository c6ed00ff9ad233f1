"""What the engine was to reach, from what a run found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.engine_cases.decoding import Cell
from bench.engine_cases.trees import IN_CORE, OURS
from bench.harness.targets import Target
from bench.harness.turns import Outcome
from penstock.engine.protocol.messages import Style

SMALL, LARGE = Cell(5, 256, 2), Cell(20, 1024, 4)
OUTPUTS = (Cell(5, 1024, 1), Cell(5, 1024, 1, Style.CHAT))
OWN_MS = {SMALL: 0.15, OUTPUTS[0]: 0.5, LARGE: 0.5}


@dataclass
class Found:
    """What a run has measured so far."""

    decoded: dict[Cell, Outcome] = field(default_factory=dict)

    def figure(self, cell: Cell, key: str) -> float | None:
        outcome = self.decoded.get(cell)
        return outcome.figures(OURS)[key] if outcome is not None and OURS in outcome.rounds else None


def targets(result: Found) -> Iterator[Target]:
    for cell in (SMALL, LARGE):
        idle = result.figure(cell, "idle_share")
        yield Target(f"idle share, {cell}", 3, "%", None if idle is None else idle * 100)
    for cell, limit in OWN_MS.items():
        yield Target(f"core's own time per step, {cell}", limit, "ms", result.figure(cell, "own_ms"))
    for cell in OUTPUTS:
        outcome = result.decoded.get(cell)
        has_both = outcome is not None and {OURS, IN_CORE} <= outcome.rounds.keys()
        ratio = 1 / outcome.ratio(IN_CORE, "tpot_ms", OURS) if outcome is not None and has_both else None
        yield Target(f"TPOT with output processors against 0, {cell}", 0.8, "x", ratio)
