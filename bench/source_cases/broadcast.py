"""The three overheads of `broadcast_object_list`, and what is left of it where the size is known (#4440).

A sweep over sizes and receivers: the document's benchmark has a sheet of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.harness.output import short
from bench.harness.targets import Target
from bench.impls import Unavailable
from bench.source_cases.context import Context
from bench.vs_vllm import collective

SIZES, QUICK_SIZES = (100, collective.NBYTES, 10_000, 100_000, 1_000_000), (collective.NBYTES, 100_000)
RECEIVERS, QUICK_RECEIVERS = (1, 2, 4, 8), (2,)
WAYS = {
    "one_way": "gloo's broadcast_object_list",
    "known": "gloo's broadcast of a known size",
    "nccl_one_way": "nccl's broadcast_object_list",
}


def run(context: Context) -> Iterator[Target]:
    rounds = 1 if context.is_quick else max(context.rounds, 3)
    sizes = QUICK_SIZES if context.is_quick else SIZES
    heads = ["ours, us", "gloo", "gloo, known size", "nccl", "device and back", "gloo, times ours", "known"]
    for receivers in QUICK_RECEIVERS if context.is_quick else RECEIVERS:
        try:
            about, rounds_by_size = collective.sweep(rounds, receivers, sizes)
        except Unavailable as reason:
            context.output.say(f"skipped broadcast: {reason}")
            return
        table: list[tuple[str, list[str]]] = []
        for nbytes, value in rounds_by_size.items():
            figures = collective.medians(value)
            rows, details = collective.describe(
                figures, about, {"receivers": receivers, "nbytes": nbytes, "rounds": rounds}
            )
            _record(context, rows)
            if nbytes == collective.NBYTES and receivers in (*QUICK_RECEIVERS, collective.RECEIVERS):
                context.output.table(details.title, details.columns[1:], [(row[0], row[1:]) for row in details.rows])
            table.append((f"{nbytes:,} B", _cells(figures)))
            yield from _targets(f"{nbytes:,} B to {receivers}", figures)
        title = f"One message to the last of {receivers} receivers, paced (#4440); medians, us"
        context.output.table(title, heads, table)


def _record(context: Context, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        figures = {key: row[key] for key in row if key not in ("bench", "case", "impl")}
        context.output.record("broadcast", row["impl"], **figures)


def _cells(figures: dict[str, float]) -> list[str]:
    keys = ("penstock_one_way_us", "gloo_one_way_us", "known_one_way_us", "nccl_one_way_us", "device_us")
    times = [f"×{short(figures[f'{way}_ratio'])}" for way in ("one_way", "known")]
    return [*(short(figures[key]) if key in figures else "-" for key in keys), *times]


def _targets(about: str, figures: dict[str, float]) -> Iterator[Target]:
    for way, name in WAYS.items():
        yield Target(f"{about}: {name}, times ours", 1, "x", figures.get(f"{way}_ratio"), is_least=True)
