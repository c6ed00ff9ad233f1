"""Spawns a process. Imports little: `penstock serve` spawns the fork server before it has read its options."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

SENT_TO_ALL = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def spawn_process(target: Callable[..., object], values: tuple[Any, ...], name: str) -> SpawnProcess:
    """Starts a process that runs `target(*values)`. Raises OSError.

    Signals of the terminal, or of an init system, reach all processes; a child blocks them from its first instruction
    on. The tracker ignores the others, and keeps the mask for SIGHUP. It starts first, as starting it resets the mask
    for the others.
    """
    process = multiprocessing.get_context("spawn").Process(target=target, args=values, name=name)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, SENT_TO_ALL)
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def is_importing_main() -> bool:
    """Returns whether a spawned process still runs the program's main module, before the process's target."""
    main = sys.modules.get("__mp_main__")
    return main is not None and main is not sys.modules["__main__"]


def require_main_file() -> None:
    """Raises ValueError if no process can be spawned, as the main module of the program has no file (`python -`)."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is not None and main.__spec__ is None and not os.path.exists(file):
        raise ValueError(
            f"a spawned process runs the file of the program, and {file} is none: write the program to a file"
        )


def inherited() -> tuple[object, ...]:
    """Returns the facts that a process inherits. A fork inherits them from the fork server, not from the launcher."""
    streams = []
    for fd in range(3):
        with contextlib.suppress(OSError):  # it is closed
            status = os.fstat(fd)
            streams.append((fd, status.st_dev, status.st_ino))
    texts = []
    for name in ("cgroup", "limits", "oom_score_adj"):
        with contextlib.suppress(OSError):
            texts.append(Path(f"/proc/self/{name}").read_text())
    directory = os.readlink("/proc/self/cwd")
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    return dict(os.environ), directory, os.sched_getaffinity(0), nice, streams, texts
