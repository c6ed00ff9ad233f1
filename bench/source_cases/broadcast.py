"""The three overheads of `broadcast_object_list`, and what is left of it where the size is known (#4440)."""

from __future__ import annotations

from collections.abc import Iterator

from bench.harness.targets import Target
from bench.impls import Unavailable
from bench.source_cases.context import Context
from bench.vs_vllm import collective
from penstock.tools.tables import print_tables


def run(context: Context) -> Iterator[Target]:
    rounds = 1 if context.is_quick else max(context.rounds, 3)
    try:
        rows, table = collective.told(rounds)
    except Unavailable as reason:
        context.output.say(f"skipped broadcast: {reason}")
        return
    for row in rows:
        context.output.record("broadcast", row["impl"], **{key: row[key] for key in row if key not in ("case", "impl")})
    print_tables([table])
    found = {row["impl"]: row for row in rows}
    known = found.get("gloo", {}).get("known_one_way_ratio_to_penstock")
    yield Target("gloo's broadcast of a known size, whole call, times ours", 1, "x", known, is_least=True)
