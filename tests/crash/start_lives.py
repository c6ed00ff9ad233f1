"""Processes that die, fail or hang while they start.

Not in the test module: each start would import the test's client libraries, which takes four times as long as a worker.
"""

import os
import signal
import time

from penstock.engine.cluster.process import starting
from penstock.engine.cluster.topology import Cluster, ProcessId
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
