"""What output processing costs: in the core and beside it, with and without overlap, on models that compute (#6913)."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.engine_cases.trees import IN_CORE, NEITHER, NO_OVERLAP, OURS, WAYS, Bench
from bench.harness.figures import Figures, median_figures
from bench.harness.output import short
from bench.harness.targets import Target
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


def run(context: Context) -> Iterator[Target]:
    directory = context.scratch / "tiny"
    tiny.make(directory)
    models = {"tiny Llama": str(directory)} if context.is_quick else {"tiny Llama": str(directory), "shipped": SHIPPED}
    for name, path in models.items():
        found = {way: asyncio.run(_tree(context, way, path)) for way in TREES}
        _tell(context, name, found)
    yield from ()


async def _tree(context: Context, way: str, path: str) -> dict[tuple[int, str], Figures]:
    """Medians of the figures of one tree, by batch and format. Trees are not up together: two processors compute."""
    config = with_model_defaults(EngineConfig(model=path, max_model_len=tiny.LONGEST, dtype="float32"))
    options: dict[str, Any] = {"model": path, "max_model_len": config.max_model_len, "dtype": "float32"}
    bench = Bench.of(WAYS[way], context.scratch / Path(path).name, **options)
    tokens = QUICK_TOKENS if context.is_quick else TOKENS
    found: dict[tuple[int, str], list[Figures]] = {}
    try:
        bench.start()
        await bench.serving()
        async with Client(bench.tree, 0) as client:
            await _batch(bench, client, 4, tokens, None)  # warms up
            for _ in range(context.rounds):
                for batch in QUICK_BATCHES if context.is_quick else BATCHES:
                    for kind, chunk_format in FORMATS.items():
                        figures = await _batch(bench, client, batch, tokens, chunk_format)
                        found.setdefault((batch, kind), []).append(figures)
    finally:
        await bench.stop()
    return {case: median_figures(rounds) for case, rounds in found.items()}


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


def _tell(context: Context, name: str, found: dict[str, dict[tuple[int, str], Figures]]) -> None:
    cases = list(found[OURS])
    for way, by_case in found.items():
        for (batch, kind), figures in by_case.items():
            context.output.record("outputs", way, model=name, batch=batch, answers=kind, **figures)
    for kind in FORMATS:
        heads, rows = [], []
        batches = [batch for batch, its in cases if its == kind]
        for batch in batches:
            heads += [f"{batch}: TPOT, ms", "core", "output", "share, %"]
        for way, by_case in found.items():
            cells = []
            for batch in batches:
                figures = by_case[batch, kind]
                cells += [short(figures["tpot_ms"]), f"{figures['core_cpu_s']:.3f}", f"{figures['output_cpu_s']:.3f}"]
                cells.append(f"{figures['share']:.1%}")
            rows.append((way, cells))
        about = "core, output: processor seconds a 1,000 tokens; share: of output processing in all"
        context.output.table(f"{name}, {kind} answers, by batch (#6913); {about}", heads, rows)
    for batch, kind in cases:
        figures = found[OURS][batch, kind]
        if kind == STREAMED:
            context.output.say(
                f"  {name}, batch {batch}: the core's own {figures['own_ms']:.3f} ms a step, the device idle for "
                f"{figures['idle_share']:.1%}: several steps in one message could gain at most that"
            )
