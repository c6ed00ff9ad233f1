"""Streams of many clients beside signals from outside, and beside a client with requests that make the engine fail.

No stream ends with an error, and the pauses of streams are compared with the restarts of engines in the same run.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np
import pytest

pytest.importorskip("httptools")

from penstock.engine.client.stream import EngineError
from penstock.engine.cluster.migration_counters import MigrationCounters
from penstock.engine.protocol.sampling_params import SamplingParams
from tests import tiers
from tests.crash.migrating import Migrating, migrating
from tests.crash.poisoned import OTHERS, POISON, raises_early, raises_late
from tests.crash.test_blame import STEP_TIMEOUT, Life, with_lives
from tests.support.engine import START, simulated_device
from tests.support.loops import in_a_loop

ENGINES = 2
TOKENS = (150, 400)  # of a stream
STEP_SECONDS = 0.005
PAUSE_S = 0.25  # between two chunks of a stream: a longer gap is a pause
KINDS = ("worker", "core", "output")
MARGIN_S = 2.0  # of a busy machine


@dataclass
class Record:
    """What a campaign has seen, in seconds."""

    pauses: list[float] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)
    streams: int = 0
    errors: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        pauses, restarts = np.array(self.pauses or [0.0]), np.array(self.restarts or [0.0])
        p50, p99, median = np.percentile(pauses, 50), np.percentile(pauses, 99), np.median(restarts)
        return (
            f"{self.streams} streams, {len(self.errors)} errors, {len(self.pauses)} pauses: median {p50:.2f} s, p99 "
            f"{p99:.2f} s, longest {pauses.max():.2f} s; {len(self.restarts)} restarts: median {median:.2f} s, "
            f"longest {restarts.max():.2f} s"
        )


async def stream(engine: Migrating, record: Record, rng: random.Random) -> None:
    """Reads one stream, and compares the answer with the rule of the simulated device."""
    prompt, tokens = [rng.randrange(OTHERS) for _ in range(rng.randrange(1, 40))], rng.randrange(*TOKENS)
    ids: list[int] = []
    try:
        answer = await engine.engine_client.submit(
            prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), account="x"
        )
        last = time.monotonic()
        async for chunk in answer:
            now = time.monotonic()
            if now - last > PAUSE_S:
                record.pauses.append(now - last)
            last = now
            ids += chunk.ids
    except EngineError as error:
        record.errors.append(f"{error.status} {error.reason}")
        return
    record.streams += 1
    assert ids == engine.rule.answer(np.array(prompt, np.int32), tokens)


async def watch(engine: Migrating, record: Record) -> None:
    """Records how long each group does not serve."""
    lost: dict[int, float] = {}
    while True:
        now = time.monotonic()
        for group in range(ENGINES):
            if not engine.serving(group):
                lost.setdefault(group, now)
            elif group in lost:
                record.restarts.append(now - lost.pop(group))
        await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def streams(engine: Migrating, number: int, seed: int) -> AsyncIterator[Record]:
    """Keeps this number of streams open in the block, and lets them end after it."""
    record, is_over = Record(), asyncio.Event()

    async def client(index: int) -> None:
        rng = random.Random(seed + index)
        while not is_over.is_set():
            await stream(engine, record, rng)

    watching = asyncio.ensure_future(watch(engine, record))
    clients = [asyncio.ensure_future(client(index)) for index in range(number)]
    try:
        await engine.until(lambda: record.streams >= number)
        yield record
        is_over.set()
        await asyncio.gather(*clients)
    finally:
        for task in (watching, *clients):
            task.cancel()
        await asyncio.gather(watching, *clients, return_exceptions=True)
        print(record)


def blamed(engine: Migrating, word: int) -> int:
    return sum(counters[word] for counters in engine.engine_client.counters)


@pytest.mark.timeout(tiers.choose(240, 3000, 6000))
@in_a_loop
async def test_signals_from_outside_convict_no_request(seed: int) -> None:
    rng = random.Random(seed)
    simulated = simulated_device(step_seconds=STEP_SECONDS, vocabulary=1000)
    options = {"data_parallel_size": ENGINES, "migration_limit": 100}  # a stream is hit by many signals
    async with migrating(simulated=simulated, output_processors=1, **options) as engine:
        async with streams(engine, tiers.choose(16, 64, 64), seed) as record:
            for _ in range(tiers.BLAME_SIGNALS):
                await engine.until(lambda: all(map(engine.serving, range(ENGINES))), START)
                await asyncio.sleep(rng.uniform(0.1, 0.6))
                victims = [child for child in engine.children() if child.member.kind in KINDS]
                rng.choice(victims).signal(rng.choice((signal.SIGSEGV, signal.SIGABRT)))
                await engine.until(lambda: not all(map(engine.serving, range(ENGINES))), START)
        assert not record.errors, record.errors[:5]
        assert blamed(engine, MigrationCounters.TRIALS) == blamed(engine, MigrationCounters.CONVICTIONS) == 0


@pytest.mark.timeout(tiers.choose(240, 600, 6000))
@pytest.mark.parametrize("life", [raises_early, pytest.param(raises_late, marks=tiers.needs_all)])
@in_a_loop
async def test_client_that_fails_engines_costs_others_no_more_than_a_restart(life: Life, seed: int) -> None:
    """The client sends another prompt each time."""

    async def poison(engine: Migrating, number: int) -> int:
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        try:
            async for _ in await engine.engine_client.submit([number, POISON], params, account="poison"):
                pass
        except EngineError as error:
            return error.status
        return 200

    async with with_lives(life, data_parallel_size=ENGINES) as engine:
        async with streams(engine, tiers.choose(16, 64, 64), seed) as record:
            answers = []
            for number in range(tiers.BLAME_POISONS):
                answers.append(asyncio.ensure_future(poison(engine, number)))
                await asyncio.sleep(tiers.choose(3.0, 10.0, 10.0))
            statuses = await asyncio.gather(*answers)
        words = ("TRIALS", "TRIALS_REFUSED", "CONVICTIONS")
        print(statuses, {word: blamed(engine, getattr(MigrationCounters, word)) for word in words})
        assert not record.errors, record.errors[:5]
        assert set(statuses) <= {500, 503}, statuses
        assert blamed(engine, MigrationCounters.CONVICTIONS) == statuses.count(500) > 0
        longest = max(record.restarts)
        pauses = record.pauses or [0.0]  # the other engine may take a stream over in less than PAUSE_S
        assert np.percentile(pauses, 99) <= longest + STEP_TIMEOUT + MARGIN_S, str(record)


@pytest.mark.timeout(240)
@in_a_loop
async def test_convicted_prompt_is_refused_at_once_and_another_one_is_not() -> None:
    async with with_lives(raises_early) as engine:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        answer = await engine.engine_client.submit([1, POISON], params, account="a")
        with pytest.raises(EngineError) as caught:
            async for _ in answer:
                pass
        assert caught.value.status == 500, caught.value
        await engine.launcher.serving(START)
        incarnation = engine.serving(0)
        with pytest.raises(EngineError, match="not run again within") as caught:
            await engine.engine_client.submit([1, POISON], params, account="b")
        assert caught.value.status == 500 and blamed(engine, MigrationCounters.QUARANTINED) == 1
        async for _ in await engine.engine_client.submit([1, 2], params, account="a"):
            pass
        assert engine.serving(0) == incarnation
