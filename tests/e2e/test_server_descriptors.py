"""A server without free descriptors, or with refused clients that have gone, logs a line and goes on."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import eventually
from tests.support.engine import START

pytest.importorskip("httptools")

ASKING = b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 20)


def server_of(port: int) -> int:
    with connected(port) as client:
        client.sendall(ASKING)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    pid: int = json.loads(answer.partition(b"\r\n\r\n")[2])["pid"]
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
