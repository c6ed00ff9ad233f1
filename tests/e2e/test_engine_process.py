"""The engine of a replica of Ray Serve, without Ray: it starts, says its load, and ends with whatever holds it."""

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httptools")

from penstock.integrations.ray_serve.engine_process import NO_LOAD, EngineEnded, EngineProcess
from penstock.server.status.snapshot_reader import SnapshotReader

WITHIN = 60.0  # seconds
SIMULATED = ("--device-model=simulated", "--step-ms=20", "--max-num-seqs=4")


def run(scene: Callable[[], Awaitable[None]]) -> None:
    async def within_time() -> None:
        await asyncio.wait_for(scene(), WITHIN)

    asyncio.run(within_time())


def child_of(pid: int, program: str) -> int:
    """Returns the only child of the process's main thread with that word in its command line."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (found,) = [child for child in children if program in Path(f"/proc/{child}/cmdline").read_text()]
    return int(found)


def answered(url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=WITHIN) as response:
        said: dict[str, Any] = json.load(response)
        return said


def test_an_engine_says_its_load_and_answers_what_is_open_when_it_is_stopped() -> None:
    async def scene() -> None:
        engine = EngineProcess(SIMULATED, shutdown_timeout=20)
        assert engine.load() == NO_LOAD
        try:
            url = await engine.wait_until_serving()
            idle = engine.load()
            assert (idle.serving_groups, idle.open, idle.load) == (1, 0, 0.0) and idle.free_blocks == idle.blocks > 0
            body = {"prompt": ["a", "b"], "max_tokens": 60, "ignore_eos": True}
            asked = asyncio.get_running_loop().run_in_executor(None, answered, url, "/v1/completions", body)
            while (load := engine.load()).running < 2:
                await asyncio.sleep(0.005)
            assert load.load == (load.running + load.waiting) / 4
        finally:
            await engine.stop()
        assert len((await asked)["choices"]) == 2
        assert engine.ended.result().startswith("exited with status 0") and engine.load() == NO_LOAD

    run(scene)


@pytest.mark.parametrize("victim", ["launcher", "keeper"])
def test_the_end_of_an_engine_is_told_at_once(victim: str) -> None:
    async def scene() -> None:
        engine = EngineProcess(SIMULATED, shutdown_timeout=20)
        try:
            await engine.wait_until_serving()
            keeper = child_of(os.getpid(), "engine_keeper.py")
            launcher = child_of(keeper, "penstock")
            pids = [process.pid for process in SnapshotReader(launcher).take().processes]
            os.kill(launcher if victim == "launcher" else keeper, signal.SIGKILL)
            end = await engine.ended
            assert end.startswith("killed by SIGKILL\n" if victim == "launcher" else "the keeper was killed by SIGKILL")
            while any(Path(f"/proc/{pid}").exists() for pid in pids):
                await asyncio.sleep(0.01)
        finally:
            await engine.stop()

    run(scene)


def test_an_engine_that_cannot_start_says_why() -> None:
    async def scene() -> None:
        engine = EngineProcess(("/nowhere/at/all",), shutdown_timeout=1)
        with pytest.raises(EngineEnded, match=r"exited with status 2\n.*/nowhere/at/all"):
            await engine.wait_until_serving()
        await engine.stop()

    run(scene)
