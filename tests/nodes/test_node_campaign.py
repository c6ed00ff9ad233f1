"""A node is killed, stopped, cut off and slowed down under streams, again and again: every answer is exact."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator

import pytest

from penstock.engine.client.client import Client
from penstock.engine.cluster.migration_counters import MigrationCounters
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.protocol.messages import SamplingParams
from tests import tiers
from tests.crash.test_engine_migration import Reader, counted, migrations
from tests.support.engine import PATIENCE, START, prompt
from tests.support.loops import in_a_loop
from tests.support.nodes import DIRECTIONS, REMOTE, TwoNodes, has_namespaces, two_nodes

pytestmark = pytest.mark.skipif(not has_namespaces(), reason="unshare --pid is not permitted here")

STREAMS = 64
NOTICED_WITHIN = 10.0  # seconds, of a machine that does much else; what it takes is printed
BLOWS = (
    *("node", "core", "worker", "uplink", "stop", "cut out", "delay", "cut", "cut back"),
    *("reset", "flip out", "flip back"),
)


class Campaign:
    def __init__(self, engine: TwoNodes, client: Client, seed: int) -> None:
        self.engine, self.client = engine, client
        self.chance = random.Random(seed)
        self.answered = 0
        self.is_over = False
        self.noticed: dict[str, list[float]] = {}

    async def keep_streaming(self) -> None:
        while not self.is_over:
            ids, tokens = prompt(), self.chance.randrange(50, 600)
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            reader = Reader(await self.client.submit(ids, params), ids, tokens)
            await reader.done
            assert reader.ids == self.engine.rule.answer(ids, tokens)
            self.answered += 1

    async def strike(self, blow: str) -> None:
        """Strikes, and waits until the node serves again."""
        engine, began = self.engine, time.monotonic()
        if blow == "delay":
            engine.relay.delay_s = 0.2
            await asyncio.sleep(self.chance.uniform(0.1, 0.5))
            engine.relay.delay_s = 0.0
            return
        if blow == "reset" or blow.startswith("flip"):
            resumed = engine.number(StatusBoard.LINK_RESUMPTIONS, REMOTE)
            if blow == "reset":
                engine.relay.reset()
            else:
                engine.relay.flips[DIRECTIONS[blow.split()[1]]] = 1
            await engine.until(lambda: engine.number(StatusBoard.LINK_RESUMPTIONS, REMOTE) > resumed, NOTICED_WITHIN)
            self.noticed.setdefault(blow, []).append(time.monotonic() - began)
            return
        before = engine.number(StatusBoard.SERVING, REMOTE)
        async with self._blow(blow):
            await engine.until(lambda: engine.number(StatusBoard.SERVING, REMOTE) != before, NOTICED_WITHIN)
            self.noticed.setdefault(blow, []).append(time.monotonic() - began)
        await engine.until(lambda: engine.number(StatusBoard.SERVING, REMOTE) > before, START)

    @contextlib.asynccontextmanager
    async def _blow(self, blow: str) -> AsyncIterator[None]:
        remote, link = self.engine.remote, self.engine.relay
        if blow == "node":
            remote.kill()
        elif blow == "stop":
            remote.signal(signal.SIGSTOP)
        elif blow.startswith("cut"):
            link.cut(*(DIRECTIONS[name] for name in blow.split()[1:] or DIRECTIONS))
        else:
            os.kill(remote.pid_of(blow), signal.SIGKILL)
        yield
        if blow == "node":
            remote.start()
        remote.signal(signal.SIGCONT)
        link.is_cut = [False, False]


@pytest.mark.timeout(3600)
@in_a_loop
async def test_streams_stay_exact_whatever_happens_to_a_node(seed: int) -> None:
    options = {"migration_limit": 10_000, "max_model_len": 1024}
    async with two_nodes(**options) as engine, Client(engine.launcher.cluster, 0) as client:
        campaign = Campaign(engine, client, seed)
        streams = [asyncio.ensure_future(campaign.keep_streaming()) for _ in range(STREAMS)]
        order = [BLOWS[number % len(BLOWS)] for number in range(tiers.NODE_BLOWS)]
        campaign.chance.shuffle(order)
        for blow in order:
            await campaign.strike(blow)
            assert not any(stream.done() for stream in streams), "a stream has failed"
            await asyncio.sleep(campaign.chance.uniform(0.0, 0.3))
        campaign.is_over = True
        await asyncio.wait_for(asyncio.gather(*streams), START + PATIENCE)
        assert counted(client, MigrationCounters.GIVEN_UP) == 0 and set(migrations(client)) <= {"died"}
        for group in range(2):
            await engine.must_be_empty(group)
        print(f"{campaign.answered} answers, all exact")
        for blow, seconds in sorted(campaign.noticed.items()):
            print(f"{blow:9} {len(seconds):3} times, noticed after {min(seconds):.3f} to {max(seconds):.3f} s")
