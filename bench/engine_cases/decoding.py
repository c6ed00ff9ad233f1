"""Steady decoding: does the device wait, what does a user wait for a token, and what does a step cost the core?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.engine_cases import spent
from bench.engine_cases.load import Server, Wrong, decode
from bench.engine_cases.trees import OURS, START, Bench, Way
from bench.harness.figures import Figures
from bench.harness.output import short
from bench.harness.turns import Outcome, Turns
from penstock.engine.launcher.launcher import ClusterFailed
from penstock.engine.protocol.config import SimulatedDevice
from penstock.engine.protocol.messages import Style
from penstock.errors import PenstockError

BLOCKS = 1 << 17  # so many that no sample is preempted
BUDGET = 8192  # tokens of a step: all samples join soon
MODEL_LEN = 1 << 15
COLUMNS = {
    "idle share": lambda figures: f"{figures['idle_share']:.2%}",
    "TPOT, ms": lambda figures: f"{figures['tpot_ms']:.2f}",
    "slowest": lambda figures: f"{figures['tpot_most_ms']:.2f}",
    "steps/s": lambda figures: f"{figures['steps_per_s']:.1f}",
    "core's own, ms a step": lambda figures: f"{figures['own_ms']:.3f}",
    "its CPU, ms a step": lambda figures: f"{figures['core_cpu_ms']:.3f}",
    "B of text a token": lambda figures: f"{figures['text_nbytes_per_token']:.1f}",
    "load's CPU, cores": lambda figures: f"{figures['load_cores']:.3f}",
}
FAILURES = (PenstockError, ClusterFailed, Wrong, OSError, RuntimeError)  # a TimeoutError is an OSError


class Cell(NamedTuple):
    step_ms: int
    batch: int
    tensor_parallel: int
    style: Style | None = None  # of the answers' chunks; None: plain text

    def __str__(self) -> str:
        chat = "" if self.style is None else ", chat chunks"
        return f"{self.step_ms} ms steps, batch {self.batch}, TP {self.tensor_parallel}{chat}"


class Trees(Turns):
    """Trees that are up, taking turns. One that fails is named with the reason, and takes no further part."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._benches: dict[str, Bench] = {}
        self._servers: dict[str, Server] = {}

    async def start(self, ways: Sequence[Way], scratch: Path, options: Mapping[str, Any]) -> None:
        self.receivers = options["tensor_parallel_size"]
        for way in ways:
            self._benches[way.name] = Bench.of(way, scratch, **options)
            self._benches[way.name].start()
        for name, bench in self._benches.items():
            try:
                await bench.serving(START)
            except FAILURES as failure:
                self._leave_out(name, failure)
            else:
                self._servers[name] = Server(bench)

    async def stop(self) -> dict[str, Path]:
        """What each cluster has left is in its folder."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()
        await asyncio.gather(*(bench.stop() for bench in self._benches.values()))
        folders = {name: bench.scratch for name, bench in self._benches.items()}
        self._benches.clear()
        return folders

    @property
    def names(self) -> list[str]:
        return list(self._servers)

    @property
    def servers(self) -> list[Server]:
        return list(self._servers.values())

    def _up(self) -> Container[str]:
        return self._servers

    def _turn_of(self, name: str, order: Any, measure: Callable[..., Figures]) -> list[Figures]:
        try:
            return [measure(self._servers[name], order)]
        except FAILURES as failure:
            self._leave_out(name, failure)
            self._servers.pop(name).close()
            return []


def one_round(seconds: float, chance: np.random.Generator, server: Server, cell: Cell) -> Figures:
    return decode(server, cell.batch, cell.style, seconds, chance)


async def run_cell(
    trees: Trees, ways: Sequence[Way], cell: Cell, model: Path, vocabulary: int, scratch: Path, seconds: float
) -> Outcome:
    """Every way's cluster is up, and the others' rest, while one is measured."""
    device = SimulatedDevice(step_seconds=cell.step_ms / 1e3, blocks=BLOCKS, vocabulary=vocabulary)
    options = {
        "model": str(model),
        "simulated": device,
        "tensor_parallel_size": cell.tensor_parallel,
        "max_num_seqs": cell.batch,
        "max_num_batched_tokens": BUDGET,
        "max_model_len": MODEL_LEN,
    }
    measure = partial(one_round, seconds, np.random.default_rng(cell[:3]))
    try:
        await trees.start(ways, scratch, options)
        orders = dict.fromkeys(trees.names, cell)
        trees.take(orders, partial(one_round, min(seconds, 0.2), np.random.default_rng(0)), rounds=1)  # warms up
        outcome = trees.take(orders, measure, trees.rounds)
    finally:
        folders = await trees.stop()
    show(trees, cell, outcome)
    parts_told(trees, cell, {name: spent.read(folders[name]) for name in outcome.rounds})
    return outcome


def show(trees: Trees, cell: Cell, outcome: Outcome) -> None:
    keys = [key for result in outcome.rounds.values() for key in result[0]]
    where = {"step_ms": cell.step_ms, "batch": cell.batch, "tensor_parallel": cell.tensor_parallel}
    trees.record(
        "decode", outcome, keys, "tpot_ms", **where, style="plain" if cell.style is None else cell.style.name.lower()
    )
    rows = []
    for name in outcome.rounds:
        figures = outcome.figures(name)
        ratio = f"×{short(outcome.ratio(name, 'tpot_ms', OURS))}" if trees.compares(outcome) else "-"
        cells = [cell_of(figures) for cell_of in COLUMNS.values()]
        rows.append((name, [*cells[:2], ratio, *cells[2:]]))
    heads = list(COLUMNS)
    trees.output.table(str(cell), [*heads[:2], "times ours", *heads[2:]], rows)
    if not outcome.is_quiet:
        trees.output.say(f"  foreign processes took up to {outcome.foreign_cores:.2f} cores in these rounds")


def parts_told(trees: Trees, cell: Cell, result: Mapping[str, Mapping[str, float]]) -> None:
    """Where the core's time goes."""
    parts = [part for part in (*spent.PARTS, spent.REST) if any(part in each for each in result.values())]
    for name, each in result.items():
        us = {part.replace(" ", "_") + "_us": each[part] for part in parts if part in each}
        trees.output.record("core_parts", name, cell=str(cell), **us)
    rows = [(name, [short(each[part]) if part in each else "-" for part in parts]) for name, each in result.items()]
    trees.output.table(f"The core's time in a step, µs, medians of its parts; {cell}", parts, rows)
