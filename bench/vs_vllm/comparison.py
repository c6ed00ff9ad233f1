"""Public issue #6241's experiment, repeated: the same decode steps in their formats and in ours.

Leaves to `formats` what each of them writes, to `rounds` the turns, to `report` telling it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.vs_vllm import formats
from bench.vs_vllm.formats import OURS
from bench.vs_vllm.rounds import Found, Way, take_turns
from penstock.tools.format import short
from penstock.tools.tables import Row, Table, row

REQUESTS = (4, 32, 256, 1024)
LONG_PROMPT = 40_000  # tokens
CYCLE = 16  # steps, in which each request needs one block
TIMED = 50_000  # requests times steps in one round of a steady case, about
LEAST_STEPS, MAX_STEPS = 13, 400


@dataclass(frozen=True)
class Case:
    """One question: a key, a title, how many requests, and the formats that answer it."""

    key: str
    title: str
    requests: int
    ways: Mapping[str, Way]
    messages: int  # in each round


@dataclass(frozen=True)
class Outcome:
    case: Case
    results: dict[str, Found]
    rounds: int

    def figures(self, name: str) -> dict[str, float] | None:
        value = self.results.get(name)
        return value.figures() if value is not None and value.nbytes and not value.missing else None


def steps_of(requests: int) -> int:
    return max(LEAST_STEPS, min(MAX_STEPS, TIMED // requests))


def cases(requests: Sequence[int]) -> Iterator[Case]:
    for many in requests:
        steps = steps_of(many)
        yield Case("step_steady", f"Decode step of {many} requests, no new blocks", many,
                   formats.steps(many, is_spread=False, steps=steps), LEAST_STEPS)  # fmt: skip
        yield Case("step_blocks", f"Decode step of {many} requests, new blocks where they fall due", many,
                   formats.steps(many, is_spread=True, steps=CYCLE), CYCLE)  # fmt: skip
        yield Case("worker_output", f"Worker output of {many} sampled tokens", many,
                   formats.worker_outputs(many), LEAST_STEPS)  # fmt: skip
        yield Case("api_outputs", f"Outputs to the API server, {many} requests", many,
                   formats.api_outputs(many), LEAST_STEPS)  # fmt: skip
    yield Case("long_prompt", f"A request of {LONG_PROMPT:,} prompt tokens", 1, formats.requests(LONG_PROMPT), 20)


def run(requests: Sequence[int], rounds: int) -> Iterator[Outcome]:
    for case in cases(requests):
        yield Outcome(case, take_turns(case.ways, case.messages, rounds), rounds)


def rows_of(outcome: Outcome) -> Iterator[Row]:
    for name, value in outcome.results.items():
        parameters = {"requests": outcome.case.requests, "rounds": outcome.rounds}
        if value.missing:
            yield row("codec", outcome.case.key, name, **parameters, missing=value.missing)
        else:
            yield row("codec", outcome.case.key, name, **parameters, **value.figures())


def table_of(outcome: Outcome) -> Table:
    ours = outcome.figures(OURS)
    cells = []
    notes = []
    for name, value in outcome.results.items():
        if value.missing:
            notes.append(f"{name}: {value.missing}")
            continue
        figures = value.figures()
        most = "" if value.is_exact else "≤ "
        cells.append(
            [
                name,
                f"{figures['bytes']:,.1f}".removesuffix(".0"),
                most + short(figures["distance_bytes"]) if "distance_bytes" in figures else "-",
                short(figures["encode_us"]),
                short(figures["decode_us"]),
                short(figures["encode_decode_us"]),
                f"{short(figures['bytes'] / ours['bytes'])}, "
                f"{short(figures['encode_decode_us'] / ours['encode_decode_us'])}"
                if ours
                else "-",
            ]
        )
    columns = ("", "bytes", "distance", "encode, µs", "decode, µs", "both, µs", "times ours: bytes, both")
    return Table(outcome.case.title, columns, cells, notes)


# ── default sampling parameters ──────────────────────────────────────────────────────────────────────────────────────
def params_told() -> tuple[list[Row], Table]:
    """What sampling parameters cost in a request."""
    result = formats.params_nbytes()
    rows = [row("codec", "sampling_params", name, bytes=nbytes) for name, nbytes in result.items()]
    cells = [[name, f"{nbytes:,}"] for name, nbytes in result.items()]
    return rows, Table("Default sampling parameters", ("", "bytes"), cells)


def summary(outcomes: Sequence[Outcome]) -> dict[tuple[str, int], dict[str, dict[str, Any]]]:
    """Figures by case and number of requests, then by format."""
    result: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for outcome in outcomes:
        named = {name: figures for name in outcome.results if (figures := outcome.figures(name))}
        result[outcome.case.key, outcome.case.requests] = named
    return result
