"""How many processes of this control group the kernel has killed because there was no memory.

Such a process ends by SIGKILL, as one that a person has killed; only this counter differs.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

CGROUP = Path("/proc/self/cgroup")
ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup/memory"))


def count_oom_kills(cgroup: Path = CGROUP, roots: tuple[Path, ...] = ROOTS) -> int | None:
    """Returns the counter of this process's control group; None: it cannot be read."""
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
    return None


def _read(file: Path) -> int | None:
    try:
        fields = dict(line.split() for line in file.read_text().splitlines())
        return int(fields["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None
