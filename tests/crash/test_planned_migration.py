"""SIGHUP restarts the groups one after the other: open requests go on, and none is answered with an error."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from typing import Any

import pytest

from penstock.engine.client.client import Client
from penstock.engine.cluster.migration_counters import MIGRATION_CAUSES, MigrationCounters
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.verdict_board import Cause, VerdictBoard
from penstock.engine.launcher.launcher import Launcher
from penstock.engine.protocol.config import EngineConfig
from penstock.tools.inspect import all_processes
from tests import tiers
from tests.crash.test_output_lives import Answers
from tests.support.command import serving
from tests.support.engine import PATIENCE, START, Running, simulated_device
from tests.support.loops import in_a_loop

PLANNED = MigrationCounters.MIGRATIONS + MIGRATION_CAUSES.index("planned")


async def start(**options: Any) -> tuple[Launcher, asyncio.Future[Any]]:
    """Runs an engine as a command does, with handlers of signals. Returns when it serves."""
    launcher = Launcher(EngineConfig(simulated=simulated_device(), max_model_len=4096, **options))
    running = asyncio.ensure_future(launcher.run())
    await asyncio.sleep(0)
    await launcher.serving(START)
    return launcher, running


@pytest.mark.parametrize("groups", [pytest.param(1, marks=tiers.needs_all), 2])
@in_a_loop
async def test_groups_restart_one_after_the_other_and_every_answer_is_exact(groups: int) -> None:
    launcher, running = await start(data_parallel_size=groups)
    engine = Running(launcher)
    async with Client(launcher.cluster, 0) as client:
        verdicts = VerdictBoard(launcher.cluster.verdicts)
        pids = {child.pid for child in engine.children()}
        answers = Answers(engine, client, 12, 2000)
        await engine.until(lambda: sum(row[StatusBoard.RUNNING] for row in launcher.board.rows) == 12)
        os.kill(os.getpid(), signal.SIGHUP)
        least = groups
        while not launcher.board.cluster[StatusBoard.MIGRATIONS_ENDED]:
            least = min(least, sum(row[StatusBoard.SERVING] > 0 for row in launcher.board.rows))
            await asyncio.sleep(0.002)
        assert least == groups - 1
        assert [row[StatusBoard.SERVING] for row in launcher.board.rows] == [2] * groups
        await answers.must_be_exact()
        assert all(verdicts.verdict(group, 1).cause == Cause.PLANNED for group in range(groups))
        assert sum(counters[PLANNED] for counters in client.counters) >= 12
        assert not any(counters[MigrationCounters.GIVEN_UP] for counters in client.counters)
        assert not pids & {child.pid for child in engine.children()}
        for group in range(groups):
            await engine.must_be_empty(group)
        verdicts.close()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, PATIENCE)


@in_a_loop
async def test_migration_waits_for_a_group_and_one_more_is_queued() -> None:
    launcher, running = await start()
    engine = Running(launcher)
    engine.child("worker").signal(signal.SIGKILL)
    await engine.until(lambda: not engine.number(StatusBoard.SERVING))
    for _ in range(20):
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.01)
    await engine.until(lambda: launcher.board.cluster[StatusBoard.MIGRATIONS_ENDED] == 2, START)
    await asyncio.sleep(0.1)  # for a third one, which must not begin
    assert launcher.board.cluster[StatusBoard.MIGRATIONS_BEGUN] == 2 and engine.number(StatusBoard.SERVING) == 4
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, PATIENCE)


@in_a_loop
async def test_hangup_that_is_handled_before_a_pending_sigterm_begins_nothing() -> None:
    launcher, running = await start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGHUP})
    await asyncio.sleep(0.005)
    assert not launcher.board.cluster[StatusBoard.MIGRATIONS_BEGUN]
    await asyncio.wait_for(running, PATIENCE)


@in_a_loop
async def test_tree_that_ends_during_a_migration_leaves_nothing() -> None:
    launcher, running = await start()
    launcher.migrate()
    engine = Running(launcher)
    await engine.until(lambda: not engine.number(StatusBoard.SERVING))
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, PATIENCE)


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────
def migrate(pid: int) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "penstock", "migrate", str(pid)]
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * START)


@tiers.needs_all
def test_command_shows_the_progress_of_each_group_and_ends_well() -> None:
    with serving("--device-model", "simulated", "--data-parallel-size", "2") as (server, _):
        done = migrate(server.pid)
        assert done.returncode == 0, done.stderr
        lines = [re.sub(r"[\d.]+ s$", "N s", line) for line in done.stdout.splitlines()]
        assert lines == [
            "group 0 restarts after N s",
            "group 0 serves again after N s",
            "group 1 restarts after N s",
            "group 1 serves again after N s",
            "all groups have been restarted within N s",
        ]
        children = [process for process in all_processes().values() if process.parent == server.pid]
        oldest = sorted(children, key=lambda process: process.start)[:2]  # the resource tracker, and the server process
        refused = [migrate(child.pid) for child in oldest]
        assert [done.returncode for done in refused] == [2, 2]
        assert any(f"is no launcher: process {server.pid} is" in done.stderr for done in refused), refused
