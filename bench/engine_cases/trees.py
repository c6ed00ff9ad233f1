"""Trees of processes of several kinds that are up at the same time: ours, ours with a part taken away, the classic way.

Leaves to `classic` what the core and the workers of a classic cluster do, and to `load` what is asked of a tree.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.engine_cases import spent
from bench.impls import Unavailable
from penstock.engine.cluster.logs import LOGGER
from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.engine.launcher.launcher import Launcher
from penstock.engine.protocol.config import EngineConfig

OURS, IN_CORE, NO_OVERLAP, NEITHER = "penstock", "outputs-in-core", "no-overlap", "neither"
CLASSIC_ZEROMQ = "classic-zeromq"
START = 120.0  # seconds; until a cluster serves beside others that start

_CLASSIC = {"output_processors": 0, "async_scheduling": False}


@dataclass(frozen=True)
class Way:
    """A kind of cluster: how its configuration differs from ours, and whether steps are pickled."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    is_classic: bool = False

    def check(self) -> None:
        """Raises Unavailable where it cannot run."""
        if self.is_classic and importlib.util.find_spec("zmq") is None:
            raise Unavailable("zmq is not installed")


WAYS = {
    each.name: each
    for each in (
        Way(OURS),
        Way(IN_CORE, {"output_processors": 0}),
        Way(NO_OVERLAP, {"async_scheduling": False}),
        Way(NEITHER, _CLASSIC),
        Way(CLASSIC_ZEROMQ, _CLASSIC, is_classic=True),
    )
}
SAID = {
    OURS: "ours, with one output processor, a step ahead",
    IN_CORE: "ours, --output-processors 0",
    NO_OVERLAP: "ours, each step after the result of the one before it",
    NEITHER: "ours, --output-processors 0, and without overlap",
    CLASSIC_ZEROMQ: "whole state pickled in each step, by ZeroMQ; outputs in the core's loop; no overlap",
}


class Bench(Launcher):
    """The launcher of one way's tree. Its processes say only what is a warning."""

    def __init__(self, way: Way, config: EngineConfig, scratch: Path) -> None:
        self.way = way
        self.scratch = scratch / way.name
        self.scratch.mkdir(parents=True, exist_ok=True)
        super().__init__(config)

    @classmethod
    def of(cls, way: Way, scratch: Path, **options: Any) -> Bench:
        return cls(way, EngineConfig(**{**options, **way.options}), scratch)

    def _parts_of_group(self) -> list[tuple[str, int, Any]]:
        parts = super()._parts_of_group()
        if not self.way.is_classic:
            core = partial(spent.run_core, str(self.scratch))
            return [(kind, index, partial(quietly, core if kind == "core" else run)) for kind, index, run in parts]
        from bench.engine_cases import classic

        runs = {"core": classic.run_core, "worker": classic.run_worker}
        return [(kind, index, partial(quietly, partial(runs[kind], str(self.scratch)))) for kind, index, _ in parts]

    def pid(self, kind: str) -> int:
        """Of the first process of that kind."""
        return next(child.pid for unit in self.units for child in unit.children.values() if child.member.kind == kind)


def quietly(run: Callable[[Cluster, ProcessId], None], cluster: Cluster, me: ProcessId) -> None:
    LOGGER.setLevel(logging.WARNING)
    run(cluster, me)
