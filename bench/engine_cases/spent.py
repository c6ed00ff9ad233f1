"""Where the core's time goes: the parts of a step, timed in the core of any cluster, and told when it ends.

One step in so many is timed, so that the clock does not cost the others anything. Leaves to the board what the core
spends in all.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.output.output_state import OutputState

FILE = "spent.json"
EVERY = 4  # steps, of which one is timed
LAST = 100  # of those that are; those of the end: all decode
# By name, where the method stands; a cluster of another kind has not got all of them.
PARTS = {
    "take in": "_receive_requests",
    "plan": "_scheduler.schedule",
    "build": "_plan.build",
    "whole state": "_whole_state",
    "apply": "_schedule.apply",
    "send": "_steps.send",
    "note sent": "_scheduler.on_sent",
    "note done": "_scheduler.on_result",
    "outputs": "_inline_output.process",
    "tokens": "_outputs.send_queued",
    "board": "_publish",
}
REST = "the rest"  # what of a step stands in no part: the loop between them, and the clock


def run_core(folder: str, cluster: Cluster, me: ProcessId) -> None:
    run(
        EngineCore(cluster, me, OutputState.of(cluster.config) if cluster.config.output_processors == 0 else None),
        folder,
    )


def run(core: EngineCore, folder: str) -> None:
    spent = _Spent(core)
    core.run()
    core.close()
    Path(folder, FILE).write_text(json.dumps(spent.medians()))


class _Spent:
    """Nanoseconds. A step's time goes from one look at the board to the next, but for where the core waits."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._places = {part: result for part, place in PARTS.items() if (result := _find(core, place)) is not None}
        self._taken: dict[str, deque[int]] = {part: deque(maxlen=LAST) for part in (*self._places, REST)}
        self._now = dict.fromkeys(self._places, 0)  # in the step that is being timed
        self._steps = self._own = 0
        self._publish = core._publish
        core._publish = self._turn  # type: ignore[method-assign]

    def medians(self) -> dict[str, float]:
        """Medians, in microseconds."""
        return {part: statistics.median(taken) / 1e3 for part, taken in self._taken.items() if taken}

    def _turn(self) -> None:
        """In the place of what ends a step."""
        is_timed = self._steps % EVERY == EVERY - 1
        begin = time.perf_counter_ns()
        self._publish()
        self._now["board"] = time.perf_counter_ns() - begin
        own = self._spent_so_far()
        self._steps += 1
        if is_timed:
            for part, taken in self._now.items():
                self._taken[part].append(taken)
            self._taken[REST].append(own - self._own - sum(self._now.values()))
            for owner, name, method in self._places.values():
                if name != "_publish":
                    setattr(owner, name, method)
        elif self._steps % EVERY == EVERY - 1:
            for part, (owner, name, method) in self._places.items():
                self._now[part] = 0
                if name != "_publish":
                    setattr(owner, name, partial(self._timed, part, method))
        self._own = self._spent_so_far()  # putting the clock in its places is no part of the next step

    def _spent_so_far(self) -> int:
        return self._core._own_ns + time.monotonic_ns() - self._core._woke_ns

    def _timed(self, part: str, method: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.perf_counter_ns()
        try:
            return method(*arguments)
        finally:
            self._now[part] += time.perf_counter_ns() - begin


def _find(core: EngineCore, place: str) -> tuple[Any, str, Callable[..., Any]] | None:
    """Returns the owner of a method, its name, and the method. None: the core has no such part."""
    *path, name = place.split(".")
    owner: Any = core
    for each in path:
        owner = getattr(owner, each, None)
    method = getattr(owner, name, None)
    return None if method is None else (owner, name, method)


def read(folder: Path) -> dict[str, float]:
    """Microseconds, by part; none, where the core did not come to its end."""
    path = folder / FILE
    output: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    return output
