"""Counts the processes of this control group that the kernel has killed for lack of memory.

A process killed by the kernel ends by SIGKILL, like a process killed by a person; only this counter differs. Where the
counter of the control group cannot be read, the counter of the whole machine is used: while the machine's counter
rests, no process of this group was killed; when the counter moves, a process of this group may have been killed.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

CGROUP = Path("/proc/self/cgroup")
MACHINE = Path("/proc/vmstat")
ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup/memory"))


def count_oom_kills(cgroup: Path = CGROUP, roots: tuple[Path, ...] = ROOTS, machine: Path = MACHINE) -> int | None:
    """Returns the counter of this process's control group, or that of the machine; None: neither can be read."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = cgroup.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        name = "memory.oom_control" if controllers else "memory.events"  # of version 1 and 2
        for root in roots:
            # A container that has a name space of its own finds its group at the root.
            for folder in (root / path.lstrip("/"), root):
                count = _read(folder / name)
                if count is not None:
                    return count
    return _read(machine)


def _read(file: Path) -> int | None:
    try:
        fields = dict(line.split() for line in file.read_text().splitlines())
        return int(fields["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None
