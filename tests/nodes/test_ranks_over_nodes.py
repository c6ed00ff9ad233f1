"""A group with workers on two nodes answers like a group on one node, and restarts when either part is lost.

The simulated device's rule says what an answer is. The other node is in a pid namespace of its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from penstock.engine.client.client import Client
from penstock.engine.cluster.migration_counters import MigrationCounters
from penstock.engine.cluster.status_board import StatusBoard
from tests import tiers
from tests.crash.test_engine_migration import counted, migrations, readers, require_exact
from tests.support.engine import START
from tests.support.loops import in_a_loop
from tests.support.nodes import DIRECTIONS, TwoNodes, has_namespaces, two_nodes

pytestmark = pytest.mark.skipif(not has_namespaces(), reason="unshare --pid is not permitted here")

OPEN = 8  # requests, when the blow falls


async def require_restarted(engine: TwoNodes, client: Client) -> None:
    await engine.serving_again(client)
    await engine.must_be_empty()
    await require_exact(engine, await readers(client, OPEN, 5))


@in_a_loop
async def test_a_step_crosses_once_for_all_ranks_of_the_other_node() -> None:
    async with (
        two_nodes(spread=True, tensor_parallel_size=4) as engine,
        Client(engine.launcher.cluster, 0) as client,
    ):
        await require_exact(engine, await readers(client, OPEN))
        await engine.must_be_empty()
        steps = engine.number(StatusBoard.STEPS)
        engine.child("core").signal(signal.SIGKILL)
        await engine.until(lambda: engine.remote.events("link ended"))
        ended = engine.remote.events("link ended")[0]
        assert ended["frames_received"] == steps + 1  # and the first message, Begin
        assert ended["frames_sent"] == 2  # each rank over there is ready
        await require_restarted(engine, client)


@in_a_loop
async def test_requests_go_on_in_place_when_connections_are_reset() -> None:
    async with (
        two_nodes(spread=True, tensor_parallel_size=2) as engine,
        Client(engine.launcher.cluster, 0) as client,
    ):
        serving = engine.number(StatusBoard.SERVING)
        started = await readers(client, OPEN, 500)
        engine.relay.reset()
        await engine.until(lambda: engine.number(StatusBoard.LINK_RESUMPTIONS) > 0)
        await require_exact(engine, started)
        assert migrations(client) == {} and engine.number(StatusBoard.SERVING) == serving


@pytest.mark.parametrize(
    "blow", ["worker", *(pytest.param(blow, marks=tiers.needs_all) for blow in ("remote_core", "node", "stop", "cut"))]
)
@in_a_loop
async def test_requests_resume_when_the_other_node_loses_its_ranks(blow: str) -> None:
    async with (
        two_nodes(spread=True, tensor_parallel_size=2) as engine,
        Client(engine.launcher.cluster, 0) as client,
    ):
        started = await readers(client, OPEN, 2000)  # more than a busy machine computes before it notices
        processes, began = engine.remote.processes(), time.monotonic()
        if blow == "node":
            engine.remote.kill()
        elif blow == "stop":
            engine.remote.signal(signal.SIGSTOP)
        elif blow == "cut":
            engine.relay.cut(*DIRECTIONS.values())
        else:
            os.kill(engine.remote.pid_of(blow), signal.SIGKILL)
        await engine.until(lambda: engine.number(StatusBoard.SERVING) == 0)
        noticed = time.monotonic() - began
        print(f"{blow}: noticed after {noticed:.3f} s")
        assert noticed < 10.0  # of a machine that does much else
        if blow == "node":
            engine.remote.start()
        engine.remote.signal(signal.SIGCONT)
        engine.relay.is_cut = [False, False]
        await require_exact(engine, started)
        assert migrations(client) == {"died": OPEN}
        await require_restarted(engine, client)
        now = engine.remote.processes()
        assert not set(processes[3:]) & set(now), "all but the launcher, its tracker and its fork server"
        assert len(now) == len(processes)
        print(f"served again after {time.monotonic() - began:.3f} s")


@tiers.needs_all
@pytest.mark.parametrize("kind", ["core", "worker", "remote_ranks"])
@in_a_loop
async def test_workers_of_the_other_node_end_with_the_group_and_come_again(kind: str) -> None:
    async with (
        two_nodes(spread=True, tensor_parallel_size=2) as engine,
        Client(engine.launcher.cluster, 0) as client,
    ):
        started = await readers(client, OPEN, 500)
        before = engine.remote.pid_of("worker")
        child = engine.child(kind, 1 if kind == "remote_ranks" else 0)
        child.signal(signal.SIGKILL)
        await require_exact(engine, started)
        assert migrations(client) == {"died": OPEN}
        await require_restarted(engine, client)
        assert before not in engine.remote.processes()


@tiers.needs_all
@in_a_loop
async def test_requests_wait_for_a_node_that_drains_and_that_does_not_count() -> None:
    options = {"spread": True, "tensor_parallel_size": 2, "migration_limit": 1}
    async with two_nodes(**options) as engine, Client(engine.launcher.cluster, 0) as client:
        started = await readers(client, OPEN, 1000)
        status = await asyncio.to_thread(engine.remote.terminate)
        engine.remote.start()
        await require_exact(engine, started)
        assert status == 0 and migrations(client) == {"planned": OPEN}
        assert counted(client, MigrationCounters.GIVEN_UP) == 0
        engine.launcher.migrate()  # the home node restarts the group
        await engine.until(lambda: engine.launcher.board.cluster[StatusBoard.MIGRATIONS_ENDED] == 1, START)
        await require_restarted(engine, client)


@tiers.needs_all
@in_a_loop
async def test_a_node_that_computes_another_step_is_refused_in_words() -> None:
    options = {"spread": True, "tensor_parallel_size": 2, "joins": False}
    async with two_nodes({"block_size": 32, "max_num_seqs": 64}, **options) as engine:
        status = await asyncio.to_thread(engine.remote.process.wait, START)
        assert status == 1
        for option in ("block_size", "max_num_seqs"):
            assert option in engine.remote.log
