"""What output processing costs: in the core and beside it, with and without overlap, on models that compute (#6913)."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.engine_cases.trees import IN_CORE, NEITHER, NO_OVERLAP, OURS, WAYS, Bench
from bench.harness.figures import Figures
from bench.harness.output import short
from bench.harness.targets import Target
from bench.harness.turns import Outcome, in_turn
from bench.serve_cases import model as tiny
from bench.source_cases.context import Context
from penstock.engine.client.client import Client
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.model_dir import with_model_defaults
from penstock.engine.protocol.config import SHIPPED, EngineConfig
from penstock.engine.protocol.messages import ChunkFormat, Ints, SamplingParams, Style
from penstock.tools.inspect.processes import process_of

TREES = (OURS, IN_CORE, NO_OVERLAP, NEITHER)
BATCHES, QUICK_BATCHES = (1, 4, 16, 64), (1, 4)
PROMPT = 32  # tokens
TOKENS, QUICK_TOKENS = 64, 16
HEAD = b'{"id":"chatcmpl-0","object":"chat.completion.chunk","created":1795300000,"model":"bench"'
STREAMED, WHOLE = "streamed", "whole"
FORMATS = {STREAMED: ChunkFormat(Style.CHAT, HEAD), WHOLE: None}
Outcomes = dict[tuple[int, str], Outcome]  # by batch and format


def run(context: Context) -> Iterator[Target]:
    directory = context.scratch / "tiny"
    tiny.make(directory)
    models = {"tiny Llama": str(directory)} if context.is_quick else {"tiny Llama": str(directory), "shipped": SHIPPED}
    for name, path in models.items():
        outcomes = asyncio.run(_measure(context, path))
        _tell(context, name, outcomes)
        yield from _targets(name, outcomes)


def _targets(name: str, outcomes: Outcomes) -> Iterator[Target]:
    """Streamed answers are no slower than with output processing in the core, or without overlap."""
    for (batch, kind), outcome in outcomes.items():
        if kind == STREAMED:
            figure = max(outcome.ratio(OURS, "tpot_ms", way) for way in TREES if way != OURS)
            yield Target(f"{name}, streamed, batch {batch}: TPOT, times the best other way's", 1, "x", figure)


async def _measure(context: Context, path: str) -> Outcomes:
    """All trees are up, and take turns; the figures by batch and format."""
    batches = QUICK_BATCHES if context.is_quick else BATCHES
    tokens = QUICK_TOKENS if context.is_quick else TOKENS
    cases = [(batch, kind) for batch in batches for kind in FORMATS]
    outcomes = {case: Outcome({way: [] for way in TREES}) for case in cases}
    async with contextlib.AsyncExitStack() as stopping:
        trees = {way: await stopping.enter_async_context(_tree(context, way, path)) for way in TREES}
        for bench, client in trees.values():
            await _batch(bench, client, 4, tokens, None)  # warms up
        for turn in range(context.rounds):
            for (batch, kind), outcome in outcomes.items():
                for way in in_turn(TREES, turn):
                    outcome.rounds[way].append(await _batch(*trees[way], batch, tokens, FORMATS[kind]))
    return outcomes


@contextlib.asynccontextmanager
async def _tree(context: Context, way: str, path: str) -> AsyncIterator[tuple[Bench, Client]]:
    config = with_model_defaults(EngineConfig(model=path, max_model_len=tiny.LONGEST, dtype="float32"))
    options: dict[str, Any] = {"model": path, "max_model_len": config.max_model_len, "dtype": "float32"}
    bench = Bench.of(WAYS[way], context.scratch / Path(path).name, **options)
    try:
        bench.start()
        await bench.serving()
        async with Client(bench.cluster, 0) as client:
            yield bench, client
    finally:
        await bench.stop()


async def _batch(bench: Bench, client: Client, batch: int, tokens: int, chunk_format: ChunkFormat | None) -> Figures:
    """So many requests at once. What a client of the engine sees of each token, and what the processes used."""
    row, chance = bench.board.row(0), np.random.default_rng(batch)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = [chance.integers(3, 512, PROMPT, np.int32) for _ in range(batch)]
    before = (
        _used(bench),
        row[StatusBoard.OWN_NS],
        row[StatusBoard.STEPS],
        row[StatusBoard.BUSY_NS],
        row[StatusBoard.IDLE_NS],
    )
    took = await asyncio.gather(*(_answer(client, prompt, params, chunk_format) for prompt in prompts))
    used = {kind: cpu - before[0].get(kind, 0.0) for kind, cpu in _used(bench).items()}
    own, steps = row[StatusBoard.OWN_NS] - before[1], row[StatusBoard.STEPS] - before[2]
    busy, idle = row[StatusBoard.BUSY_NS] - before[3], row[StatusBoard.IDLE_NS] - before[4]
    thousands = batch * tokens / 1e3
    return {
        "tpot_ms": statistics.median(took) * 1e3,
        "core_cpu_s": used.get("core", 0.0) / thousands,
        "output_cpu_s": used.get("output", 0.0) / thousands,
        "share": used.get("output", 0.0) / max(sum(used.values()), 1e-9),
        "own_ms": own / max(steps, 1) / 1e6,
        "idle_share": idle / max(idle + busy, 1),
    }


async def _answer(client: Client, prompt: Ints, params: SamplingParams, chunk_format: ChunkFormat | None) -> float:
    """Seconds from one token to the next."""
    async with await client.submit(prompt, params, chunk_format=chunk_format) as stream:
        first = last = 0.0
        before = 0
        async for _ in stream:
            last = time.monotonic()
            if not first:
                first, before = last, stream.completion_tokens
        return (last - first) / max(stream.completion_tokens - before, 1)


def _used(bench: Bench) -> dict[str, float]:
    """Processor seconds by kind of process."""
    used: dict[str, float] = {}
    for unit in bench.units:
        for child in unit.children.values():
            process = process_of(child.pid)
            if process is not None:
                used[child.member.kind] = used.get(child.member.kind, 0.0) + process.cpu_seconds
    return used


def _tell(context: Context, name: str, outcomes: Outcomes) -> None:
    for (batch, kind), outcome in outcomes.items():
        for way in TREES:
            context.output.record("outputs", way, model=name, batch=batch, answers=kind, **outcome.figures(way))
    for kind in FORMATS:
        batches = [batch for batch, answers in outcomes if answers == kind]
        parts = ("TPOT, ms", "core", "output", "share, %")
        heads = [f"{batch}: {part}" if part == parts[0] else part for batch in batches for part in parts]
        rows = [(way, [cell for batch in batches for cell in _cells(outcomes[batch, kind], way)]) for way in TREES]
        about = "core, output: processor seconds a 1,000 tokens; share: of output processing in all"
        context.output.table(f"{name}, {kind} answers, by batch (#6913); {about}", heads, rows)
    for (batch, kind), outcome in outcomes.items():
        figures = outcome.figures(OURS)
        if kind == STREAMED:
            context.output.say(
                f"  {name}, batch {batch}: the core's own {figures['own_ms']:.3f} ms a step, the device idle for "
                f"{figures['idle_share']:.1%}: several steps in one message could gain at most that"
            )


def _cells(outcome: Outcome, way: str) -> list[str]:
    figures = outcome.figures(way)
    seconds = [f"{figures[key]:.3f}" for key in ("core_cpu_s", "output_cpu_s")]
    return [short(figures["tpot_ms"]), *seconds, f"{figures['share']:.1%}"]
