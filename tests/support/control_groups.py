"""Control groups below ours that limit what a process may use."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.processes import IS_SANITIZED

# By controller: the file of a limit in version 1, and in version 2.
FILES = {"memory": ("memory.limit_in_bytes", "memory.max"), "cpu": ("cpu.cfs_quota_us", "cpu.max")}


@contextmanager
def control_group(controller: str, limit: int) -> Iterator[Path]:
    """Makes a control group with a limit in bytes, or in microseconds of each 100 ms. Skips without them."""
    if os.geteuid() != 0:
        pytest.skip("only root can make a control group")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            parent, file = Path(f"/sys/fs/cgroup/{controller}{path}"), FILES[controller][0]
        elif controllers == "":
            parent, file = Path(f"/sys/fs/cgroup{path}"), FILES[controller][1]
        else:
            continue
        group = parent / f"penstock-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / file).write_text(str(limit))
        except OSError:
            group.rmdir()
            continue
        try:
            yield group
        finally:
            with suppress(FileNotFoundError):
                group.rmdir()
        return
    pytest.skip(f"there is no control group for {controller} that may be written to")


@contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    if IS_SANITIZED:
        pytest.skip("a sanitizer's own memory counts against the limit")
    with control_group("memory", limit) as group:
        yield group


def raise_limit(group: Path, nbytes: int) -> None:
    """Sets the limit of a `memory_group` anew."""
    next(group / name for name in FILES["memory"] if (group / name).exists()).write_text(str(nbytes))
