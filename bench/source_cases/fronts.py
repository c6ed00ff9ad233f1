"""Images and pages a second of each server process, at one and two of them, beside vLLM's front (#16626, #58266).

Each image is new, so that the front decodes and processes it. Answers have one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from bench.harness.output import short
from bench.harness.targets import Target
from bench.harness.turns import Outcome
from bench.serve_cases.servers import OURS, THEIRS, UNRESERVED, Server
from bench.source_cases import payloads
from bench.source_cases.context import Context
from bench.source_cases.images import measure_once
from bench.source_cases.payloads import ImageLoad

FRONTS = (1, 2)
# A page of a document: A4 at 150 dots an inch, in whole tokens.
LOADS = {
    "images": ImageLoad(32, 8, "16", "1", 1, 448, 448),
    "pages": ImageLoad(8, 4, "16", "1", 1, 1232, 1736),
}
QUICK_LOADS = {"images": ImageLoad(6, 2, "16", "1", 1, 448, 448), "pages": ImageLoad(2, 2, "16", "1", 1, 1232, 1736)}


def run(context: Context) -> Iterator[Target]:
    model = payloads.make_model(context.scratch)
    kinds: dict[str, Callable[[Path], Server]] = {}
    for count in FRONTS:
        ours = (*payloads.STORE_OPTIONS, "--api-server-count", str(count))
        kinds[f"{OURS}, {count}"] = partial(payloads.serve_ours, model, ours)
        if THEIRS in context.ways:
            remote = ("--api-server-count", str(count))
            # Its one worker computes with all processors, as ours does.
            kinds[f"{THEIRS}, {count}"] = partial(payloads.serve_theirs, model, remote, environment=UNRESERVED)
    rows: dict[str, list[str]] = {name: [] for name in kinds}
    loads = QUICK_LOADS if context.is_quick else LOADS
    with context.servers(kinds, f"{OURS}, 1") as servers:
        for what, load in loads.items():
            servers.take(servers.one_round_of(load), measure_once, 1)  # warms up
            outcome = servers.take(servers.one_round_of(load), measure_once, servers.rounds)
            for name in outcome.rounds:
                rows[name] += _cells(context, what, name, outcome)
            yield from _targets(what, outcome)
    heads = [f"{what}: {part}" for what in loads for part in ("a second", "of each server process", "TTFT, ms")]
    shown = [(name, cells) for name, cells in rows.items() if len(cells) == len(heads)]
    context.output.table("New images and pages, by API server processes (#16626, #58266)", heads, shown)


def _cells(context: Context, what: str, name: str, outcome: Outcome) -> list[str]:
    figures = outcome.figures(name)
    way, _, count = name.partition(", ")
    rate = figures["requests_per_s"]
    context.output.record(
        "fronts", way, load=what, api_server_count=int(count), per_s=rate, per_server_s=rate / int(count),
        ttft_ms=figures["ttft_ms"], rounds=context.rounds, foreign_cores=outcome.foreign_cores,
        quiet=outcome.is_quiet,
    )  # fmt: skip
    return [short(rate), short(rate / int(count)), short(figures["ttft_ms"])]


def _targets(what: str, outcome: Outcome) -> Iterator[Target]:
    for count in FRONTS:
        ours, remote = f"{OURS}, {count}", f"{THEIRS}, {count}"
        figure = None
        if {ours, remote} <= outcome.rounds.keys():
            figure = 1 / outcome.ratio(remote, "requests_per_s", ours)
        about = f"{what} a second with {count} server processes, times vLLM's"
        yield Target(about, 1, "x", figure, is_least=True)
