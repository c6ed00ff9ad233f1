"""A group whose workers are on two nodes answers as one on a single node, and is restarted when either part is lost.

The simulated device's rule says what an answer is. The other node is in a pid namespace of its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from penstock.engine.client.client import Client
from penstock.engine.cluster.migration_counters import MigrationCounters
from penstock.engine.cluster.status_board import StatusBoard
from tests import tiers
from tests.crash.test_engine_migration import counted, migrations, readers, require_exact
from tests.support.engine import START
from tests.support.nodes import TwoNodes, has_namespaces, two_nodes

pytestmark = pytest.mark.skipif(not has_namespaces(), reason="unshare --pid is not permitted here")

OPEN = 8  # requests, when the blow falls


async def require_restarted(tree: TwoNodes, client: Client) -> None:
    await tree.serving_again(client)
    await tree.must_be_empty()
    await require_exact(tree, await readers(client, OPEN, 5))


def test_a_step_crosses_once_for_all_ranks_of_the_other_node() -> None:
    async def scene() -> None:
        async with two_nodes(spread=True, tensor_parallel_size=4) as tree, Client(tree.launcher.tree, 0) as client:
            await require_exact(tree, await readers(client, OPEN))
            await tree.must_be_empty()
            steps = tree.number(StatusBoard.STEPS)
            tree.child("core").signal(signal.SIGKILL)
            await tree.until(lambda: tree.remote.events("link ended"))
            ended = tree.remote.events("link ended")[0]
            assert ended["frames_received"] == steps + 1  # and the first message, Begin
            assert ended["frames_sent"] == 2  # each rank over there is ready
            await require_restarted(tree, client)

    asyncio.run(scene())
