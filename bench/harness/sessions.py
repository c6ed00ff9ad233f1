"""The processes of one implementation: a session stays alive while others are measured, so that all take turns."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from bench.harness import role
from bench.harness.phases import Order, Report
from bench.impls import Implementation, Seat

ROOT = Path(__file__).resolve().parent.parent.parent
START_LIMIT = 180.0  # seconds; an interpreter that imports torch takes its time when eight do so at once
ORDER_LIMIT = 90.0  # seconds on top of what an order must take


class SessionFailed(Exception):
    """A process of this session died, raised, or did not answer; the message says which and what."""


class _Process(Protocol):
    """What spawned and peer processes have in common."""

    def is_alive(self) -> bool: ...
    def kill(self) -> None: ...
    def join(self, timeout: float) -> None: ...


class _PeerProcess:
    """A role run by another interpreter, over one inherited socket."""

    def __init__(self, python: str, far: Connection) -> None:
        os.set_inheritable(far.fileno(), True)
        self._process = subprocess.Popen(
            [python, "-m", "bench.harness.role", str(far.fileno())],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            pass_fds=[far.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()

    def join(self, timeout: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)


class Session:
    """One implementation, one process for each end; rank 0 is the sender."""

    def __init__(self, implementation: Implementation, receivers: int, *, is_pinned: bool = False) -> None:
        self.implementation = implementation
        self.name = implementation.name
        self.receivers = receivers
        self._scratch = tempfile.mkdtemp(prefix="bench-")
        self._roles: list[tuple[_Process, Connection]] = []
        try:
            self._start(is_pinned)
        except BaseException:
            self.kill()
            raise

    def _start(self, is_pinned: bool) -> None:
        self._wires = self.implementation.lay(self.receivers, Path(self._scratch))  # kept: some die with their maker
        python = self.implementation.python()
        for rank, wire in enumerate(self._wires.by_rank):
            cpus = cpus_of(rank) if is_pinned else frozenset[int]()
            assignment = role.Assignment(self.name, Seat(rank, self.receivers), wire, cpus)
            near, far = _connections()
            process: _Process
            if python is None or python == sys.executable:
                process = get_context("spawn").Process(target=role.run, args=(far, assignment), daemon=True)
                process.start()
            else:
                process = _PeerProcess(python, far)
                near.send(assignment)
            far.close()
            self._roles.append((process, near))

    def wait_until_ready(self) -> None:
        """Blocks until all ends are made. Raises SessionFailed if one cannot be."""
        while True:
            answers = self._answers(START_LIMIT, "start")
            kinds = {kind for kind, _ in answers}
            if kinds == {"ready"}:
                return
            assert kinds == {"meet"}, f"the processes of {self.name} disagree on how often they meet: {kinds}"
            offers = [offer for _, offer in answers]
            for _, control in self._roles:
                control.send(offers)

    def perform(self, order: Order) -> list[Report]:
        """Has all processes do it; their reports by rank. Raises SessionFailed."""
        for _, control in reversed(self._roles):
            control.send(order)
        answers = self._answers(ORDER_LIMIT + order.messages * order.pace, f"{order}")
        return [report for _, report in answers]

    def close(self) -> int:
        """Ends all processes in peace; returns the bytes the channel had reserved. Raises SessionFailed."""
        for _, control in self._roles:
            control.send(None)
        reserved = self._answers(ORDER_LIMIT, "close")[0][1]
        for process, _ in self._roles:
            process.join(5.0)
        self.kill()
        return int(reserved)

    def kill(self) -> None:
        """Ends all processes at once, in whatever state; safe to call twice."""
        for process, control in self._roles:
            if process.is_alive():
                process.kill()
            process.join(5.0)
            control.close()
        self._roles.clear()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _answers(self, limit: float, what: str) -> list[tuple[str, Any]]:
        """One answer of each role, by rank."""
        deadline = time.monotonic() + limit
        missing = {control: rank for rank, (_, control) in enumerate(self._roles)}
        answers: dict[int, tuple[str, Any]] = {}
        while missing:
            readable = connection.wait(list(missing), max(0.0, deadline - time.monotonic()))
            if not readable:
                raise SessionFailed(f"{what}: no answer from ranks {sorted(missing.values())} within {limit:.0f} s")
            for control in readable:
                assert isinstance(control, Connection), "only connections were waited for"
                rank = missing.pop(control)
                try:
                    kind, answer = control.recv()
                except (EOFError, ConnectionResetError):
                    raise SessionFailed(f"{what}: rank {rank} died") from None
                if kind == "failed":
                    raise SessionFailed(f"{what}: rank {rank} of {self.receivers + 1}:\n{answer}")
                answers[rank] = (kind, answer)
        return [answers[rank] for rank in sorted(answers)]


def _connections() -> tuple[Connection, Connection]:
    """Like Pipe(), both ends surely sockets and so fit to be inherited by another interpreter."""
    near, far = socket.socketpair()
    return Connection(near.detach()), Connection(far.detach())


def cpus_of(rank: int) -> frozenset[int]:
    """With pinning: the sender has the first CPU, the receivers take turns on the others."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) == 1 or rank == 0:
        return frozenset(cpus[:1])
    return frozenset({cpus[1 + (rank - 1) % (len(cpus) - 1)]})
