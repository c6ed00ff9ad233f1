"""The engine of a replica of Ray Serve, without Ray: it starts, says its load, and ends with whatever holds it."""

import asyncio
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httptools")

from penstock.integrations.ray_serve.engine_process import NO_LOAD, EngineEnded, EngineProcess
from penstock.server.status.snapshot import ProcessView
from penstock.server.status.snapshot_reader import SnapshotReader
from tests.support.loops import in_a_loop

WITHIN = 60.0  # seconds
SLACK = 5.0  # seconds; of a refusal on a busy machine
SIMULATED = ("--device-model=simulated", "--step-ms=20", "--max-num-seqs=4")


def run(scene: Callable[[], Awaitable[None]]) -> None:
    async def within_time() -> None:
        await asyncio.wait_for(scene(), WITHIN)

    asyncio.run(within_time())


def child_of(pid: int, program: str) -> int:
    """Returns the only child of the process's main thread with that word in its command line."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (child,) = [child for child in children if program in Path(f"/proc/{child}/cmdline").read_text()]
    return int(child)


def answered(url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=WITHIN) as response:
        load: dict[str, Any] = json.load(response)
        return load


@in_a_loop
async def test_engine_reports_its_load_and_answers_open_requests_when_stopped() -> None:
    engine = EngineProcess(SIMULATED, shutdown_timeout=20)
    assert engine.load() == NO_LOAD
    try:
        url = await engine.wait_until_serving()
        idle = engine.load()
        assert (idle.serving_groups, idle.open, idle.load) == (1, 0, 0.0) and idle.free_blocks == idle.blocks > 0
        body = {"prompt": ["a", "b"], "max_tokens": 60, "ignore_eos": True}
        answer = asyncio.get_running_loop().run_in_executor(None, answered, url, "/v1/completions", body)
        while (load := engine.load()).running < 2:
            await asyncio.sleep(0.005)
        assert load.load == (load.running + load.waiting) / 4
    finally:
        await engine.stop()
    assert len((await answer)["choices"]) == 2
    assert engine.ended.result().startswith("exited with status 0") and engine.load() == NO_LOAD


@pytest.mark.parametrize("victim", ["launcher", "keeper"])
@in_a_loop
async def test_the_end_of_an_engine_is_told_at_once(victim: str) -> None:
    engine = EngineProcess(SIMULATED, shutdown_timeout=20)
    try:
        await engine.wait_until_serving()
        keeper = child_of(os.getpid(), "engine_keeper.py")
        launcher = child_of(keeper, "penstock")
        pids = [process.pid for process in SnapshotReader(launcher).take().processes]
        os.kill(launcher if victim == "launcher" else keeper, signal.SIGKILL)
        end = await engine.ended
        assert end.startswith(
            "killed by SIGKILL\n" if victim == "launcher" else "the keeper has ended: killed by SIGKILL"
        )
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            await asyncio.sleep(0.01)
    finally:
        await engine.stop()


@in_a_loop
async def test_an_engine_that_cannot_start_says_why() -> None:
    engine = EngineProcess(("/nowhere/at/all",), shutdown_timeout=1)
    with pytest.raises(EngineEnded, match=r"exit status 2\n.*/nowhere/at/all"):
        await engine.wait_until_serving()
    await engine.stop()


def workers(launcher: int) -> list[ProcessView]:
    return [process for process in SnapshotReader(launcher).take().processes if process.role == "worker"]


def refusal(url: str, body: dict[str, Any]) -> tuple[int, str | None, dict[str, Any], float]:
    """Returns status, Retry-After, error and seconds of a request that is refused."""
    began = time.monotonic()
    with pytest.raises(urllib.error.HTTPError) as caught:
        answered(url, "/v1/completions", body)
    error = json.load(caught.value)["error"]
    return caught.value.code, caught.value.headers["Retry-After"], error, time.monotonic() - began


@in_a_loop
async def test_engine_that_restarts_refuses_new_requests_and_keeps_open_ones() -> None:
    """The next worker is stopped while it starts: no group serves until it goes on."""
    timeout = 1.0
    body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True}
    loop = asyncio.get_running_loop()
    engine = EngineProcess((*SIMULATED, f"--queue-timeout={timeout}"), shutdown_timeout=20)
    try:
        url = await engine.wait_until_serving()
        launcher = child_of(child_of(os.getpid(), "engine_keeper.py"), "penstock")
        (first,) = workers(launcher)
        opened = loop.run_in_executor(None, answered, url, "/v1/completions", body)
        while not engine.load().running:
            await asyncio.sleep(0.005)
        os.kill(first.pid, signal.SIGKILL)
        while (successor := workers(launcher)[0]).pid in (0, first.pid):
            await asyncio.sleep(0.005)
        os.kill(successor.pid, signal.SIGSTOP)
        try:
            while engine.load().waiting != 1:  # the open request
                await asyncio.sleep(0.005)
            refused = [loop.run_in_executor(None, refusal, url, body) for _ in range(3)]
            while (load := engine.load()).waiting != 4:
                await asyncio.sleep(0.005)
            assert load.serving_groups == 0 and load.load == 1.0
            for status, retry_after, error, seconds in await asyncio.gather(*refused):
                assert (status, retry_after) == (503, "1") and "--queue-timeout" in error["message"]
                assert timeout <= seconds < timeout + SLACK
            assert engine.load().waiting == 1 and not opened.done()
        finally:
            os.kill(successor.pid, signal.SIGCONT)
        assert (await opened)["usage"]["completion_tokens"] == 100
        assert len((await loop.run_in_executor(None, answered, url, "/v1/completions", body))["choices"]) == 1
    finally:
        await engine.stop()
