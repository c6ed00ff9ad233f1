"""Two nodes on this machine: the home node in the test's process, and another one in a pid namespace of its own.

Between them stands a relay; what comes during a cut is passed on after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from penstock.engine.launcher.launcher import Launcher
from penstock.engine.protocol.config import EngineConfig, Nodes
from penstock.environment import NODE_SECRET
from penstock.server.server_launcher import run_headless
from tests.support.engine import START, Running, simulated_device
from tests.support.relay import TO_CONNECTOR, TO_LISTENER, Relay, relay

HOST = "127.0.0.1"
REMOTE = 1  # number of the other node's group on the home node
DIRECTIONS = {"out": TO_CONNECTOR, "back": TO_LISTENER}  # of the link, as the home node sees it
NAMESPACES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def has_namespaces() -> bool:
    return subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode == 0


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


# ── the other node ───────────────────────────────────────────────────────────────────────────────────────────────────
class RemoteNode:
    """A node without servers, in a pid namespace of its own: a process that this one's die with."""

    def __init__(self, config: EngineConfig, log: Path) -> None:
        self._config = config
        self._log = log
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.support.nodes", msgspec.json.encode(self._config).decode()]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*NAMESPACES, *command], cwd=Path(__file__).parents[2], stdin=subprocess.DEVNULL, stderr=log
            )

    @property
    def log(self) -> str:
        """What it has logged since its last start."""
        return self._log.read_text()

    def events(self, name: str) -> list[dict[str, Any]]:
        """Returns the events of that name in the log."""
        lines = [json.loads(line) for line in self.log.splitlines() if line.startswith("{") and line.endswith("}")]
        return [line for line in lines if line["event"] == name]

    def processes(self) -> list[int]:
        """Returns the pids of all its processes, as this namespace knows them: the launcher first."""
        pids: list[int] = []
        left = _children_of(self.process.pid)
        while left:
            pid = left.pop(0)
            pids.append(pid)
            left += _children_of(pid)
        return pids

    def pid_of(self, name: str) -> int:
        """Returns the last process of that kind in the log, such as `worker`, as this namespace knows it."""
        started = self.events("process started")
        there = [event["child_pid"] for event in started if event["child"].startswith(f"{name} ")]
        return next(pid for pid in self.processes() if _pid_in_its_namespace(pid) == there[-1])

    def signal(self, number: int) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def terminate(self) -> int:
        """Sends SIGTERM to the launcher, and returns its exit status."""
        os.kill(self.processes()[0], signal.SIGTERM)
        return self.process.wait(START)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _children_of(pid: int) -> list[int]:
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            pids += map(int, (task / "children").read_text().split())
    return pids


def _pid_in_its_namespace(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[-1]) for line in status.splitlines() if line.startswith("NSpid:"))


# ── both ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
class TwoNodes(Running):
    def __init__(self, launcher: Launcher, remote: RemoteNode, relay: Relay) -> None:
        super().__init__(launcher)
        self.remote = remote
        self.relay = relay


def secret_in_environment() -> AbstractContextManager[object]:
    return mock.patch.dict(os.environ, {NODE_SECRET.name: secrets.token_hex(32)})


@contextlib.asynccontextmanager
async def two_nodes(
    remote: dict[str, Any] | None = None,
    *,
    joins: bool = True,
    spread: bool = False,
    tls: tuple[dict[str, str], dict[str, str]] = ({}, {}),
    **options: Any,
) -> AsyncIterator[TwoNodes]:
    """A home node with a group, and another node with a group; `spread`: both nodes with half of the ranks of one.
    `remote`: options of the other node that differ; `joins`: whether it is to join before the block begins; `tls`: what
    `Nodes` has of it on the home node and on the other one."""
    port = free_port()
    home = EngineConfig(
        **{
            "simulated": simulated_device(),
            "max_model_len": 4096,
            "nodes": Nodes(count=2, address=HOST, port=port, tensor_parallel_over_nodes=spread, **tls[0]),
            **options,
        }
    )
    with relay((HOST, port)) as link, secret_in_environment(), tempfile.TemporaryDirectory() as folder:
        link.holds_bytes = True
        other = Nodes(count=2, rank=1, address=HOST, port=link.address[1], tensor_parallel_over_nodes=spread, **tls[1])
        differing = {"log_format": "json", **(remote or {})}
        node = RemoteNode(msgspec.structs.replace(home, nodes=other, **differing), Path(folder) / "log")
        launcher = Launcher(home)
        try:
            launcher.start()
            if joins:
                await launcher.serving(START)
            yield TwoNodes(launcher, node, link)
        finally:
            late = await launcher.stop()
            node.kill()
        assert not late, f"had to be killed: {late}"


if __name__ == "__main__":
    sys.exit(run_headless(msgspec.json.decode(sys.argv[1], type=EngineConfig)))
