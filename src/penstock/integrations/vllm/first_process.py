"""All processes of a vLLM server end when the first process, which a user has started, was killed.

Workers of vLLM watch the engine core. Engine cores, API servers and the coordinator of data parallel engines would go
on, and keep memory. Open streams end with an error: an engine core tells the API servers that it is dead before it
aborts requests, as clients would take an aborted request for a complete answer. Connections are refused at once: the
processes take seconds to end.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from threading import Thread
from typing import Any

from penstock.integrations.vllm.settings import LOGGER


def end_with_parent(at_end: Callable[[], None] = lambda: None) -> None:
    """Has SIGTERM end this process when the parent of `multiprocessing` has ended, after a call of `at_end`."""
    if multiprocessing.parent_process() is not None:
        Thread(target=await_parent, args=(at_end,), name="PenstockParent", daemon=True).start()


def await_parent(at_end: Callable[[], None]) -> None:
    LOGGER.error("%s", ended_parent(None))
    at_end()
    os.kill(os.getpid(), signal.SIGTERM)


def ended_parent(timeout: float | None) -> str:
    """Waits for the end of the process that started this process. Returns the text about the end; empty: it lives.

    A pidfd: `parent.join` waits for a pipe of which later forks of the parent have the other end, too.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return ""
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(parent.pid)
        try:
            if not wait([pidfd], timeout):
                return ""
        finally:
            os.close(pidfd)
    return f"{parent.name} (pid {parent.pid}), which started this process, has ended"


def run_coordinator(*arguments: Any, **keywords: Any) -> None:
    """In the place of vLLM's function, which a process runs that is spawned and loads no plugins."""
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    end_with_parent()
    run = DPCoordinatorProc.run_coordinator
    getattr(run, "__wrapped__", run)(*arguments, **keywords)


def replace_coordinator(cls: Any) -> None:
    run_coordinator.__wrapped__ = cls.run_coordinator  # type: ignore[attr-defined]
    cls.run_coordinator = staticmethod(run_coordinator)


def leave_requests(core: Any) -> None:
    """Has the API servers know at once that the engine core is dead. Later outputs are not sent."""
    core.vllm_config.shutdown_timeout = 0
    core.output_queue.put_nowait(core.ENGINE_CORE_DEAD)


def refuse(ports: Sequence[socket.socket]) -> None:
    """Has the kernel refuse connections, in all processes that have the socket."""
    for port in ports:
        with suppress(OSError):  # another process was first
            port.shutdown(socket.SHUT_RDWR)


def drop_port() -> None:
    """Closes the bound socket that an engine core has from a fork, with its number kept: after the death of the first
    process it would take connections until the core and all workers have ended."""
    with open(os.devnull, "rb") as nothing:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):  # the listing had a descriptor of its own
                if is_bound_port(descriptor):
                    os.dup2(nothing.fileno(), descriptor, inheritable=False)


def is_bound_port(descriptor: int) -> bool:
    """Returns whether it is a socket for connections that is bound, and neither listens nor is connected."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as bound:
        if bound.family not in (socket.AF_INET, socket.AF_INET6) or bound.type != socket.SOCK_STREAM:
            return False
        try:
            bound.getpeername()
        except OSError:
            return bound.getsockname()[1] != 0 and not bound.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return False
