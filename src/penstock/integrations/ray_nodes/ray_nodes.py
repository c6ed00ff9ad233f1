"""Places the nodes without servers on machines of a Ray cluster, one on each, and starts again those that end.

A program that the launcher of the home node runs, on a machine of the cluster. No request passes through Ray.

    standard input    a `NodePlan` as JSON, in a line; at its end all nodes end
    standard output   the address of this machine in the cluster, in a line
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import threading
import time
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES_POLL_S = 1.0  # seconds between two looks at all nodes
RESTART_PAUSE = 2.0  # seconds after the end of a node, before it is started again
KEEPER = "penstock.integrations.ray_serve.engine_keeper"
LOGGER = logging.getLogger("penstock.ray_nodes")


class NodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What runs where."""

    commands: list[list[str]]  # arguments of Python, for each node
    environment: dict[str, str]  # besides that of the machine
    bundle: dict[str, float]  # resources of a node, by Ray's names
    grace: float  # seconds from SIGTERM to SIGKILL
    timeout: float  # seconds until the cluster has room for all nodes


class NodeActor:
    """One node, as a subprocess of the actor's machine, in a session of its own. It ends with the actor."""

    def __init__(self, arguments: list[str], environment: dict[str, str], grace: float) -> None:
        keeper = importlib.util.find_spec(KEEPER)
        assert keeper is not None and keeper.origin is not None, "it is a part of this package"
        self._keeper = subprocess.Popen(
            # -I: nothing of the environment, or of the script's folder, is imported by the keeper
            [sys.executable, "-I", keeper.origin, str(grace), sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **environment},
        )

    def run(self) -> str:
        """Waits for the end of the node, and returns how it ended, with the end of its log."""
        assert self._keeper.stdout is not None, "it is a pipe"
        text = self._keeper.stdout.read().decode(errors="replace").partition("\n")[2].strip()
        status = self._keeper.wait()
        return text or f"its keeper has ended with status {status}"


class RayNodes:
    """The nodes of one plan."""

    def __init__(self, plan: NodePlan, home: str) -> None:
        """`home`: Ray's id of the machine of the home node, which gets no other node. Raises RayError."""
        self._plan = plan
        self._group = placement_group(
            [plan.bundle] * len(plan.commands),
            strategy="STRICT_SPREAD",
            bundle_label_selector=[{"ray.io/node-id": f"!{home}"}] * len(plan.commands),
        )
        ray.get(self._group.ready(), timeout=plan.timeout)
        self._actors: dict[int, Any] = {}
        self._due: dict[int, float] = dict.fromkeys(range(len(plan.commands)), 0.0)  # when each is started again
        self._running: dict[Any, int] = {}

    def keep(self) -> None:
        """Starts nodes that are due, and looks which have ended."""
        now = time.monotonic()
        for index, due in list(self._due.items()):
            if now >= due:
                del self._due[index]
                self._start(index)
        done, _ = ray.wait(list(self._running), timeout=NODES_POLL_S) if self._running else ([], [])
        for ended in done:
            index = self._running.pop(ended)
            try:
                how = ray.get(ended)
            except RayError as error:  # its actor has died, or its machine
                how = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            LOGGER.warning("node %d has ended: %s", index + 1, how)
            ray.kill(self._actors.pop(index))
            self._due[index] = time.monotonic() + RESTART_PAUSE

    def _start(self, index: int) -> None:
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        actor = ray.remote(num_cpus=0, max_restarts=0)(NodeActor).options(scheduling_strategy=strategy)
        plan = self._plan
        self._actors[index] = actor.remote(plan.commands[index], plan.environment, plan.grace)
        self._running[self._actors[index].run.remote()] = index


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    ray.init(address=sys.argv[1], log_to_driver=False)
    print(ray.util.get_node_ip_address(), flush=True)  # type: ignore[no-untyped-call,unused-ignore]
    plan = msgspec.json.decode(sys.stdin.buffer.readline(), type=NodePlan)
    nodes = RayNodes(plan, ray.get_runtime_context().get_node_id())
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.buffer.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    while not ended.is_set():
        nodes.keep()
    ray.shutdown()  # ends the actors, which are this driver's
