"""Images between processes over HTTP: the store beside inline messages and vLLM's ways, at four sizes (#19702, #32104).

A load is asked for twice with the same images: first the store has none of them, then all. The prefix cache is off, as
it would find the whole prompt the second time. The model is tiny, so that transfers show: each pixel of an image is 24
bytes of its input.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.harness.figures import Figures
from bench.harness.output import short
from bench.harness.targets import Target
from bench.harness.turns import Outcome
from bench.serve_cases.cases import Load, Servers, run_load
from bench.serve_cases.servers import Server
from bench.source_cases import payloads
from bench.source_cases.context import Context
from bench.source_cases.payloads import IMAGE_WAYS, INLINE, STORE, Kinds, Payload

TENSOR_PARALLEL_SIZES, QUICK_TENSOR_PARALLEL_SIZES = (2, 4), (2,)
HITS = {"miss": "0 % hits", "hit": "100 % hits"}
# What a server has counted: images found, and all of them or those that were not.
FOUND = ("penstock_store_hits_total", "vllm:mm_cache_hits_total")
MISSED, QUERIES = "penstock_store_misses_total", "vllm:mm_cache_queries_total"


def run(context: Context) -> Iterator[Target]:
    """A vision model at TP 2 and 4."""
    model = payloads.make_model(context.scratch)
    sizes = context.select(payloads.QUICK_PAYLOADS if context.is_quick else payloads.PAYLOADS)
    for ranks in QUICK_TENSOR_PARALLEL_SIZES if context.is_quick else TENSOR_PARALLEL_SIZES:
        ways = context.ways_among(IMAGE_WAYS)
        # Each worker of vLLM takes 1.8 GB: with more than two workers its ways are not up together.
        for group in [ways] if ranks == 2 or not ways else [(way,) for way in ways]:
            kinds = {
                **payloads.both_transports(model, "-tp", str(ranks)),
                **payloads.ways_of_theirs(model, group, "--tensor-parallel-size", str(ranks)),
            }
            yield from over_http(context, f"TP {ranks}", kinds, sizes)


def run_many(context: Context) -> Iterator[Target]:
    """Two servers and two engines, with the store and without it."""
    model = payloads.make_model(context.scratch)
    sizes = payloads.QUICK_PAYLOADS if context.is_quick else payloads.PAYLOADS[:3]
    kinds = payloads.both_transports(model, "-asc", "2", "-dp", "2")
    yield from over_http(context, "2 API servers, 2 engines", kinds, context.select(sizes))


def over_http(context: Context, about: str, kinds: Kinds, sizes: Sequence[Payload]) -> Iterator[Target]:
    """All servers are up, and take turns at each size."""
    heads = [
        f"{share}: {what}" for share in HITS.values() for what in ("requests/s", "TTFT, ms", "transfer in it", "found")
    ]
    with context.servers(kinds, STORE) as servers:
        if not context.is_quick:
            servers.take(servers.one_round_of(payloads.FILLING), measure_once, 1)
        for payload in sizes:
            outcome = measure(servers, payload.load)
            rows = [(name, _cells(context, about, payload, name, outcome)) for name in outcome.rounds]
            title = f"Images of {payload.name} at {about} (#19702), the prefix cache off; × of {STORE}"
            context.output.table(title, heads, rows)
            for name in outcome.rounds:
                record(context, "images", about, payload.name, name, outcome, nbytes=payload.nbytes)
            yield from _targets(f"{about}, {payload.name}", outcome, kinds)


def measure(servers: Servers, load: Load) -> Outcome:
    servers.take(servers.one_round_of(load), _twice, 1)  # warms up
    return servers.take(servers.one_round_of(load), _twice, servers.rounds)


def _twice(server: Server, load: Load, scratch: Path, seed: int) -> Figures:
    """The same requests twice: the images of the second time are known."""
    figures: Figures = {}
    for hits in HITS:
        before = _counts(server)
        figures |= {f"{hits}.{key}": value for key, value in measure_once(server, load, scratch, seed).items()}
        result, of = (count - earlier for count, earlier in zip(_counts(server), before, strict=True))
        figures[f"{hits}.hit_rate"] = result / of if of else math.nan  # no cache: nothing is counted
    return figures


def _counts(server: Server) -> tuple[float, float]:
    """Returns how many images the server has found in its store or cache, and how many it has looked for."""
    lines = server.request("GET", "/metrics")[1].decode().splitlines()
    words = [line.replace("{", " ", 1).split(" ") for line in lines if not line.startswith("#")]
    counts = [(line[0], float(line[-1])) for line in words]
    result = sum(count for name, count in counts if name in FOUND)
    missed = sum(count for name, count in counts if name == MISSED)
    queries = sum(count for name, count in counts if name == QUERIES)
    return result, queries or result + missed


def measure_once(server: Server, load: Load, scratch: Path, seed: int) -> Figures:
    answer = run_load(server, load, scratch, seed)
    return {"requests_per_s": answer["requests_per_s"], "ttft_ms": answer["ttft"]["p50"]}


def _cells(context: Context, about: str, payload: Payload, name: str, outcome: Outcome) -> list[str]:
    figures, cells = outcome.figures(name), []
    for hits in HITS:
        ttft = figures[f"{hits}.ttft_ms"]
        transfer = context.transfers.get((about, payload.name, hits, name))
        cells += [
            f"{short(figures[f'{hits}.requests_per_s'])} ×{short(ratio(outcome, name, f'{hits}.requests_per_s'))}",
            short(ttft),
            "-" if transfer is None else f"{transfer / ttft:.1%}",
            "-" if math.isnan(figures[f"{hits}.hit_rate"]) else f"{figures[f'{hits}.hit_rate']:.0%}",
        ]
    return cells


def ratio(outcome: Outcome, name: str, key: str) -> float:
    """Returns how many times the store's figure a way's is."""
    return outcome.ratio(name, key, STORE) if STORE in outcome.rounds else float("nan")


def record(
    context: Context, case: str, about: str, payload: str, name: str, outcome: Outcome, **parameters: int
) -> None:
    known = {key: value for key, value in outcome.figures(name).items() if not math.isnan(value)}
    figures = {key.replace(".", "_"): value for key, value in known.items()}
    quiet = {"foreign_cores": outcome.foreign_cores, "quiet": outcome.is_quiet}
    context.output.record(
        case, name, about=about, payload=payload, **parameters, **figures, rounds=context.rounds, **quiet
    )


def _targets(about: str, outcome: Outcome, kinds: Kinds) -> Iterator[Target]:
    for hits, share in HITS.items():
        key = f"{hits}.requests_per_s"
        yield over(f"{about}, {share}", outcome, key, [INLINE], "inline's")
        remote = [name for name in kinds if name in IMAGE_WAYS]
        owner = f"{remote[0]}'s" if len(remote) == 1 else "vLLM's best"
        yield over(f"{about}, {share}", outcome, key, remote, owner)


def over(about: str, outcome: Outcome, key: str, others: Sequence[str], owner: str) -> Target:
    """The store is at least as fast as the fastest of the others. Not measured: none of them ran."""
    ratios = [outcome.ratio(name, key, STORE) for name in others if {name, STORE} <= outcome.rounds.keys()]
    figure = 1 / max(max(ratios), 1e-9) if ratios else None
    return Target(f"{about}: the store's requests/s, times {owner}", 1, "x", figure, is_least=True)
