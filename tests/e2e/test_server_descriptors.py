"""A server without free descriptors, or with refused clients that have gone, logs a line and goes on. Processes keep no
descriptors of dead peers."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.server.status.snapshot import ProcessView
from penstock.server.status.snapshot_reader import SnapshotReader
from tests import tiers
from tests.conftest import eventually
from tests.support.command import SERVE, ServerClient, started
from tests.support.engine import START

pytest.importorskip("httptools")

SETTLED = 4  # deaths before the first count of descriptors
MAX_GROWTH = 5  # descriptors: some belong to the last successors


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 20)


def server_of(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/live", timeout=20) as answer:
        pid: int = json.load(answer)["pid"]
        return pid


class Server:
    """On a simulated device, with its log in a file."""

    def __init__(self, log: Path, *options: str) -> None:
        command = [sys.executable, "-m", "penstock", "serve", "--device-model", "simulated", "--port", "0", *options]
        self._log = log
        with open(log, "w") as file:
            self.process = subprocess.Popen([*command, "--log-format", "json"], stderr=file)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines(True) if line.endswith("\n")]

    def port(self) -> int:
        def urls() -> list[str]:
            assert self.process.poll() is None, self._log.read_text()
            return [line["url"] for line in self.lines() if line["event"] == "serving"]

        eventually(urls, within=START)
        return int(urls()[0].rpartition(":")[2])

    def end(self) -> None:
        self.process.terminate()
        assert self.process.wait(60) == 0, self._log.read_text()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*options: str) -> Server:
        servers.append(Server(tmp_path / "log", *options))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        server.process.wait()


def test_connections_without_a_descriptor_wait_and_the_log_has_a_line(serve: Callable[..., Server]) -> None:
    server = serve()
    port = server.port()
    pid = server_of(port)
    limit = len(os.listdir(f"/proc/{pid}/fd")) + 4
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limit))
    with contextlib.ExitStack() as clients:
        for _ in range(40):
            clients.enter_context(connected(port))
        eventually(
            lambda: [line for line in server.lines() if line["event"] == "connections are not accepted"], within=20
        )
        assert len(os.listdir(f"/proc/{pid}/fd")) <= limit
    assert server_of(port) == pid  # clients have gone: it accepts again
    server.end()
    (line,) = [line for line in server.lines() if line["level"] == "error"]
    assert line["descriptors"] == limit and "Too many open files" in line["error"]


def test_refused_clients_that_have_gone_are_no_errors(serve: Callable[..., Server]) -> None:
    server = serve("--max-open-requests", "1")
    port = server.port()
    pid = server_of(port)
    with contextlib.ExitStack() as clients:
        for _ in range(4):
            clients.enter_context(connected(port))
        os.kill(pid, signal.SIGSTOP)  # so that they have gone when they are refused
        for _ in range(100):
            connected(port).close()
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: answers(port) == pid, within=20)
    server.end()
    assert not [line for line in server.lines() if line["level"] == "error"]


def answers(port: int) -> int | None:
    """None: it has refused the connection."""
    with contextlib.suppress(KeyError, ValueError, OSError):
        return server_of(port)
    return None


class Victims:
    """The processes of a role: the test kills the last of them again and again."""

    def __init__(self, client: ServerClient, role: str) -> None:
        self._client = client
        self._role = role

    def _processes(self) -> tuple[ProcessView, ...]:
        return SnapshotReader(self._client.pid).take().processes

    def kill(self) -> None:
        """Kills a process, waits until each process serves again, and asks for answers."""
        victim = [process.pid for process in self._processes() if process.role == self._role][-1]
        os.kill(victim, signal.SIGKILL)

        def serve() -> bool:
            processes = self._processes()
            return all(process.state == "serves" and process.pid != victim for process in processes)

        eventually(serve, within=START)
        assert [self._client.complete(5) for _ in range(6)] == [200] * 6

    def descriptors(self) -> dict[int, int]:
        """Returns how many descriptors each process has, by pid."""
        return {process.pid: psutil.Process(process.pid).num_fds() for process in self._processes()}


@tiers.needs_all
@pytest.mark.timeout(tiers.limit(600, 20_000))
@pytest.mark.parametrize("role", ["server", "output", "worker", "core"])
def test_processes_keep_no_descriptor_of_a_process_that_was_killed(role: str) -> None:
    """In `make test`, `test_wake_up_pipes.py` stands for this test."""
    shape = ("--data-parallel-size", "2", "--api-server-count", "2")
    with started((*SERVE, *shape), stderr=subprocess.DEVNULL) as process:
        victims = Victims(ServerClient(process), role)
        for _ in range(SETTLED):
            victims.kill()
        before = victims.descriptors()
        for _ in range(tiers.SERVED_DEATHS):
            victims.kill()
        after = victims.descriptors()
        survivors = before.keys() & after.keys()
        assert process.pid in survivors and len(survivors) >= 3
        grown = {pid: after[pid] - before[pid] for pid in survivors}
        assert max(grown.values()) <= MAX_GROWTH, (grown, before)
        process.terminate()
        assert process.wait(START) == 0
