"""Starts the process of the fork server: for `penstock serve` before the options are read.

The process imports torch and transformers, most of the time of a start, beside the imports of the launcher. This module
imports little. `fork_server` sends the process all further imports.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import SpawnProcess
from typing import NamedTuple

from penstock.engine.cluster.spawning import inherited, spawn_process

# Options that may choose another device, or no start at all.
EXCLUDED = ("--device", "--fork-server", "--config", "--help", "-h")


class LaunchedProcess(NamedTuple):
    process: SpawnProcess
    connection: socket.socket
    inherited: tuple[object, ...]
    started: float

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()
        self.process.close()


_early: list[LaunchedProcess] = []  # at most 1 process, until `take`


def launch(first: Callable[[], object]) -> LaunchedProcess:
    """Starts a process that runs `first`, and then waits for further imports. Raises OSError."""
    facts, started = inherited(), time.monotonic()
    local, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with remote:
            process = spawn_process(_serve_forks, (first, remote, os.getpid()), "fork server")
    except BaseException:
        local.close()
        raise
    return LaunchedProcess(process, local, facts, started)


def start_early(words: Sequence[str]) -> None:
    """Starts the process for a command with the arguments `words`, unless an option may choose another device."""
    if not any(word.startswith(EXCLUDED) for word in words):
        with contextlib.suppress(OSError):  # the launcher tries again, and reports the error
            _early.append(launch(import_engine))
            atexit.register(end_early)  # runs before multiprocessing waits for its children


def take() -> LaunchedProcess:
    """Returns the early process, or starts a process. Raises OSError."""
    launched = _early.pop() if _early else None
    if launched is not None and (launched.process.exitcode is not None or launched.inherited != inherited()):
        launched.end()
        launched = None
    return launch(import_nothing) if launched is None else launched


def end_early() -> None:
    """Ends an early process that no fork server has taken."""
    while _early:
        _early.pop().end()


def import_engine() -> None:
    from penstock.engine.worker import worker

    worker.import_engine()


def import_nothing() -> None: ...


def _serve_forks(first: Callable[[], object], connection: socket.socket, parent: int) -> None:
    from penstock.engine.cluster import forking

    forking.serve_forks(first, connection, parent)
