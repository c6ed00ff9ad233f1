"""How a case is told: the median over the rounds of each way, least and most, and the ratio to vLLM as it is."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from bench.harness.figures import Figures
from bench.harness.output import short
from bench.harness.turns import Outcome, Turns
from bench.vllm_cases.ways import AS_IT_IS


def spread(values: list[float], factor: float = 1.0) -> str:
    """Returns "median (least–most)" of the rounds."""
    median, least, most = (factor * each for each in (statistics.median(values), min(values), max(values)))
    return f"{short(median)} ({short(least)}–{short(most)})" if len(values) > 1 else short(median)


def tell(
    turns: Turns, case: str, title: str, outcome: Outcome, columns: Mapping[str, tuple[str, float]], **parameters: Any
) -> Outcome:
    """Records all figures of each way, and shows those of `columns`: a heading, and a figure with its factor.

    Returns the outcome.
    """
    output = turns.output
    for name, rounds in outcome.rounds.items():
        figures = outcome.figures(name)
        ends = {f"{key}_{end.__name__}": end(each[key] for each in rounds) for key in figures for end in (min, max)}
        quiet = {"rounds": len(rounds), "foreign_cores": outcome.foreign_cores, "quiet": outcome.is_quiet}
        output.record(case, name, **parameters, **figures, **ends, **quiet)
    rows = []
    for name, rounds in outcome.rounds.items():
        cells = []
        for key, factor in columns.values():
            text = spread([each[key] for each in rounds], factor)
            if name != AS_IT_IS and AS_IT_IS in outcome.rounds:
                text += f" ×{short(outcome.ratio(name, key, AS_IT_IS))}"
            cells.append(text)
        rows.append((name, cells))
    if rows:
        output.table(title, list(columns), rows)
    if not outcome.is_quiet:
        output.say(f"  foreign processes took up to {outcome.foreign_cores:.2f} cores in these rounds")
    return outcome


def ratio(outcome: Outcome | None, name: str, other: str, key: str) -> float | None:
    """Returns how many times the other's figure, as the median over the rounds. None: one of them was not measured."""
    return None if outcome is None else outcome.ratio_if_measured(name, key, other)


def ratio_to_better(outcome: Outcome | None, name: str, others: tuple[str, ...], key: str) -> float | None:
    """Returns how many times the least of the others' figures, round by round; the median of that."""
    if outcome is None or not {name, *others} <= outcome.rounds.keys():
        return None
    best: list[Figures] = [
        {key: min(figures[key] for figures in of_round)}
        for of_round in zip(*(outcome.rounds[other] for other in others), strict=True)
    ]
    return Outcome({name: outcome.rounds[name], "best": best}).ratio(name, key, "best")
