"""The fork server: forks equal spawned processes, and a broken fork server forks nothing."""

import asyncio
import contextlib
import errno
import logging
import os
import pickle
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.cluster import logs
from penstock.engine.cluster.process import StartedProcess
from penstock.engine.cluster.spawning import spawn_process
from penstock.engine.launcher import back_off, early_fork_server, fork_server
from penstock.engine.launcher.fork_server import ForkedProcess, ForkServer
from tests.support.loops import in_a_loop
from tests.unit.engine.launcher import forked_lives as lives

START = 60.0


@contextlib.asynccontextmanager
async def serving(imports: Callable[[], object], start_timeout: float = 2 * START) -> AsyncIterator[ForkServer]:
    """A fork server that has imported, or failed to."""
    server = ForkServer(imports, start_timeout)
    try:
        server.start()
        await settled(server)
        yield server
    finally:
        server.close()


async def settled(server: ForkServer) -> None:
    event = asyncio.Event()
    server.call_when_settled(event.set)
    await asyncio.wait_for(event.wait(), START)


async def must_fork_again(server: ForkServer) -> None:
    """Waits for the next fork server, and forks."""
    while server._server is None:
        await asyncio.sleep(0.01)
    await settled(server)
    must_fork(server)


def must_fork(server: ForkServer) -> None:
    assert server._timer is None, "imports have ended"
    process, _ = running(lives.describe, server.fork)
    assert process is not None
    process.join()


def running(
    target: Callable[..., object], start: Callable[..., StartedProcess | None]
) -> tuple[StartedProcess | None, Any]:
    """Returns a process, and the first message of its `target`."""
    reply_in, reply_out = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with reply_in, reply_out:
        process = start(target, (reply_out,), "a name")
        if process is None:
            return None, None
        reply_in.settimeout(START)
        return process, pickle.loads(reply_in.recv(1 << 16))


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.__dict__["fields"]["reason"] for record in caplog.records if record.levelno == logging.WARNING]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logs.LOGGER, "propagate", True)
    caplog.set_level(logging.INFO, logger=logs.LOGGER.name)
    return caplog


@in_a_loop
async def test_forked_process_is_as_a_spawned_process() -> None:
    async with serving(lives.import_nothing) as server:
        spawned, (expected, *_) = running(lives.describe, spawn_process)
        forks = [running(lives.describe, server.fork) for _ in range(2)]
        for process in (spawned, *(fork for fork, _ in forks)):
            assert process is not None
            process.join()
            assert process.exitcode == 7
        for process, (facts, *_) in forks:
            assert isinstance(process, ForkedProcess)
            descriptors = Counter(facts["descriptors"])
            assert descriptors <= Counter(expected["descriptors"])  # a spawned process has more pipes
            assert {**facts, "descriptors": None} == {**expected, "descriptors": None}
            assert facts["parent"] == os.getpid()
        (_, (_, *first)), (_, (_, *second)) = forks
        assert all(left != right for left, right in zip(first, second, strict=True)), "random numbers repeat"


@in_a_loop
async def test_kill_and_stop_of_a_fork_are_seen_by_its_parent() -> None:
    async with serving(lives.import_nothing) as server:
        process, pid = running(lives.wait_for_ever, server.fork)
        assert process is not None and process.pid == pid
        os.kill(pid, signal.SIGSTOP)
        status = os.waitid(os.P_PID, pid, os.WSTOPPED)
        assert status is not None and status.si_code == os.CLD_STOPPED
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("imports", "reason"),
    [
        (lives.start_thread, "a module has started threads when it was imported: "),
        (lives.fail_to_import, "ImportError: no module of that name"),
    ],
)
@in_a_loop
async def test_fork_server_refuses_once_for_imports_that_cannot_be_forked(
    imports: Callable[[], object], reason: str, log: pytest.LogCaptureFixture
) -> None:
    async with serving(imports) as server:
        assert server.fork(lives.describe, (), "") is None
        assert server.fork(lives.describe, (), "") is None
        (logged,) = reasons(log)
        assert logged.startswith(reason)


@in_a_loop
async def test_fork_server_refuses_after_cuinit_without_torch(log: pytest.LogCaptureFixture) -> None:
    """As torch.cuda.is_available does: torch counts as not initialized then, and its forks have no device."""
    from tests.support.libcuda import has_device, open_device  # skips where torch is missing

    with contextlib.nullcontext() if has_device() else open_device():
        async with serving(lives.initialize_driver) as server:
            assert server.fork(lives.describe, (), "") is None
            assert reasons(log) == ["a module has initialized CUDA when it was imported"]


@in_a_loop
async def test_fork_server_refuses_without_a_subreaper(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    def fail(option: int, value: object) -> None:
        raise OSError(errno.EINVAL, "no such option")

    monkeypatch.setattr(fork_server, "prctl", fail)
    async with serving(lives.import_nothing) as server:
        assert server.fork(lives.describe, (), "") is None
        assert len(reasons(log)) == 1 and "no such option" in reasons(log)[0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@in_a_loop
async def test_lost_fork_server_forks_nothing_until_the_next_one(
    number: int, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(back_off, "MIN_START_INTERVAL_S", 0.0)
    async with serving(lives.import_nothing) as server:
        assert server._server is not None
        os.kill(server._server.process.pid or 0, number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PIDFD, server._server.pidfd, os.WSTOPPED | os.WNOWAIT)
        began = time.monotonic()
        assert server.fork(lives.describe, (), "") is None
        assert time.monotonic() - began < fork_server.REPLY_TIMEOUT_S / 2
        assert len(reasons(log)) == 1
        await must_fork_again(server)


@pytest.mark.parametrize("imports", [lives.hang_in_fork, lives.end_between_forks])
@in_a_loop
async def test_fork_server_lost_in_a_fork_leaves_no_process(
    imports: Callable[[], object], log: pytest.LogCaptureFixture
) -> None:
    async with serving(imports) as server:
        before = children()
        process, _ = running(lives.describe, server.fork)
        assert process is None
        own = [] if server._server is None else [str(server._server.process.pid)]  # the next fork server
        left = [pid for pid in children() if pid not in own]
        assert len(left) == len(before) - 1, "the fork server has ended, and nothing else is left"


@in_a_loop
async def test_forks_outlive_their_fork_server_before_they_have_run() -> None:
    """The parent alone waits for a fork."""
    async with serving(lives.wait_before_the_request) as server:
        fork = server.fork(lives.describe, (), "")
        assert isinstance(fork, ForkedProcess)
        server.close()
        status = os.waitid(os.P_PID, fork.pid, os.WEXITED | os.WNOWAIT)
        assert status is not None and status.si_code == os.CLD_EXITED, "nothing has killed the fork"
        fork.join()
        assert fork.exitcode == 1, "the fork has had no argument"


@in_a_loop
async def test_packages_that_were_installed_again_are_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "installed_package.py"
    file.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fork_server, "PACKAGES", ("installed_package", "no_package_of_that_name"))
    async with serving(lives.import_nothing) as server:
        must_fork(server)
        assert reasons(log) == []
        file.with_suffix(".new").write_text("")
        file.with_suffix(".new").rename(file)
        must_fork(server)
        must_fork(server)
        assert len(reasons(log)) == 1
        await server.renew()
        must_fork(server)
        assert len(reasons(log)) == 1


@in_a_loop
async def test_stopped_imports_are_given_up_by_sigchld(log: pytest.LogCaptureFixture) -> None:
    server = ForkServer(lives.import_for_ever, 2 * START)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGCHLD, server.check_stopped)
    try:
        server.start()
        assert server._server is not None
        os.kill(server._server.process.pid or 0, signal.SIGSTOP)
        await settled(server)
        assert reasons(log) == ["stopped by a signal"]
    finally:
        loop.remove_signal_handler(signal.SIGCHLD)
        server.close()


@in_a_loop
async def test_fork_server_is_replaced_when_the_environment_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(back_off, "MIN_START_INTERVAL_S", 0.0)
    async with serving(lives.import_nothing) as server:
        monkeypatch.setenv("PENSTOCK_OF_A_TEST", "1")
        assert server.fork(lives.describe, (), "") is None
        await must_fork_again(server)


@in_a_loop
async def test_imports_have_half_of_the_time_in_which_a_group_starts(log: pytest.LogCaptureFixture) -> None:
    """Else no time is left to spawn the processes of a group."""
    async with serving(lives.import_for_ever, start_timeout=0.4) as server:
        await server.renew()
        assert server.fork(lives.describe, (), "") is None
        assert reasons(log) == ["imports have not ended within 0.2 s"] * 2


@in_a_loop
async def test_fork_server_without_a_connection_is_given_up(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "MAX_FAILED_STARTS", 1)
    monkeypatch.setattr(fork_server, "REPLY_TIMEOUT_S", 0.2)
    async with serving(lives.close_connection) as server:
        assert server.fork(lives.describe, (), "") is None
        assert reasons(log) == ["the connection is closed, and the process has not ended within 0.2 s"]


@pytest.mark.parametrize("iterations", range(5))
@in_a_loop
async def test_cancelled_renewal_does_not_go_on_when_imports_end(iterations: int) -> None:
    """The launcher stops when imports have just ended: a migration that went on would restart its groups."""
    server = ForkServer(lives.import_nothing, 2 * START)
    try:
        renewal = asyncio.get_running_loop().create_task(server.renew())
        while not server._waiting:
            await asyncio.sleep(0)
        server._settle()
        for _ in range(iterations):
            await asyncio.sleep(0)
        if renewal.cancel():
            with pytest.raises(asyncio.CancelledError):
                await renewal
    finally:
        server.close()


@pytest.mark.parametrize("is_changed", [False, True])
@in_a_loop
async def test_early_process_is_taken_unless_the_environment_has_changed(
    is_changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_fork_server, "import_engine", lives.import_nothing)
    early_fork_server.start_early(["model", "--port", "0"])
    (early,) = early_fork_server._early
    pid = early.process.pid
    if is_changed:
        monkeypatch.setenv("PENSTOCK_OF_A_TEST", "1")
    async with serving(lives.import_nothing) as server:
        assert server._server is not None and (server._server.process.pid == pid) != is_changed
        must_fork(server)
    assert str(pid) not in children() and not early_fork_server._early


@in_a_loop
async def test_early_process_that_has_ended_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_fork_server, "import_engine", lives.import_nothing)
    early_fork_server.start_early([])
    (early,) = early_fork_server._early
    early.process.kill()
    early.process.join()
    async with serving(lives.import_nothing) as server:
        must_fork(server)


@pytest.mark.parametrize("is_stopped", [True, False])
@in_a_loop
async def test_early_process_that_hangs_is_given_up(
    is_stopped: bool, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_fork_server, "import_engine", lives.import_for_ever)
    early_fork_server.start_early([])
    pid = early_fork_server._early[0].process.pid
    assert pid is not None
    if is_stopped:
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)  # SIGCHLD has come before the launcher handles it
    async with serving(lives.import_nothing, 2 * START if is_stopped else 0.4) as server:
        expected = "stopped by a signal" if is_stopped else "imports have not ended within 0.2 s"
        assert reasons(log) == [expected] and str(pid) not in children()
        assert is_stopped or server.fork(lives.describe, (), "") is None
        assert len(reasons(log)) == 1


def test_early_process_ends_with_a_command_that_does_not_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_fork_server, "import_engine", lives.import_for_ever)
    for words in (["--device-model", "simulated"], ["--device=cuda"], ["--fork-server", "off"], ["--help"]):
        early_fork_server.start_early(words)
        assert not early_fork_server._early
    early_fork_server.start_early(["model"])
    (early,) = early_fork_server._early
    pid = str(early.process.pid)
    assert pid in children()
    early_fork_server.end_early()
    assert pid not in children()


def children() -> list[str]:
    return [pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]
