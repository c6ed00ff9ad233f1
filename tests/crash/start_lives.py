"""Processes that die, fail or hang while they start.

Not in the test module: each start would import the test's client libraries, which takes four times as long as a worker.
"""

import itertools
import os
import pickle
import signal
import time
from typing import Any

from penstock.engine.cluster import forking, process
from penstock.engine.cluster.process import starting
from penstock.engine.cluster.topology import Cluster, ProcessId, processes_of_group
from penstock.engine.launcher import launcher
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.worker import worker

FAILED = 4  # starts in a row, which is more than a unit has that has never served


def fails_while_it_starts_again(cluster: Cluster, me: ProcessId) -> None:
    """Is killed, or reports an error that would end a tree that has never served."""
    if 1 < me.incarnation <= 1 + FAILED:
        if me.incarnation % 2:
            has_no_memory(cluster, me)
        os.kill(os.getpid(), signal.SIGKILL)
    worker.run(cluster, me)


def is_killed_after_a_while(cluster: Cluster, me: ProcessId) -> None:
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)


def has_no_memory(cluster: Cluster, me: ProcessId) -> None:
    with starting():
        raise MemoryError("no room for keys and values:\n0.5 MiB left")


def wait_for_the_end(cluster: Cluster, me: ProcessId) -> None:
    time.sleep(600)


# ── forks that stop on their way ─────────────────────────────────────────────────────────────────────────────────────
STAGES = {  # of a fork, and the function that begins the stage
    "forked": (forking, "_run_request"),
    "admitted": (forking, "prctl"),
    "renamed": (pickle, "load"),
    "loaded": (process, "child_main"),
}


def import_and_pause(stage: str, config: EngineConfig) -> None:
    """Runs in the fork server. Forks of the second life of a group stay in this stage."""
    launcher.import_programs(config)
    fork_twice, forks, first_life = forking._fork_twice, itertools.count(1), len(processes_of_group(config))
    is_second = False

    def count_and_fork(*request: Any) -> int:
        nonlocal is_second
        is_second = next(forks) > first_life
        return fork_twice(*request)

    owner, name = STAGES[stage]
    begin = getattr(owner, name)

    def pause(*arguments: Any) -> Any:
        if is_second:
            time.sleep(600)
        return begin(*arguments)

    forking._fork_twice = count_and_fork
    setattr(owner, name, pause)
