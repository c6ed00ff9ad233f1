"""Workers for tests of groups that stay away: they fail, or wait behind a gate, when they are started again."""

from __future__ import annotations

import os
import time

from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.engine.worker import worker

GATE = "PENSTOCK_TEST_GATE"  # variable of the environment: the file that closes the gate while it exists


def starts_behind_the_gate(cluster: Cluster, me: ProcessId) -> None:
    while me.incarnation > 1 and os.path.exists(os.environ[GATE]):
        time.sleep(0.01)
    worker.run(cluster, me)


def fails_when_restarted(cluster: Cluster, me: ProcessId) -> None:
    if me.incarnation > 1:
        raise ValueError("the model's files have gone")
    worker.run(cluster, me)
