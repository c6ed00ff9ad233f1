"""Imports and forks of a fork server in tests, in a small module: each start imports the module."""

import os
import random
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path


def import_nothing() -> None: ...


def start_thread() -> None:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


def fail_to_import() -> None:
    raise ImportError("no module of that name")


def import_for_ever() -> None:
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


def blocked_signals() -> list[int]:
    return sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))


def describe(reply: Connection) -> None:
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
    reply.send((facts, random.random(), float(np.random.random())))
    os._exit(7)


def wait_for_ever(reply: Connection) -> None:
    reply.send(os.getpid())
    time.sleep(600)
