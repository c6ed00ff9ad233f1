"""A Ray cluster with Serve, for tests and benchmarks: in a network namespace that has a loopback device and no other.

So it does not depend on the machine's addresses, and its ports are its own. `ray_program` is what runs in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.harness import guard
from penstock.tools.inspect.processes import Process, all_processes

ROOT = Path(__file__).parents[2]
CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1
START, END = 180.0, 120.0  # seconds, on a machine that has other work
PORT = 8000  # of Serve, in its namespace
LEFT_WITHIN = 5.0  # seconds that an engine may take to end after Serve has ended
LOOK = 0.02  # seconds between two looks


class Failed(Exception):
    """The cluster did not do what it was told; the text has the reason, or the end of its log."""


@contextlib.contextmanager
def network_namespace() -> Iterator[None]:
    """This thread, and the processes that it starts, have a network of their own. Raises OSError without permission."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as before:
        if libc.unshare(CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"unshare(CLONE_NEWNET): {os.strerror(number)}: a network of its own needs root")
        try:
            with socket.socket() as any_socket:
                fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))
            yield
        finally:
            if libc.setns(before.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")


def namespace_of(pid: int | str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net")
    return ""


class RayCluster:
    """Nodes with so many processors each. The thread that makes it is in `network_namespace`."""

    def __init__(self, nodes: list[int], folder: Path, environment: Mapping[str, str]) -> None:
        self.log = folder / "ray.log"
        self.url = f"http://127.0.0.1:{PORT}"
        self._namespace = namespace_of("thread-self")
        self._tmp = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # paths of sockets have at most 107 bytes
        haproxy = {
            f"RAY_SERVE_HAPROXY_{name}": f"{self._tmp}/haproxy/{file}"
            for name, file in (
                ("CONFIG_FILE_LOC", "haproxy.cfg"), ("SOCKET_PATH", "admin.sock"), ("METRICS_SOCKET_PATH", "m.sock"),
                ("SERVER_STATE_BASE", ""), ("SERVER_STATE_FILE", "server-state"),
            )
        }  # fmt: skip
        output = json.dumps({"nodes": nodes, "port": PORT})
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, guard.__file__, sys.executable, "-m", "bench.nodes.ray_program", output],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "RAY_TMPDIR": self._tmp, "RAY_USAGE_STATS_ENABLED": "0", **haproxy, **environment},
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._commands, self._answers = self._process.stdin, self._process.stdout

    # ── commands ──
    def begin(self, command: str, **arguments: Any) -> None:
        self._commands.write(json.dumps({"command": command, **arguments}) + "\n")
        self._commands.flush()

    def result(self) -> Any:
        """Of the command that was begun; the first is that of the start. Raises Failed."""
        line = self._answers.readline()
        answer = json.loads(line) if line else {"error": f"it has ended: {self.last_words()}"}
        if "error" in answer:
            raise Failed(answer["error"])
        return answer["result"]

    def call(self, command: str, **arguments: Any) -> Any:
        self.begin(command, **arguments)
        return self.result()

    def run(self, name: str = "default", route_prefix: str = "/", **args: Any) -> None:
        self.call("run", name=name, route_prefix=route_prefix, args=args)

    def last_words(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    # ── processes ──
    def processes(self) -> dict[int, Process]:
        """All in its namespace but this one."""
        me = os.getpid()
        outcome = all_processes()
        return {pid: process for pid, process in outcome.items() if pid != me and namespace_of(pid) == self._namespace}

    def engines(self) -> dict[int, tuple[int, int]]:
        """By the pid of each replica: its keeper, and the launcher of its engine."""
        lines = {pid: command_line(pid) for pid in self.processes()}
        parents = {pid: process.parent for pid, process in self.processes().items()}
        keepers = {pid: parents[pid] for pid, words in lines.items() if "engine_keeper.py" in words and pid in parents}
        launchers = {
            parents[pid]: pid
            for pid, words in lines.items()
            if "-m penstock serve" in words and parents.get(pid) in keepers
        }
        return {replica: (keeper, launchers[keeper]) for keeper, replica in keepers.items() if keeper in launchers}

    # ── the end ──
    def close(self) -> list[str]:
        """Ends Serve and Ray. Returns the command lines of what was left of engines when Serve had ended."""
        left = ["it was not looked at"]
        try:
            with contextlib.suppress(OSError, Failed):
                self.call("shutdown")
                left = self._left()
                self._commands.close()
                self._process.wait(END)
        finally:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait()
            for pipe in (self._commands, self._answers):
                with contextlib.suppress(OSError):
                    pipe.close()
            shutil.rmtree(self._tmp, ignore_errors=True)
        return left

    def _left(self) -> list[str]:
        def of_engines() -> list[str]:
            lines = map(command_line, self.processes())
            return [line for line in lines if "penstock" in line and "bench.nodes" not in line]

        with contextlib.suppress(Failed):
            wait_for(lambda: not of_engines(), within=LEFT_WITHIN)
        return of_engines()


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    return ""


def wait_for(condition: Any, within: float) -> Any:
    """Raises Failed."""
    deadline = time.monotonic() + within
    while not (answer := condition()):
        if time.monotonic() >= deadline:
            raise Failed(f"{getattr(condition, '__qualname__', condition)} was still {answer!r} after {within:g} s")
        time.sleep(LOOK)
    return answer
