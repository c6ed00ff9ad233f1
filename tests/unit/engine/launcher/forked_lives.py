"""Imports and forks of a fork server in tests, in a small module: each start imports the module."""

import contextlib
import ctypes
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from penstock.engine.cluster import forking


def import_nothing() -> None: ...


def start_thread() -> None:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


def fail_to_import() -> None:
    raise ImportError("no module of that name")


def initialize_driver() -> None:
    assert ctypes.CDLL("libcuda.so.1").cuInit(0) == 0


def import_for_ever() -> None:
    time.sleep(600)


def close_connection() -> None:
    """Closes all sockets of the fork server, and hangs."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.close(int(name))
    time.sleep(600)


def end_between_forks() -> None:
    """Lets the fork server be killed when it has forked, and before the process between has ended."""
    server = os.getpid()

    def kill_server() -> None:
        if os.getppid() == server:
            os.kill(server, signal.SIGKILL)
            time.sleep(0.05)

    os.register_at_fork(before=kill_server)


def hang_in_fork() -> None:
    """Stops the fork server when it forks for a request."""
    calls = iter(range(100))
    server = os.getpid()

    def stop() -> None:
        if os.getpid() == server and next(calls):  # the first fork is the fork server's own
            os.kill(server, signal.SIGSTOP)

    os.register_at_fork(before=stop)


def wait_before_the_request() -> None:
    """Lets each fork wait until its fork server has ended, and 0.1 s longer: the fork still has the name of a fork."""
    server, run_request = os.getpid(), forking._run_request

    def wait_and_run(*request: Any) -> None:
        while Path(f"/proc/{server}").exists():
            time.sleep(0.001)
        time.sleep(0.1)
        run_request(*request)

    forking._run_request = wait_and_run


def blocked_signals() -> list[int]:
    return sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))


def describe(reply: socket.socket) -> None:
    """Sends what a test compares: of a forked process and of a spawned process."""
    import numpy as np

    facts = {
        "parent": os.getppid(),
        "directory": os.getcwd(),
        "blocked": blocked_signals(),
        "descriptors": sorted(
            os.readlink(f"/proc/self/fd/{name}").partition(":")[0]
            for name in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{name}")
        ),
        "name": Path("/proc/self/comm").read_text(),
        "ignored": [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
                    if signal.getsignal(number) is signal.SIG_IGN],
        "path": sys.path,
        "arguments": sys.argv,
    }  # fmt: skip
    reply.send(pickle.dumps((facts, random.random(), float(np.random.random()))))
    os._exit(7)


def wait_for_ever(reply: socket.socket) -> None:
    reply.send(pickle.dumps(os.getpid()))
    time.sleep(600)
