"""What is told of a load: tables for people. Leaves to `latency_stats` what the numbers mean."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.tools.format import short
from penstock.tools.load.latency_stats import Figures, Spread
from penstock.tools.tables import Table

LATE = 10.0  # ms; a load generator that is later than this is not what was asked for
BUSY = 0.8  # cores of the one that a load generator can have


def tables(title: str, found: Figures) -> Iterator[Table]:
    rates = [
        ("requests/s", short(found.requests_per_s)),
        ("output tokens/s", short(found.output_tokens_per_s)),
        ("answered", f"{found.requests:,}"),
        ("failed", f"{found.failed:,}"),
        ("output tokens", f"{found.output_tokens:,}"),
        ("prompt tokens", "-" if found.prompt_tokens is None else f"{found.prompt_tokens:,}"),
        ("seconds", short(found.seconds)),
        ("open at a time, most", f"{found.most_open:,}"),
    ]
    yield Table(title, ("", "in all"), rates, list(_notes(found)))
    spreads = {"TTFT": found.ttft, "TPOT": found.tpot, "ITL": found.itl, "latency": found.latency}
    yield Table(
        "Milliseconds", ("", *Spread.__struct_fields__), [(name, *_cells(one)) for name, one in spreads.items()]
    )
    if found.errors:
        rows = [(one.kind, f"{one.requests:,}", one.example) for one in found.errors]
        yield Table("Requests without a whole answer", ("", "requests", "one of them"), rows)


def _cells(spread: Spread | None) -> tuple[str, ...]:
    return ("-",) * 4 if spread is None else tuple(map(short, (spread.mean, spread.p50, spread.p90, spread.p99)))


def _notes(found: Figures) -> Iterator[str]:
    if found.unfinished:
        yield f"interrupted: {found.unfinished:,} requests were open, and are in no figure"
    if found.counted_by_events:
        yield f"of {found.counted_by_events:,} answers the server told no usage: each event is counted as one token"
    if not 0.95 <= found.tokens_per_event <= 1.05 and found.output_tokens:
        yield f"{found.tokens_per_event:.3g} tokens an event: the ITL of each is its part of the gap before its event"
    if found.late is not None and found.late.p99 > LATE:
        yield f"requests were sent late, p99 {short(found.late.p99)} ms: that is in TTFT and latency"
    if found.cpu_cores > BUSY:
        yield f"the load generator itself took {found.cpu_cores:.2f} cores: times may be its own"
