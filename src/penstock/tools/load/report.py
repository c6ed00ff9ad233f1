"""Tables of a load's figures. `latency_stats` defines the numbers."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.tools.format import short
from penstock.tools.load.latency_stats import Figures, Spread
from penstock.tools.tables import Table

LATE = 10.0  # ms at p99; above, requests were not sent at the rate that was requested
BUSY = 0.8  # cores; above, the load generator itself may be the limit


def tables(title: str, figures: Figures) -> Iterator[Table]:
    rates = [
        ("requests/s", short(figures.requests_per_s)),
        ("output tokens/s", short(figures.output_tokens_per_s)),
        ("answered", f"{figures.requests:,}"),
        ("failed", f"{figures.failed:,}"),
        ("output tokens", f"{figures.output_tokens:,}"),
        ("prompt tokens", "-" if figures.prompt_tokens is None else f"{figures.prompt_tokens:,}"),
        ("seconds", short(figures.seconds)),
        ("open at a time, most", f"{figures.most_open:,}"),
    ]
    yield Table(title, ("", "in all"), rates, list(_notes(figures)))
    spreads = {"TTFT": figures.ttft, "TPOT": figures.tpot, "ITL": figures.itl, "latency": figures.latency}
    yield Table(
        "Milliseconds", ("", *Spread.__struct_fields__), [(name, *_cells(spread)) for name, spread in spreads.items()]
    )
    if figures.errors:
        rows = [(error.kind, f"{error.requests:,}", error.example) for error in figures.errors]
        yield Table("Requests without a whole answer", ("", "requests", "one of them"), rows)


def _cells(spread: Spread | None) -> tuple[str, ...]:
    return ("-",) * 4 if spread is None else tuple(map(short, (spread.mean, spread.p50, spread.p90, spread.p99)))


def _notes(figures: Figures) -> Iterator[str]:
    if figures.unfinished:
        yield f"interrupted: {figures.unfinished:,} requests were open, and are in no figure"
    if figures.counted_by_events:
        yield f"of {figures.counted_by_events:,} answers the server told no usage: each event is counted as one token"
    if not 0.95 <= figures.tokens_per_event <= 1.05 and figures.output_tokens:
        yield f"{figures.tokens_per_event:.3g} tokens an event: the ITL of each is its part of the gap before its event"
    if figures.late is not None and figures.late.p99 > LATE:
        yield f"requests were sent late, p99 {short(figures.late.p99)} ms: that is in TTFT and latency"
    if figures.cpu_cores > BUSY:
        yield f"the load generator itself took {figures.cpu_cores:.2f} cores: times may be its own"
