"""Two nodes on this machine: the home node in the test's process, and another one in a pid namespace of its own.

Between them stands a relay, which can stop to pass on what comes, in one direction or in both, pass it on late, and
flip bits of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import secrets
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec

from penstock.engine.launcher.launcher import Launcher
from penstock.engine.protocol.config import EngineConfig, Nodes
from penstock.environment import NODE_SECRET
from penstock.server.server_launcher import run_headless
from tests.support.engine import START, Running, simulated_device

HOST = "127.0.0.1"
REMOTE = 1  # number of the other node's group on the home node
NAMESPACES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def has_namespaces() -> bool:
    return subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode == 0


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


# ── the link between them ────────────────────────────────────────────────────────────────────────────────────────────
class Relay:
    """Passes connections on to the home node. `is_cut` by direction: "out" from the home node, "back" to it."""

    def __init__(self, target: int) -> None:
        self._target = target
        self.is_cut = {"out": False, "back": False}
        self.delay = 0.0  # seconds, in each direction
        self.flips = {"out": 0, "back": 0}  # bits that are still to be flipped, one in each of the next pieces
        self.nbytes = {"out": 0, "back": 0}
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def reset(self) -> None:
        """Resets all connections, at both sides."""
        for writer in self._writers:
            connection = writer.get_extra_info("socket")
            if connection is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:  # of tasks that had not begun
            writer.transport.abort()
        await asyncio.sleep(0)  # transports close their sockets

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        task = asyncio.ensure_future(self._pass_on(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            with contextlib.suppress(OSError):
                home_reader, home_writer = await asyncio.open_connection(HOST, self._target)
                writers.append(home_writer)
                self._writers.add(home_writer)
                back = asyncio.ensure_future(self._direction("back", reader, home_writer))
                out = asyncio.ensure_future(self._direction("out", home_reader, writer))
                try:
                    await asyncio.wait([back, out], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    back.cancel()
                    out.cancel()
                    await asyncio.gather(back, out, return_exceptions=True)
        finally:
            self._writers.difference_update(writers)
            for end in writers:
                end.transport.abort()

    def _flipped(self, name: str, piece: bytes) -> bytes:
        if not self.flips[name]:
            return piece
        self.flips[name] -= 1
        bit = random.randrange(8 * len(piece))
        return (int.from_bytes(piece, "little") ^ 1 << bit).to_bytes(len(piece), "little")

    async def _direction(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes bytes on until the end of the stream. A cut link loses nothing that it has not been given: what comes
        meanwhile is passed on later, as TCP would."""
        late: deque[tuple[float, bytes]] = deque()
        more = asyncio.Event()
        ended = False

        async def receive() -> None:
            nonlocal ended
            with contextlib.suppress(OSError):
                while piece := await reader.read(1 << 16):
                    late.append((time.monotonic() + self.delay, piece))
                    more.set()
            ended = True
            more.set()

        receiving = asyncio.ensure_future(receive())
        try:
            while True:
                while late and not self.is_cut[name]:
                    due, piece = late.popleft()
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                    self.nbytes[name] += len(piece)
                    writer.write(self._flipped(name, piece))
                    await writer.drain()
                if ended and not late:
                    return
                more.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(more.wait(), 0.01 if late else None)
        finally:
            receiving.cancel()


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


@contextlib.contextmanager
def secret_in_environment() -> Iterator[None]:
    before = os.environ.get(NODE_SECRET.name)
    os.environ[NODE_SECRET.name] = secrets.token_hex(32)
    try:
        yield
    finally:
        if before is None:
            del os.environ[NODE_SECRET.name]
        else:
            os.environ[NODE_SECRET.name] = before


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
    relay = Relay(port)
    with secret_in_environment(), tempfile.TemporaryDirectory() as folder:
        other = Nodes(
            count=2, rank=1, address=HOST, port=await relay.start(), tensor_parallel_over_nodes=spread, **tls[1]
        )
        differing = {"log_format": "json", **(remote or {})}
        node = RemoteNode(msgspec.structs.replace(home, nodes=other, **differing), Path(folder) / "log")
        launcher = Launcher(home)
        try:
            launcher.start()
            if joins:
                await launcher.serving(START)
            yield TwoNodes(launcher, node, relay)
        finally:
            late = await launcher.stop()
            node.kill()
            await relay.close()
        assert not late, f"had to be killed: {late}"


if __name__ == "__main__":
    sys.exit(run_headless(msgspec.json.decode(sys.argv[1], type=EngineConfig)))
