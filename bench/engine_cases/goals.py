"""What the engine was to reach, from what a run found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from bench.engine_cases.decoding import Cell
from bench.engine_cases.trees import CLASSIC_GLOO, CLASSIC_ZEROMQ, IN_CORE, OURS
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
    images: dict[float, Outcome] = field(default_factory=dict)  # by the share that is kept

    def figure(self, cell: Cell, key: str) -> float | None:
        return _figure(self.decoded, cell, OURS, key)


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
    outcome = result.images.get(1.0)
    classic = [] if outcome is None else [each for each in (CLASSIC_ZEROMQ, CLASSIC_GLOO) if each in outcome.rounds]
    ratios = [outcome.ratio(each, "ttft_ms", OURS) for each in classic] if outcome and OURS in outcome.rounds else []
    yield Target("image request at 100 % hits, time to first token, the better classic way over ours", 1.7, "x",
                 min(ratios, default=None), is_least=True)  # fmt: skip


def _figure(outcomes: Mapping[Cell, Outcome], cell: Cell, name: str, key: str) -> float | None:
    outcome = outcomes.get(cell)
    return outcome.figures(name)[key] if outcome is not None and name in outcome.rounds else None
