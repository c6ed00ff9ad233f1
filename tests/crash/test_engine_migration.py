"""Processes of the engine are killed under streams that go on: each answer is what it is without a death.

The simulated device's rule says what that is. `test_engine_deaths` has what is told where requests are not resumed.
"""

import asyncio
import os
import signal
from typing import Any

import numpy as np
import pytest

from penstock.engine.client.client import Client, ImageInput
from penstock.engine.client.stream import OutputStream
from penstock.engine.cluster.migration_counters import MIGRATION_CAUSES, MigrationCounters
from penstock.engine.protocol.messages import FinishReason, SamplingParams
from tests import tiers
from tests.support.engine import PATIENCE, SHAPE, START, Running, prompt, running
from tests.support.loops import in_a_loop

OPEN = 12  # requests, when the blow falls
TOKENS = 300


class Reader:
    """Reads a stream, and has what has come so far."""

    def __init__(self, stream: OutputStream, ids: Any, tokens: int) -> None:
        self.stream, self.prompt, self.tokens = stream, ids, tokens
        self.ids: list[int] = []
        self.reasons: list[FinishReason] = []
        self.done = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for piece in self.stream:
            self.ids += piece.ids
            if piece.reason is not None:
                self.reasons.append(piece.reason)


async def readers(client: Client, many: int = OPEN, tokens: int = TOKENS, **options: Any) -> list[Reader]:
    """Requests of which each has had a token."""
    started = []
    for _ in range(many):
        ids = prompt()
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        started.append(Reader(await client.submit(ids, params, **options), ids, tokens))
    while not all(reader.ids for reader in started):
        await asyncio.sleep(0.002)
    return started


async def require_exact(engine: Running, started: list[Reader]) -> None:
    await asyncio.wait_for(asyncio.gather(*(reader.done for reader in started)), START + PATIENCE)
    for reader in started:
        assert reader.ids == engine.rule.answer(reader.prompt, reader.tokens)
        assert reader.reasons == [FinishReason.LENGTH] and reader.stream.completion_tokens == reader.tokens


def mean_pause(client: Client, group: int = 0) -> float:
    words = client.counters[group].words
    return MigrationCounters.PAUSE.sum_of(words) / sum(MigrationCounters.PAUSE.counts(words))


def counted(client: Client, word: int) -> int:
    return sum(counters[word] for counters in client.counters)


def migrations(client: Client) -> dict[str, int]:
    numbers = {cause: counted(client, MigrationCounters.MIGRATIONS + at) for at, cause in enumerate(MIGRATION_CAUSES)}
    return {cause: number for cause, number in numbers.items() if number}


def kill(engine: Running, kind: str, index: int = 0, group: int = 0) -> None:
    (victim,) = [
        child
        for child in engine.children()
        if (child.member.kind, child.member.group, child.member.index) == (kind, group, index)
    ]
    os.kill(victim.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "kind", ["core", *(pytest.param(kind, marks=tiers.needs_all) for kind in ("worker", "output"))]
)
@in_a_loop
async def test_streams_go_on_in_the_other_group_when_a_process_is_killed(kind: str) -> None:
    async with running(data_parallel_size=2, **SHAPE) as engine, Client(engine.launcher.cluster, 0) as client:
        started = await readers(client)
        lost = started[0].stream.group
        of_the_group = sum(reader.stream.group == lost for reader in started)
        kill(engine, kind, group=lost)
        await require_exact(engine, started)
        assert migrations(client) == {"output" if kind == "output" else "died": of_the_group}
        print(f"{kind}: a mean pause of {mean_pause(client, lost):.3f} s")
        await engine.serving_again(client)
        for group in range(2):
            await engine.must_be_empty(group)


@in_a_loop
async def test_images_go_on_in_the_store_and_inline_when_a_worker_is_killed() -> None:
    """The simulated device reads them when their request joins."""
    async with running(store_nbytes=16 << 20, **SHAPE) as engine, Client(engine.launcher.cluster, 0) as client:
        images = [
            ImageInput({"pixel_values": np.full(100_000, 7.0, np.float32)}, 1, 2, bytes(31) + b"a"),
            ImageInput({"pixel_values": np.full(20, 8.0, np.float32)}, 4, 2),
        ]
        started = await readers(client, 3, values=images)
        kill(engine, "worker")
        await asyncio.wait_for(asyncio.gather(*(reader.done for reader in started)), START + PATIENCE)
        assert [len(reader.ids) for reader in started] == [TOKENS] * 3
        without = Reader(
            await client.submit(started[0].prompt, SamplingParams(max_tokens=TOKENS, ignore_eos=True), values=images),
            started[0].prompt,
            TOKENS,
        )
        await asyncio.wait_for(without.done, PATIENCE)
        assert without.ids == started[0].ids
        store = engine.launcher.cluster.store
        assert store is not None
        await engine.until(lambda: not any(item.holders for item in store.stats().items))
