"""Time to first token of requests that come one by one: to an engine that rests, and beside others that decode."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from bench.engine_cases.decoding import BLOCKS, BUDGET, MODEL_LEN, Trees
from bench.engine_cases.load import PROMPT, SHORT, Server, _end, until
from bench.engine_cases.trees import Way
from bench.harness.figures import Figures
from bench.harness.turns import Outcome
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.protocol.config import SimulatedDevice
from penstock.engine.protocol.messages import Style

PLACES = ((1, 0), (5, 256))  # ms of a step, and requests that decode beside
REQUESTS = 100
PAUSE = 0.005  # seconds on average; from one answer to the next request
SETTLED = 6  # tokens that each of the others has before
OTHERS = 1 << 30  # numbers of the others begin here

_numbers = itertools.count()


def ask_all(beside: int, requests: int, chance: np.random.Generator, server: Server, style: Style | None) -> Figures:
    first = OTHERS + next(_numbers) * (1 << 14)
    for number in range(first, first + beside):
        server.ask(number, chance.integers(0, server.vocabulary, PROMPT, np.int32), style)
    left = SETTLED * beside
    while left > 0:
        left -= server.receive().rows
    took = []
    for _ in range(requests):
        _pause(server, PAUSE * (0.5 + chance.random()), bool(beside))
        took.append(_first_token(server, next(_numbers), chance, style) * 1e6)
    if beside:
        _end(server, first, beside)
    until(lambda: server.row[StatusBoard.OPEN] == 0)
    return {"ttft_us": float(np.median(took)), "ttft_p90_us": float(np.percentile(took, 90))}


def _pause(server: Server, seconds: float, receives: bool) -> None:
    until_then = time.monotonic() + seconds
    if not receives:
        return time.sleep(seconds)
    while time.monotonic() < until_then:
        server.receive()
    return None


def _first_token(server: Server, number: int, chance: np.random.Generator, style: Style | None) -> float:
    """Seconds. Comes back when the request has ended."""
    prompt = chance.integers(0, server.vocabulary, PROMPT, np.int32)
    began, took = time.monotonic(), 0.0
    server.ask(number, prompt, style, SHORT)
    while True:
        delta = server.receive()
        rows = np.flatnonzero(delta.requests == number)
        if rows.size and not took:
            took = time.monotonic() - began
        if rows.size and delta.finished is not None and np.isin(rows, delta.finished.rows).any():
            return took


async def run_first(
    trees: Trees, ways: Sequence[Way], style: Style | None, requests: int, model: Path, vocabulary: int, scratch: Path
) -> None:
    outcomes: dict[str, Outcome] = {}
    for step_ms, beside in PLACES:
        options = {
            "model": str(model),
            "simulated": SimulatedDevice(step_seconds=step_ms / 1e3, blocks=BLOCKS, vocabulary=vocabulary),
            "max_num_seqs": beside + 1,
            "max_num_batched_tokens": BUDGET,
            "max_model_len": MODEL_LEN,
        }
        measure = partial(ask_all, beside, requests, np.random.default_rng(step_ms))
        try:
            await trees.start(
                [way for way in ways if not way.is_classic],
                scratch / str(step_ms),
                {**options, "tensor_parallel_size": 1},
            )
            orders = dict.fromkeys(trees.names, style)
            trees.take(orders, partial(ask_all, beside, 10, np.random.default_rng(0)), rounds=1)  # warms up
            outcome = outcomes[f"{step_ms} ms steps, beside {beside}"] = trees.take(orders, measure, trees.rounds)
        finally:
            await trees.stop()
        trees.record("first", outcome, ("ttft_us", "ttft_p90_us"), "ttft_us", step_ms=step_ms, beside=beside)
    show(trees, outcomes)


def show(trees: Trees, outcomes: Mapping[str, Outcome]) -> None:
    heads = [f"{place}: {what}" for place in outcomes for what in ("median", "p90")]
    rows = []
    for name in next(iter(outcomes.values())).rounds:
        result = [outcome.figures(name) for outcome in outcomes.values() if name in outcome.rounds]
        rows.append((name, [f"{each[key]:.0f}" for each in result for key in ("ttft_us", "ttft_p90_us")]))
    trees.output.table("Time to first token, us", heads, rows)
