"""What was to be reached, and whether it was: the table at the end of a run, computed from that run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.harness.output import Output, short


@dataclass(frozen=True)
class Target:
    """One line of the table. `figure` None: not measured here."""

    case: str
    limit: float
    unit: str
    figure: float | None
    is_least: bool = False  # the figure is to be at least the limit; otherwise at most
    is_speed: bool = False  # missing it is a figure to publish, and no fault

    @property
    def is_met(self) -> bool | None:
        if self.figure is None:
            return None
        return self.figure >= self.limit if self.is_least else self.figure <= self.limit


def show(output: Output, impl: str, result: Sequence[Target]) -> bool:
    """Prints the table, with a record of each line. Returns whether no target is missed."""
    words = {True: "yes", False: "NO", None: "not measured"}
    rows = []
    for item in result:
        limit = f"{'≥' if item.is_least else '≤'} {item.limit:,.4g} {item.unit}".rstrip()
        figure = "-" if item.figure is None else f"{short(item.figure)} {item.unit}".rstrip()
        rows.append((item.case, [limit, figure, words[item.is_met]]))
        met = {"met": item.is_met} if item.figure is not None else {"missing": "not measured"}
        output.record("target", impl, target=item.case, unit=item.unit, limit=item.limit, is_speed=item.is_speed,
                      **({"figure": item.figure} if item.figure is not None else {}), **met)  # fmt: skip
    output.table("Targets", ["target", "figure", "met?"], rows)
    return all(item.is_met is not False for item in result)
