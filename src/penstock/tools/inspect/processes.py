"""The processes of this machine, from /proc."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass

from penstock.tools.format import printable

TICKS, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    name: str
    state: str  # as in /proc/PID/stat: R, S, D, T, Z …
    start: int
    cpu_seconds: float  # used so far
    rss_nbytes: int


def all_processes() -> dict[int, Process]:
    """Returns all visible processes of this machine, by pid."""
    processes = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (process := process_of(int(entry))):
            processes[process.pid] = process
    return processes


def process_of(pid: int, path: str = "/proc/{}/stat") -> Process | None:
    try:
        with open(path.format(pid), "rb") as file:
            text = file.read().decode(errors="replace")
        name, _, rest = text.partition("(")[2].rpartition(")")  # a name may hold anything, a ')' too
        fields = rest.split()
        used = (int(fields[11]) + int(fields[12])) / TICKS
        return Process(pid, int(fields[1]), printable(name), fields[0], int(fields[19]), used, int(fields[21]) * PAGE)
    except (OSError, ValueError, IndexError):
        return None


def private_nbytes_of(pid: int) -> int | None:
    """Returns the private memory of a process, without pages of segments and files. None: it cannot be read."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            line = next(line for line in file if line.startswith(b"RssAnon:"))
        return int(line.split()[1]) << 10
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def with_descendants(pid: int, among: dict[int, Process]) -> list[int]:
    children: dict[int, list[int]] = {}
    for process in among.values():
        children.setdefault(process.parent, []).append(process.pid)
    tree = [pid]
    for parent in tree:
        tree.extend(child for child in children.get(parent, ()) if child not in tree)
    return tree


def is_running(pid: int) -> bool:
    """Returns whether any thread of the process is runnable."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    states = (process_of(int(task), f"/proc/{pid}/task/{{}}/stat") for task in tasks)
    return any(state is not None and state.state == "R" for state in states)


def owner_of(pid: int) -> str:
    try:
        return f"user '{pwd.getpwuid(os.stat(f'/proc/{pid}').st_uid).pw_name}'"
    except (OSError, KeyError):
        return "another user"
