"""CPU time that foreign processes use meanwhile: a round beside which they compute is not compared."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FOREIGN_LIMIT = 0.10  # cores; above, nothing is compared
UNSEEN_LIMIT = 0.35  # cores; /proc/stat samples at the timer tick and is off by a tenth where processes sleep a lot
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Look:
    """CPU seconds used so far: by processes that are not ours, by ours, and by anything as /proc/stat has it."""

    at: float
    foreign: float
    own: float
    total: float


def look() -> Look:
    """Reads /proc once. Children that were waited for count as their parent's, so short-lived ones are not lost."""
    used: dict[int, float] = {}
    parents: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                fields = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()
                parents[int(entry.name)] = int(fields[1])
                used[int(entry.name)] = sum(map(int, fields[11:15])) / TICKS
    own = {os.getpid()}
    for pid in parents:
        lineage = [pid]
        while lineage[-1] in parents and lineage[-1] not in own:
            lineage.append(parents[lineage[-1]])
        if lineage[-1] in own:
            own.update(lineage)
    ticks = list(map(int, Path("/proc/stat").read_text().split(maxsplit=11)[1:9]))
    total = (sum(ticks) - ticks[3] - ticks[4]) / TICKS  # all but idle and waiting for a disk
    ours = sum(used[pid] for pid in own if pid in used)
    return Look(time.monotonic(), sum(used.values()) - ours, ours, total)


@dataclass(frozen=True)
class Load:
    """What others took between two looks, in cores."""

    foreign_cores: float  # by processes that can be seen
    unseen_cores: float  # by /proc/stat, less what is ours; also knows other containers and a thieving hypervisor
    wall: float  # seconds between the looks

    @property
    def is_quiet(self) -> bool:
        return self.foreign_cores <= FOREIGN_LIMIT and self.unseen_cores <= UNSEEN_LIMIT

    @property
    def cores(self) -> float:
        """What to say: the exact figure, unless there is more that it cannot see."""
        return self.unseen_cores if self.unseen_cores > UNSEEN_LIMIT else self.foreign_cores


def load_between(before: Look, after: Look) -> Load:
    wall = max(after.at - before.at, 1e-3)
    foreign = (after.foreign - before.foreign) / wall
    unseen = (after.total - before.total - (after.own - before.own)) / wall
    return Load(max(foreign, 0.0), max(unseen, 0.0), wall)


class Patience:
    """How long a run waits for the others to be quiet, disturbed rounds included, in all."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    def spend(self, seconds: float) -> None:
        self._left -= seconds

    def wait_for_quiet(self) -> bool:
        """Blocks until a second was quiet; False if patience ended first."""
        while self._left > 0:
            before = look()
            time.sleep(1.0)
            self.spend(1.0)
            if load_between(before, look()).is_quiet:
                return True
        return False
