"""A server of two nodes: what the way to an engine of the other node adds to the first token.

Both engines are simulated, alike and behind the same server; the other node is on this machine, over the loopback. A
server routes prompts of one prefix to one engine: there is a prefix for each engine, and requests of both take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import statistics
import sys
from collections.abc import Iterator

import aiohttp

from bench.harness.output import short
from bench.harness.run import Run
from bench.harness.targets import Target
from bench.harness.turns import in_turn
from bench.nodes import ray_client
from bench.serve_cases.servers import Ours, Server, free_port
from penstock.engine.nodes.group_link import SECRET_NBYTES
from penstock.environment import NODE_SECRET

HOME, REMOTE = 0, 1  # groups
NAMES = {HOME: "engine at home", REMOTE: "engine of the other node"}
CONCURRENCIES = (1, 8)
REQUESTS, TOKENS = 48, 4  # requests to each engine in a round
STEP_MS = 5
TARGET_MS = 2.0
GENERATED = re.compile(r'^vllm:generation_tokens_total\{.*engine="(\d+)".*\} (\S+)$', re.MULTILINE)


@contextlib.contextmanager
def two_nodes(run: Run) -> Iterator[Ours]:
    """A server of two nodes that both serve."""
    os.environ.setdefault(NODE_SECRET.name, secrets.token_hex(SECRET_NBYTES))
    options = ["--device-model", "simulated", "--step-ms", str(STEP_MS), "--nnodes", "2"]
    options += ["--master-port", str(free_port())]
    command = [sys.executable, "-m", "penstock", "serve", *options, "--node-rank", "1", "--headless"]
    node = Server(command, {}, 0, run.scratch / "node.log")
    server = Ours.of(options, run.scratch / "home.log")
    try:
        server.wait_for_an_answer()
        server.wait_until_whole()
        yield server
    finally:
        server.stop()
        node.stop()


async def _prefixes(client: aiohttp.ClientSession, url: str) -> dict[int, str]:
    """Returns a prefix for each engine, by which the server routes to it."""

    async def generated() -> dict[int, float]:
        async with client.get(f"{url}/metrics") as response:
            return {int(engine): float(tokens) for engine, tokens in GENERATED.findall(await response.text())}

    result: dict[int, str] = {}
    before = await generated()
    while len(result) < len(NAMES):
        prefix = f"{secrets.token_hex(64)} "  # longer than what is compared
        await ray_client.complete(client, url, prefix, TOKENS)
        after = await generated()
        while after == before:  # the board is read once in a while
            after = await generated()
        group = next(group for group in after if after[group] != before.get(group))
        result[group], before = prefix, after
    return result


async def _round(server: Ours, concurrency: int, requests: int, turn: int) -> dict[int, float]:
    """Returns the median of each engine's times to the first token, in ms."""
    seconds: dict[int, list[float]] = {group: [] for group in NAMES}
    async with ray_client.session() as client:
        prefixes = await _prefixes(client, server.url)
        for number in range(requests // concurrency):
            for group in in_turn(list(NAMES), turn + number):
                prompts = [f"{prefixes[group]}{number} {stream}" for stream in range(concurrency)]
                answers = await asyncio.gather(
                    *(ray_client.complete(client, server.url, prompt, TOKENS) for prompt in prompts)
                )
                if errors := [answer.error for answer in answers if not answer.is_whole]:
                    raise RuntimeError(f"the {NAMES[group]} has not answered: {errors[0]}")
                seconds[group] += [answer.first_s for answer in answers]
    return {group: statistics.median(times) * 1e3 for group, times in seconds.items()}


def remote_group(run: Run) -> None:
    """The first token of an engine of the other node, beside that of an engine at home."""
    result: dict[int, list[dict[int, float]]] = {}
    with two_nodes(run) as server:
        for concurrency in CONCURRENCIES[:1] if run.is_quick else CONCURRENCIES:
            for turn in range(run.rounds):
                run.patience.wait_for_quiet()
                requests = 8 if run.is_quick else REQUESTS * concurrency
                result.setdefault(concurrency, []).append(asyncio.run(_round(server, concurrency, requests, turn)))
    run.results["remote-group"] = result
    rows = []
    for concurrency, rounds in result.items():
        medians = {group: statistics.median(item[group] for item in rounds) for group in NAMES}
        for group, name in NAMES.items():
            run.output.record("remote-group", name, concurrency=concurrency, ttft_ms=medians[group])
        added = added_ms(rounds)
        run.output.record("remote-group", "added", concurrency=concurrency, ms=added)
        rows.append((f"{concurrency} at a time", [*(short(medians[group]) for group in NAMES), short(added)]))
    run.output.table("First token of a server of two nodes, p50; ms", [*NAMES.values(), "added"], rows)


def added_ms(rounds: list[dict[int, float]]) -> float:
    return statistics.median(item[REMOTE] - item[HOME] for item in rounds)


CASES = {"remote-group": remote_group}


def targets(run: Run) -> Iterator[Target]:
    value = run.results.get("remote-group", {})
    for concurrency in CONCURRENCIES:
        rounds = value.get(concurrency)
        case = f"first token of the other node's engine over that of one at home, {concurrency} at a time"
        yield Target(case, TARGET_MS, "ms", added_ms(rounds) if rounds else None)
