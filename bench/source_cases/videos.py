"""Video captioning of one prompt, with no cache: every video is new, and its frames are 4 to 96 MB (#32104).

The document measures its own path so: it is used where vLLM's cache of processed inputs is off. vLLM runs without that
cache, in its default and with its tensor IPC.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.harness.output import short
from bench.harness.targets import Target
from bench.serve_cases.servers import THEIRS, UNRESERVED
from bench.source_cases import payloads
from bench.source_cases.context import Context
from bench.source_cases.images import measure_once, over, ratio, record
from bench.source_cases.payloads import INLINE, STORE, VIDEO_WAYS, Kinds, VideoLoad

# Two frames a second are taken; 12 bytes a pixel of each.
LOADS = {
    "4 MB": VideoLoad(8, 2, "16", "1", seconds=4, width=224, height=168),
    "23 MB": VideoLoad(6, 2, "16", "1", seconds=4, width=560, height=448),
    "96 MB": VideoLoad(4, 2, "16", "1", seconds=16, width=560, height=448),
}
QUICK_LOADS = {"4 MB": VideoLoad(3, 1, "16", "1", seconds=2, width=224, height=168)}


def run(context: Context) -> Iterator[Target]:
    """With one worker, and with two: vLLM's tensor IPC takes one."""
    model = payloads.make_model(context.scratch)
    off = ("--mm-processor-cache-gb", "0")
    alone = context.ways_among(VIDEO_WAYS)
    shared = context.ways_among((THEIRS,))
    yield from _side_by_side(
        context,
        "TP 1",
        {
            **payloads.both_transports(model),
            **payloads.ways_of_theirs(model, alone, *off, environment=UNRESERVED),
        },
    )
    yield from _side_by_side(
        context,
        "TP 2",
        {
            **payloads.both_transports(model, "-tp", "2"),
            **payloads.ways_of_theirs(model, shared, "--tensor-parallel-size", "2", *off),
        },
    )


def _side_by_side(context: Context, about: str, kinds: Kinds) -> Iterator[Target]:
    heads = ["requests/s, × of store", "TTFT, ms"]
    with context.servers(kinds, STORE) as servers:
        for name, load in (QUICK_LOADS if context.is_quick else LOADS).items():
            servers.take(servers.one_round_of(load), measure_once, 1)  # warms up: decoders start
            outcome = servers.take(servers.one_round_of(load), measure_once, servers.rounds)
            rows = []
            for way in outcome.rounds:
                figures = outcome.figures(way)
                rate = f"{short(figures['requests_per_s'])} ×{short(ratio(outcome, way, 'requests_per_s'))}"
                rows.append((way, [rate, short(figures["ttft_ms"])]))
                record(context, "videos", about, name, way, outcome)
            context.output.table(f"New videos of {name} at {about}, no cache (#32104)", heads, rows)
            yield over(f"{about}, video, {name}", outcome, "requests_per_s", [INLINE], "inline's")
            remote = [way for way in kinds if way in VIDEO_WAYS]
            yield over(f"{about}, video, {name}", outcome, "requests_per_s", remote, "vLLM's best")
