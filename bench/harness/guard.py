"""Runs a command, and ends all of its descendants: when it ends, at SIGTERM, and when the process that started it dies.

`python guard.py COMMAND …`. PR_SET_PDEATHSIG reaches the children of a benchmark alone; a server's own children would
outlive both. The command has a session of its own, so that stopping the server leaves the guard awake. What the tree
had open in /dev/shm is removed when its processes have ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SHM = "/dev/shm/"
GRACE = 5.0  # seconds from SIGTERM to SIGKILL
LOOK = 0.02  # seconds


def descendants(pid: int) -> list[int]:
    """Returns the living descendants of a process, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()[:2]
                if state != b"Z":
                    children.setdefault(int(parent), []).append(int(entry.name))
    result = [pid]
    for parent_pid in result:
        result += children.get(parent_pid, [])
    return result[1:]


def shared_files(pids: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yields a process and the path of each file that it has open in shared memory, a memfd's as /proc has it."""
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(entry.path)
                    if target.startswith((SHM, "/memfd:")):
                        yield pid, entry.path
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/map_files"):
                with contextlib.suppress(OSError):
                    target = os.readlink(entry.path)
                    if target.startswith((SHM, "/memfd:")):
                        yield pid, entry.path


def _reap(command: int) -> int | None:
    """Reaps what has ended. Returns the exit status of the command once it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == command:
                status = os.waitstatus_to_exitcode(ended[1])
    return status


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _end(command: int) -> None:
    me = os.getpid()
    tree = descendants(me)
    files = set()
    for _, path in shared_files(tree):
        with contextlib.suppress(OSError):
            files.add(os.readlink(path))
    _signal(tree, signal.SIGCONT)
    _signal([command] if command in tree else tree, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while (tree := descendants(me)) and time.monotonic() < deadline:
        _reap(command)
        time.sleep(LOOK)
    while tree := descendants(me):
        _signal(tree, signal.SIGKILL)
        _reap(command)
        time.sleep(LOOK)
    with contextlib.suppress(ChildProcessError):
        while True:  # all have ended, and are zombies until they are reaped
            os.waitpid(-1, 0)
    for path in files:
        if path.startswith(SHM):
            with contextlib.suppress(OSError):
                os.unlink(path)


def main(command: Sequence[str]) -> int:
    awaited = {signal.SIGTERM, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark decides what an interrupt means
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    process = subprocess.Popen(command, start_new_session=True, preexec_fn=prepare)
    status = None
    while status is None and signal.sigwait(awaited) == signal.SIGCHLD:
        status = _reap(process.pid)
    _end(process.pid)
    return 128 + signal.SIGTERM if status is None else status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
