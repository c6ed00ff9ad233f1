"""The launcher's side of the fork server: a child process that has imported what the processes of a group import.

A process that the fork server forks imports nothing. Where a fork fails, the launcher spawns the process.
`cluster.forking` runs in the fork server.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from penstock import DeathCause
from penstock.engine.cluster import forking
from penstock.engine.cluster.kept_memory import PACKAGES
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.process import CANNOT_START, prctl
from penstock.engine.cluster.spawning import inherited
from penstock.engine.launcher import early_fork_server
from penstock.engine.launcher.back_off import BackOff

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
IMPORTS_TIMEOUT_S = 120.0  # 3 s on an idle machine
REPLY_TIMEOUT_S = 5.0  # of a fork, which takes about 0.02 s
REPLY_POLL_MS = 20  # between looks whether the fork server is stopped
MAX_FAILED_STARTS = 3  # in a row: then processes are spawned


class ForkedProcess:
    """A child of this process that the fork server has forked, with the methods of multiprocessing's processes."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exitcode: int | None = None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def join(self) -> None:
        self.exitcode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None: ...


@dataclass
class ForkServerProcess:
    process: SpawnProcess
    pidfd: int
    connection: socket.socket
    inherited: tuple[object, ...]
    packages: list[object]  # states of their files
    started: float
    forks: list[ForkedProcess]  # the launcher waits for them; forks that have been waited for are dropped
    is_ready: bool = False
    is_outdated: bool = False  # packages have other files now

    @classmethod
    def start(cls, imports: Callable[[], object], packages: Sequence[str]) -> ForkServerProcess:
        """Raises OSError."""
        states = read_states(packages)
        launched = early_fork_server.take()
        process = launched.process
        assert process.pid is not None, "it has been started"
        try:
            forking.send_imports(launched.connection, imports)
            pidfd = os.pidfd_open(process.pid)
        except BaseException:
            launched.end()
            raise
        launched.connection.settimeout(REPLY_TIMEOUT_S)
        return cls(process, pidfd, launched.connection, launched.inherited, states, launched.started, [])

    @property
    def is_stopped(self) -> bool:
        """Returns whether a signal has stopped the process."""
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PIDFD, self.pidfd, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        return False

    def fork(self, descriptors: list[int]) -> ForkedProcess:
        """Returns a fork. Raises OSError."""
        forking.send_request(self.connection, descriptors)
        poller = select.poll()
        poller.register(self.connection, select.POLLIN)
        deadline = time.monotonic() + REPLY_TIMEOUT_S
        while not poller.poll(REPLY_POLL_MS):
            if self.is_stopped:
                raise TimeoutError("stopped by a signal")
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no reply within {REPLY_TIMEOUT_S:g} s")
        reply = self.connection.recv(forking.PID.size)
        if len(reply) != forking.PID.size:
            raise ConnectionError("ended during a fork")
        pid = int(forking.PID.unpack(reply)[0])
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises ChildProcessError for a foreign process
        fork = ForkedProcess(pid)
        self.forks = [*(former for former in self.forks if former.exitcode is None), fork]
        return fork

    def end(self) -> DeathCause:
        """Kills the process, if alive, and returns how the process has ended."""
        self.process.kill()
        self.process.join()
        death = DeathCause.of_exit_code(self.process.exitcode or 0)
        watched = {fork.pid for fork in self.forks if fork.exitcode is None}  # a pid may be given again
        reap_forks(forking.process_name(self.process.pid or 0), watched)
        self.process.close()
        self.connection.close()
        os.close(self.pidfd)
        return death


class ForkServer:
    """Forks processes, or returns None: then the caller spawns. Watches the fork server, and starts the next."""

    def __init__(self, imports: Callable[[], object], start_timeout: float) -> None:
        """`imports`: runs in the fork server, and imports what the processes need. `start_timeout`: in which a group
        waits for the imports, and starts."""
        self._imports = imports
        self._timeout = min(IMPORTS_TIMEOUT_S, start_timeout / 2)
        self._packages = find_packages()
        self._server: ForkServerProcess | None = None
        self._back_off = BackOff()
        self._timer: asyncio.TimerHandle | None = None  # for the end of the imports, or the next start
        self._waiting: list[Callable[[], object]] = []  # for the end of the imports

    def start(self) -> None:
        self._timer = None
        try:
            with adopting_orphans():
                self._server = server = ForkServerProcess.start(self._imports, self._packages)
        except OSError as error:
            return self._refuse(str(error))
        loop = asyncio.get_running_loop()
        loop.add_reader(server.pidfd, self._lose, "")
        loop.add_reader(server.connection, self._receive_verdict, server)
        reason = f"imports have not ended within {self._timeout:g} s"
        self._timer = loop.call_later(self._timeout, self._refuse, reason)
        self.check_stopped()  # an early process may have been stopped before the launcher handled SIGCHLD
        return None

    def call_when_settled(self, callback: Callable[[], object]) -> None:
        """Calls back when the fork server has imported all, or has failed; at once, if it imports nothing now."""
        if self._server is None or self._server.is_ready:
            callback()
        else:
            self._waiting.append(callback)

    async def renew(self) -> None:
        """Replaces the process by a process that imports the files of this moment, and waits for the imports."""
        self._end()
        self._back_off = BackOff()
        self.start()
        settled = asyncio.Event()
        self.call_when_settled(settled.set)
        await settled.wait()

    def fork(self, target: Callable[..., object], values: tuple[Any, ...], name: str) -> ForkedProcess | None:
        """Returns a child that runs `target(*values)`; None: the caller spawns the child. Raises OSError without
        a free descriptor or memory."""
        server = self._server
        if server is None or not server.is_ready:
            return None
        if inherited() != server.inherited:
            self._lose("the launcher has another environment, directory, limit or stream")
            return None
        self._report_changed_files(server)
        with contextlib.ExitStack() as stack:
            memory = stack.enter_context(open(os.memfd_create("arguments", os.MFD_CLOEXEC), "w+b"))
            gate_in, gate_out = os.pipe()
            stack.callback(os.close, gate_out)
            stack.callback(os.close, gate_in)
            pickler = forking.ArgumentsPickler(memory)
            pickler.dump((target, values, name))
            memory.seek(0)  # writes the rest; forks share the position
            with adopting_orphans():
                try:
                    process = server.fork([memory.fileno(), gate_in, *pickler.descriptors])
                except OSError as error:
                    self._lose(str(error))
                    return None
            os.write(gate_out, b"\0")
        return process

    def check_stopped(self) -> None:
        """Handles SIGCHLD: a stopped fork server is killed, as nothing waits for its return."""
        if self._server is not None and self._server.is_stopped:
            self._lose("stopped by a signal")

    def close(self) -> None:
        """Ends the process. No callback runs later."""
        self._waiting.clear()
        self._end()

    # ── the process ──
    def _report_changed_files(self, server: ForkServerProcess) -> None:
        """Reports once when packages have been installed again: forks run the former code."""
        if not server.is_outdated and read_states(self._packages) != server.packages:
            server.is_outdated = True
            reason = "packages were installed again after the fork server had imported them"
            event("forks run the former code", logging.WARNING, reason=reason, remedy="penstock migrate")

    def _receive_verdict(self, server: ForkServerProcess) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(server.connection)
        self._cancel_timer()
        verdict = ""
        with contextlib.suppress(OSError):
            verdict = server.connection.recv(forking.REASON_NBYTES).decode(errors="replace")
        if verdict == forking.READY:
            server.is_ready = True
            seconds = round(time.monotonic() - server.started, 3)
            event("fork server is ready", child_pid=server.process.pid, seconds=seconds)
            self._settle()
        elif verdict:
            self._refuse(verdict)
        else:
            reason = f"the connection is closed, and the process has not ended within {REPLY_TIMEOUT_S:g} s"
            self._timer = loop.call_later(REPLY_TIMEOUT_S, self._lose, reason)

    def _lose(self, reason: str) -> None:
        """Ends the process, which has ended already or is of no use (`reason`), and starts the next process later."""
        was_ready, lived, death = self._end()
        if DeathCause(death).status == CANNOT_START:  # the processes that are spawned now have the same end
            return self._settle()
        self._back_off.count(not was_ready, lived, is_from_outside=False)
        if self._back_off.failed_starts >= MAX_FAILED_STARTS:
            return self._refuse(reason or death)
        after = self._back_off.seconds
        event("fork server is lost", logging.WARNING, reason=reason or death, starts_again_after=after)
        self._timer = asyncio.get_running_loop().call_later(after, self.start)
        return self._settle()

    def _refuse(self, reason: str) -> None:
        """Spawns all processes from now on, until `renew`."""
        self._end()
        event("processes are spawned, not forked", logging.WARNING, reason=reason)
        self._settle()

    def _end(self) -> tuple[bool, float, str]:
        """Returns whether the process was ready, how long it has lived, and how it has ended."""
        self._cancel_timer()
        server, self._server = self._server, None
        if server is None:
            return False, 0.0, ""
        loop = asyncio.get_running_loop()
        loop.remove_reader(server.pidfd)
        loop.remove_reader(server.connection)
        return server.is_ready, time.monotonic() - server.started, server.end().text

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _settle(self) -> None:
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Makes this process the parent of descendants that lose their parent inside the block. Raises OSError."""
    before = ctypes.c_int()
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, before.value)


def reap_forks(name: str, watched: Collection[int]) -> None:
    """Kills forks of an ended fork server with unknown pids, by the name of a fork before the request runs. A watched
    fork may have the name, too."""
    while _reap_listed(name, watched):  # a fork that was listed may have forked since
        pass


def _reap_listed(name: str, watched: Collection[int]) -> bool:
    """Returns whether a fork was there."""
    has_reaped = False
    for children in Path("/proc/self/task").glob("*/children"):  # none: the kernel lists no children
        for pid in children.read_text().split():
            with contextlib.suppress(OSError):
                if int(pid) not in watched and Path(f"/proc/{pid}/comm").read_text().strip() == name:
                    os.kill(int(pid), signal.SIGKILL)
                    os.waitpid(int(pid), 0)
                    has_reaped = True
    return has_reaped


def find_packages() -> list[str]:
    """Returns the first file of each of the packages."""
    specs = map(importlib.util.find_spec, PACKAGES)
    return [spec.origin for spec in specs if spec is not None and spec.origin is not None]


def read_states(files: Sequence[str]) -> list[object]:
    """Returns states of files. A file that is written again has another state."""
    states: list[object] = []
    for file in files:
        with contextlib.suppress(OSError):  # the package is being replaced
            status = os.stat(file)
            states.append((file, status.st_ino, status.st_mtime_ns))
    return states
