"""Processes of an engine are killed beside the fork server that forks their next life, or with it."""

import asyncio
import contextlib
import os
import random
import re
import signal
from pathlib import Path

import pytest

from penstock.engine.client.client import Client
from penstock.engine.cluster.status_board import StatusBoard
from tests import tiers
from tests.support.engine import SHAPE, START, Running, answered, prompt, running
from tests.support.loops import in_a_loop

PROCESSES = 4  # of a group with SHAPE
TOKENS = 20
SETTLED = 5  # deaths before the first count of what the launcher holds
MAX_GROWTH_KIB = 4096


def starts(engine: Running) -> dict[str, int]:
    return {way: engine.number(word) for way, word in StatusBoard.STARTS.at.items()}


def fork_server_pid(engine: Running) -> int | None:
    server = engine.launcher.fork_server
    assert server is not None
    return server._server.process.pid if server._server is not None and server._server.is_ready else None


async def must_answer(engine: Running, client: Client) -> None:
    ids = prompt()
    ((actual, _),) = await answered(client, ids, max_tokens=TOKENS, ignore_eos=True)
    assert actual == engine.rule.answer(ids, TOKENS)


async def kill_group(engine: Running, client: Client, pids: list[int]) -> None:
    """Kills these processes at once, and waits for the next life of the group."""
    before = engine.number(StatusBoard.SERVING)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    await engine.until(lambda: engine.number(StatusBoard.SERVING) > before, START)
    await engine.serving_again(client)


@in_a_loop
async def test_all_lives_of_a_group_are_forked(quick_restarts: None) -> None:
    async with running(**SHAPE) as engine, Client(engine.launcher.cluster, 0) as client:
        assert starts(engine) == {"forked": PROCESSES, "spawned": 0}
        for child in engine.children():
            status = Path(f"/proc/{child.pid}/status").read_text()
            assert re.search(rf"PPid:\t{os.getpid()}\n", status) and re.search(r"SigBlk:\t0+\n", status)
        await kill_group(engine, client, [engine.child("worker").pid])
        assert starts(engine) == {"forked": 2 * PROCESSES, "spawned": 0}
        await must_answer(engine, client)


@in_a_loop
async def test_group_that_dies_with_the_fork_server_is_spawned_then_forked(quick_restarts: None) -> None:
    async with running(**SHAPE) as engine, Client(engine.launcher.cluster, 0) as client:
        pid = fork_server_pid(engine)
        assert pid is not None
        await kill_group(engine, client, [pid, engine.child("core").pid])
        assert starts(engine)["spawned"] > 0
        await must_answer(engine, client)
        await engine.until(lambda: fork_server_pid(engine) is not None, START)
        before = starts(engine)
        await kill_group(engine, client, [engine.child("core").pid, engine.child("output").pid])
        after = starts(engine)
        assert after["spawned"] == before["spawned"]
        # The launcher may have started the output processor again before it saw the end of the core.
        assert after["forked"] - before["forked"] in (PROCESSES, PROCESSES + 1)
        await must_answer(engine, client)


@in_a_loop
async def test_planned_migration_forks_from_another_fork_server(quick_restarts: None) -> None:
    async with running(**SHAPE) as engine:
        pid = fork_server_pid(engine)
        engine.launcher.migrate()
        await engine.until(lambda: engine.number(StatusBoard.SERVING) == 2, START)
        assert fork_server_pid(engine) not in (None, pid)
        assert starts(engine) == {"forked": 2 * PROCESSES, "spawned": 0}


@in_a_loop
async def test_engine_without_fork_server_spawns_all(quick_restarts: None) -> None:
    async with running(**SHAPE, fork_server="off") as engine:
        assert starts(engine) == {"forked": 0, "spawned": PROCESSES}


def holdings() -> tuple[int, int]:
    """Returns descriptors of this process, and KiB of memory that no other process has. A pipe counts once: a process
    that wakes its own receiver opens the receiver's pipe a second time, and keeps it."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the list
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    pipes = [link for link in links if link.startswith("pipe:")]
    rollup = Path("/proc/self/smaps_rollup").read_text()
    private = sum(map(int, re.findall(r"^Private_(?:Clean|Dirty): +(\d+) kB", rollup, re.MULTILINE)))
    return len(links) - len(pipes) + len(set(pipes)), private


async def holdings_of_a_forked_life(engine: Running, client: Client) -> tuple[int, int]:
    """For a spawned process the launcher has two more descriptors."""
    await engine.until(lambda: fork_server_pid(engine) is not None, START)
    await kill_group(engine, client, [engine.child("core").pid])
    await asyncio.sleep(0.1)
    return holdings()


@pytest.mark.timeout(tiers.limit(3600.0, 20_000.0))
@in_a_loop
async def test_kills_leave_the_launcher_as_it_was(seed: int, quick_restarts: None) -> None:
    """The fork server is among the victims."""
    chance = random.Random(seed)
    async with running(**SHAPE) as engine, Client(engine.launcher.cluster, 0) as client:
        for death in range(SETTLED + tiers.FORK_DEATHS):
            if death == SETTLED:
                descriptors, private = await holdings_of_a_forked_life(engine, client)
            victims = [engine.child(chance.choice(("core", "worker"))).pid]
            pid = fork_server_pid(engine)
            if pid is not None and chance.random() < 0.2:
                victims.append(pid)
            await kill_group(engine, client, victims)
        await must_answer(engine, client)
        after = await holdings_of_a_forked_life(engine, client)
        assert after[0] <= descriptors, f"{after[0] - descriptors} more descriptors"
        assert after[1] <= private + MAX_GROWTH_KIB, f"{after[1] - private} KiB more"
