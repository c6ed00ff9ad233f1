"""Processes that die, or cannot be made, while they start: before their unit has ever served, and after it has."""

import asyncio
import contextlib
import errno
import functools
import json
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("httptools")

from penstock.engine.cluster import logs
from penstock.engine.cluster.process import CannotStart, ChildProcess, starting
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.engine.launcher import back_off
from penstock.engine.launcher import launcher as launcher_module
from penstock.engine.launcher.launcher import ClusterFailed, Launcher
from penstock.engine.protocol.config import SHIPPED, EngineConfig
from penstock.engine.worker import worker
from penstock.server.chat.response_schema import EngineHealth, HealthResponse
from penstock.server.listening import listen
from penstock.server.options import ServerOptions
from penstock.server.server_launcher import ServerLauncher
from penstock.server.status import history_recorder
from tests import tiers
from tests.crash.start_lives import (
    FAILED,
    fails_while_it_starts_again,
    has_no_memory,
    import_and_pause,
    is_killed_after_a_while,
    wait_for_the_end,
)
from tests.e2e.test_server import Served, posted
from tests.e2e.test_server_descriptors import server_of
from tests.support.command import serving
from tests.support.engine import START, Running, running, simulated_device
from tests.support.loops import in_a_loop

Life = Callable[[Cluster, ProcessId], None]
KILLS = tiers.choose(10, 30, 300)


@contextlib.asynccontextmanager
async def tree_with(unit: int, kind: str, life: Life, **options: Any) -> AsyncIterator[Served]:
    """Groups and servers, of which processes of that kind in that unit live this life. Started, and may not serve."""
    config = EngineConfig(simulated=simulated_device(), max_model_len=4096, **options)
    server_options = ServerOptions(port=0)
    with contextlib.closing(listen(server_options)) as listener:
        port = listener.getsockname()[1]
        launcher = ServerLauncher(config, server_options, listener)
        parts = launcher.units[unit]._parts
        parts[:] = [(*part[:2], life) if part[0] == kind else part for part in parts]
        try:
            launcher.start()
            yield Served(launcher, port)
        finally:
            await launcher.stop()


# ── units that have served ───────────────────────────────────────────────────────────────────────────────────────────
@in_a_loop
async def test_group_that_has_served_restarts_until_it_serves_and_is_counted(
    quick_restarts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(back_off, "MIN_START_INTERVAL_S", 0.5)  # long enough for /health to show each count

    async def health(served: Served) -> list[EngineHealth]:
        return msgspec.json.decode((await served.get("/health"))[1], type=HealthResponse).groups

    async with tree_with(0, "worker", fails_while_it_starts_again, data_parallel_size=2) as served:
        await served.launcher.serving(START)
        next(child for child in served.children() if child.member == ProcessId("worker", 0, 0, 1)).signal(
            signal.SIGKILL
        )
        counted = set()
        while served.number(StatusBoard.SERVING, 0) != 2 + FAILED:
            assert not served.launcher.has_failed
            group, other = await health(served)
            counted.add(group.failed_starts)
            assert other.serves and other.failed_starts == 0
            await asyncio.sleep(0.01)
        assert counted >= {2, 3}, counted
        await served.launcher.serving(START)
        assert (await health(served))[0].failed_starts == 0


@in_a_loop
async def test_return_of_an_engine_is_an_event_without_a_poll(
    quick_restarts: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine dies before the recorder has polled it once: the launcher reports the loss."""
    monkeypatch.setattr(history_recorder, "WATCH_S", START)
    caplog.set_level(logging.INFO, logger=logs.LOGGER.name)
    async with tree_with(0, "worker", worker.run) as served:
        await served.launcher.serving(START)
        for incarnation in (1, 2):
            served.child("worker").signal(signal.SIGKILL)
            await served.until(lambda: served.number(StatusBoard.SERVING, 0) == incarnation + 1, START)  # noqa: B023
        served.child("worker").signal(signal.SIGKILL)
        await served.until(lambda: served.number(StatusBoard.SERVING, 0) == 0, START)
        events = [event for event in served.launcher._history.view().events if event.name == "engine serves again"]
        assert [event.text.split(",")[0] for event in events] == ["engine 0 #2", "engine 0 #3"]
        assert all(float(event.text.split()[-2]) > 0 for event in events)
        await served.launcher.serving(START)


@in_a_loop
async def test_server_killed_at_each_start_restarts_until_it_serves(quick_restarts: None) -> None:
    async with tree_with(0, "worker", worker.run) as served:
        await served.launcher.serving(START)
        for _ in range(FAILED):
            pid = served.child("server").pid
            served.child("server").signal(signal.SIGKILL)
            await served.until(
                lambda pid=pid: [child for child in served.children() if is_another_server(child, pid)], START
            )
            assert not served.launcher.has_failed
        await served.launcher.serving(START)
        assert json.loads((await served.get("/health"))[1])["servers"][0]["failed_starts"] == 0


@in_a_loop
async def test_a_tree_that_has_served_outlives_kills_of_any_process_at_any_time(
    seed: int, quick_restarts: None
) -> None:
    """Also of processes that are just starting, more often than a start takes."""
    chance = random.Random(seed)
    async with tree_with(0, "worker", worker.run, data_parallel_size=2, api_server_count=2) as served:
        await served.launcher.serving(START)
        for _ in range(KILLS):
            if children := served.children():
                chance.choice(children).signal(signal.SIGKILL)
            await asyncio.sleep(chance.uniform(0.0, 0.4))
            assert not served.launcher.has_failed
        await served.launcher.serving(START)
        assert (await served.get("/health/ready"))[0] == 200
        for group in range(2):
            await served.must_be_empty(group)


@in_a_loop
async def test_open_requests_of_a_killed_server_are_an_event(
    quick_restarts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs.LOGGER, "level", logging.INFO)
    async with tree_with(0, "worker", worker.run) as served:
        await served.launcher.serving(START)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(posted("/v1/completions", {"prompt": "hello", "max_tokens": 3000, "stream": True}))
        await reader.readuntil(b"data: ")
        served.child("server").signal(signal.SIGKILL)
        events = served.launcher._history.view
        await served.until(lambda: any(event.name == "requests ended with their server" for event in events().events))
        assert "server 0, open requests: 1" in [event.text for event in events().events]
        writer.close()
        await served.launcher.serving(START)


def is_another_server(child: ChildProcess, pid: int) -> bool:
    return child.member.kind == "server" and child.pid != pid


@pytest.mark.parametrize("has_served", [True, False])
@in_a_loop
async def test_a_unit_for_which_there_is_no_descriptor_is_tried_again(
    has_served: bool, quick_restarts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, failed = ChildProcess.start, []

    def fail(member: ProcessId, *arguments: Any) -> ChildProcess:
        if member.kind == "worker" and len(failed) < FAILED:
            failed.append(member)
            raise OSError(errno.EMFILE, "Too many open files")
        return start(member, *arguments)

    launcher = Launcher(EngineConfig(simulated=simulated_device()))
    try:
        if has_served:
            launcher.start()
            await launcher.serving(START)
            monkeypatch.setattr(ChildProcess, "start", fail)
            Running(launcher).child("core").signal(signal.SIGKILL)
            await Running(launcher).until(lambda: launcher.board.row(0)[StatusBoard.SERVING] == 2 + FAILED, START)
            assert len(failed) == FAILED
        else:
            monkeypatch.setattr(ChildProcess, "start", fail)
            launcher.start()
            with pytest.raises(ClusterFailed, match=r"group 0 ended 3 times .* could not be started: .*Too many open"):
                await launcher.serving(START)
    finally:
        await launcher.stop()


def test_a_process_that_cannot_be_watched_does_not_live(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = []

    def fail(pid: int) -> int:
        pids.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", fail)
    cluster = Cluster.open(EngineConfig(simulated=simulated_device()))
    with contextlib.closing(cluster), pytest.raises(OSError, match="Too many open files"):
        ChildProcess.start(ProcessId("worker", 0, 0, 1), wait_for_the_end, cluster)
    (pid,) = pids
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# ── units that never served ──────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("unit", "kind", "life", "reason"),
    [
        pytest.param(
            *(0, "worker", is_killed_after_a_while),
            r"worker 0\.0 #3 ended 3 times before it served, .*: killed by SIGKILL",
            marks=tiers.needs_all,
        ),
        (1, "server", is_killed_after_a_while, r"server 0\.0 #3 ended 3 times before it served, .*: killed by SIGKILL"),
        (0, "worker", has_no_memory, r"worker 0\.0 #1 cannot start: MemoryError: no room .* values: 0\.5 MiB left"),
        pytest.param(
            *(1, "server", has_no_memory, r"server 0\.0 #1 cannot start: MemoryError: no room"), marks=tiers.needs_all
        ),
    ],
)
@in_a_loop
async def test_a_unit_that_never_serves_ends_the_tree_with_its_reason(
    unit: int, kind: str, life: Life, reason: str, quick_restarts: None
) -> None:
    async with tree_with(unit, kind, life) as served:
        with pytest.raises(ClusterFailed, match=reason):
            await served.launcher.serving(START)


@in_a_loop
async def test_a_tree_whose_servers_do_not_serve_is_not_said_to_serve() -> None:
    async with tree_with(1, "server", wait_for_the_end) as served:
        await served.until(lambda: served.number(StatusBoard.SERVING) == 1, START)
        with pytest.raises(TimeoutError, match=r"server 0: not serving within 0\.5 s"):
            await served.launcher.serving(0.5)


def test_errors_that_another_attempt_would_meet_are_told_from_others() -> None:
    for error, is_lasting in (
        (ValueError("x"), True),
        (FileNotFoundError(errno.ENOENT, "x"), True),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory"), True),
        (RuntimeError("connection reset by peer"), False),
        (OSError(errno.EMFILE, "x"), False),
    ):
        with pytest.raises(CannotStart if is_lasting else type(error)), starting():
            raise error


def test_refused_tokenizer_ends_the_command_with_a_reason_without_trace(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = tmp_path / "model"
    shutil.copytree(SHIPPED, model)
    (model / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Unheard of"}}')
    command = [sys.executable, "-m", "penstock", "serve", str(model), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stderr
    assert (
        "cannot start: ValueError:" in done.stderr
        and f"{model}/tokenizer.json cannot be read as a tokenizer" in done.stderr
    )
    assert "event=serving " not in done.stderr and "trace=" not in done.stderr and "#2" not in done.stderr


@pytest.mark.parametrize("stage", ["forked", "admitted", *tiers.only_in_all("renamed", "loaded")])
@in_a_loop
async def test_launcher_stopped_at_a_stage_of_a_restart_leaves_nothing(
    stage: str, quick_restarts: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launcher_module, "import_programs", functools.partial(import_and_pause, stage))
    async with running() as engine:
        before = len(engine.children())
        engine.child("worker").signal(signal.SIGKILL)
        await engine.until(lambda: [child.member.incarnation for child in engine.children()] == [2] * before, START)
        assert all(child.is_forked for child in engine.children())
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_server_with_sigterm_before_the_launcher_answers_open_requests() -> None:
    """An init system sends it to all processes of a service."""
    with serving("--device-model", "simulated", "--step-ms", "5") as (process, port):
        pid = server_of(port)
        with socket.create_connection(("127.0.0.1", port), 30) as client:
            client.sendall(posted("/v1/completions", {"prompt": "x", "max_tokens": 300, "stream": True}))
            message = client.recv(65536)
            os.kill(pid, signal.SIGTERM)
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            while b"[DONE]" not in message:
                more = client.recv(65536)
                assert more, "the answer has been cut off"
                message += more
        process.wait(20)
