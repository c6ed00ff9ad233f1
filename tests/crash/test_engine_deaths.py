"""Every kind of process of the engine is killed and stopped under load: requests are told where they are not to be
resumed (`test_engine_migration` has those that are), and the group serves again.

How long it took is written to the test's output; what is asserted leaves room for a busy machine.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from penstock.command_signals import REPEAT_S
from penstock.engine.client.client import Client
from penstock.engine.cluster import logs
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.engine.launcher.launcher import Launcher
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import SamplingParams
from tests import tiers
from tests.conftest import eventually
from tests.support.engine import PATIENCE, SHAPE, START, Running, answered, fate, prompt, running, simulated_device
from tests.support.loops import in_a_loop
from tests.support.processes import state_of

TOLD_WITHIN = 2.0  # seconds; the goal is 0.1 on a machine that has nothing else to do
OPEN = 12  # requests, when the blow falls
MEMBERS = [("core", 0), *tiers.only_in_all(("worker", 0)), ("worker", 1), ("output", 0)]


async def load(client: Client, tokens: int) -> list[asyncio.Future[tuple[float, Exception | None]]]:
    """Requests that are being answered."""
    fates = [asyncio.ensure_future(fate(client, prompt(), tokens)) for _ in range(OPEN)]
    while client.open_requests < OPEN:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    return fates


async def must_be_told(fates: list[asyncio.Future], since: float, what: str) -> None:
    ends = await asyncio.wait_for(asyncio.gather(*fates), PATIENCE)
    after = max(at for at, _ in ends) - since
    print(f"{what}: all {len(ends)} were told within {after * 1e3:.1f} ms: {ends[0][1]}")
    for _, error in ends:
        assert error is not None and error.status == 503 and "died" in error.reason
    assert after < TOLD_WITHIN


async def must_serve_again(engine: Running, client: Client) -> None:
    await engine.serving_again(client)
    ids = prompt()
    assert (await answered(client, ids, max_tokens=20))[0][0] == engine.rule.answer(ids, 20)
    await engine.must_be_empty()


@pytest.mark.parametrize(("kind", "index"), MEMBERS)
@in_a_loop
async def test_death_of_a_process_fails_its_requests_and_its_group_restarts(kind: str, index: int) -> None:
    async with running(**SHAPE, migration_limit=0) as engine, Client(engine.launcher.cluster, 0) as client:
        fates = await load(client, 4000)
        others = {child.pid for child in engine.children()}
        loop, victim = asyncio.get_running_loop(), engine.child(kind, index)
        began = loop.time()
        os.kill(victim.pid, signal.SIGKILL)
        await must_be_told(fates, began, f"{kind} {index} killed")
        await must_serve_again(engine, client)
        left = others & {child.pid for child in engine.children()}
        if kind == "output":  # it is started again alone
            await engine.until(lambda: len(engine.children()) == len(others))
            assert left == others - {victim.pid}
        else:
            assert not left, "somebody of the old group is still there"


@pytest.mark.parametrize(("kind", "index"), MEMBERS)
@in_a_loop
async def test_one_of_a_group_is_stopped_for_a_while_and_nothing_is_lost(kind: str, index: int) -> None:
    """And then for too long: it is killed, and all goes on as after a death."""
    options = {**SHAPE, "step_timeout": 2.0, "migration_limit": 0}
    async with running(**options) as engine, Client(engine.launcher.cluster, 0) as client:
        victim = engine.child(kind, index)
        fates = await load(client, 200)
        os.kill(victim.pid, signal.SIGSTOP)
        await asyncio.sleep(0.3)
        os.kill(victim.pid, signal.SIGCONT)
        assert {error for _, error in await asyncio.wait_for(asyncio.gather(*fates), PATIENCE)} == {None}
        fates = await load(client, 4000)
        os.kill(victim.pid, signal.SIGSTOP)
        began = asyncio.get_running_loop().time()
        await must_be_told(fates, began + engine.config.step_timeout, f"{kind} {index} stopped")
        await must_serve_again(engine, client)


# ── servers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def serve(cluster: Cluster, me: ProcessId) -> None:
    """Asks for ever, until SIGTERM; and then until what is open is answered."""

    async def ask(client: Client) -> None:
        with contextlib.suppress(Exception):
            await answered(client, prompt(), max_tokens=150, ignore_eos=True)

    async def life() -> None:
        is_over = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_over.set)
        async with Client(cluster, me) as client:
            open_requests = {asyncio.ensure_future(ask(client)) for _ in range(4)}
            while not is_over.is_set():
                done, open_requests = await asyncio.wait(
                    open_requests, timeout=0.1, return_when=asyncio.FIRST_COMPLETED
                )
                await asyncio.sleep(0.01)
                open_requests |= {asyncio.ensure_future(ask(client)) for _ in done}
            await asyncio.wait(open_requests)

    asyncio.run(life())


@in_a_loop
async def test_a_server_is_killed_or_stopped_and_the_others_do_not_notice() -> None:
    async with running(serve, api_server_count=2, step_timeout=2.0, **SHAPE) as engine:
        core = engine.child("core").pid
        for number in (signal.SIGKILL, signal.SIGSTOP):
            await engine.until(lambda: engine.number(StatusBoard.OPEN) == 8)
            victim = engine.child("server", 1)
            os.kill(victim.pid, number)
            await engine.until(lambda: engine.number(StatusBoard.OPEN) <= 4)  # its requests are forgotten, or answered
            await engine.until(lambda gone=victim.pid: gone not in {child.pid for child in engine.children()})
            await engine.until(lambda: engine.number(StatusBoard.OPEN) == 8, START)  # its successor asks, too
            assert engine.child("server", 1).pid != victim.pid and engine.child("core").pid == core


# ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────────────
async def live(shutdown_timeout: float) -> None:
    logs.configure("launcher", "text")
    config = EngineConfig(
        simulated=simulated_device(step_seconds=0.01), shutdown_timeout=shutdown_timeout, api_server_count=2
    )
    launcher = Launcher(config, serve)
    running = asyncio.ensure_future(launcher.run())
    await asyncio.sleep(0)
    await launcher.serving(START)
    while launcher.board.row(0)[StatusBoard.OPEN] < 8:
        await asyncio.sleep(0.005)
    print("pids", *(child.pid for unit in launcher.units for child in unit.children.values()), flush=True)
    await running


@contextlib.contextmanager
def tree_of_its_own(shutdown_timeout: float = 20.0):
    code = f"import asyncio, tests.crash.test_engine_deaths as t; asyncio.run(t.live({shutdown_timeout}))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("pids "), line + process.stderr.read()
        pids = [int(word) for word in line.split()[1:]]
        yield process, pids
        eventually(lambda: all(state_of(pid) in ("", "Z") for pid in pids), within=PATIENCE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_sigterm_drains_and_ends_in_order() -> None:
    with tree_of_its_own() as (process, _):
        process.terminate()
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert 'event="cluster stopped" killed=none' in err and "level=error" not in err, err


def test_second_sigterm_stops_the_launcher_at_once() -> None:
    with tree_of_its_own(shutdown_timeout=60.0) as (process, pids):
        os.kill(pids[-1], signal.SIGSTOP)  # a server, which will not end by itself
        process.terminate()
        time.sleep(REPEAT_S + 0.2)
        began = time.monotonic()
        process.terminate()
        _, err = process.communicate(timeout=PATIENCE)
        assert time.monotonic() - began < 10 and process.returncode == 0, err


def test_killed_launcher_leaves_no_process() -> None:
    with tree_of_its_own() as (process, pids):
        assert len(pids) >= 5
        process.kill()
        process.wait()


@in_a_loop
async def test_request_is_refused_without_a_group_or_while_the_server_drains() -> None:
    async with (
        running(output_processors=0, migration_limit=0) as engine,
        Client(engine.launcher.cluster, 0) as client,
    ):
        os.kill(engine.child("core").pid, signal.SIGKILL)
        await engine.until(lambda: engine.number(StatusBoard.SERVING) == 0)
        with pytest.raises(Exception, match="no group of the engine serves now"):
            await client.submit(prompt(), SamplingParams())
        await must_serve_again(engine, client)
        engine.launcher.board.drain()
        with pytest.raises(Exception, match="accepts no more requests"):
            await client.submit(prompt(), SamplingParams())
