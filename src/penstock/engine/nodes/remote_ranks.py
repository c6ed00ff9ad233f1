"""The home node's end of a rank link: takes the place of a group's workers on a remote node.

A process of the group, for one incarnation and one link: receives each step once for all remote workers, and passes the
workers' messages on to the core. When the core dies, the process stays for a moment, as the remote node may know the
cause.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from penstock.bridge import ChannelDeath, InboundChannel, Lane, LinkSpec, OutboundChannel, OutboundWords, StoreValues
from penstock.engine.cluster.process import starting
from penstock.engine.cluster.process_end import CAUSED_BY_PEER_DEATH
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import AGAIN, Cluster, ProcessId, live_receivers
from penstock.engine.nodes.group_bridge import GroupBridge
from penstock.engine.nodes.group_link import LOSSES_NAME
from penstock.engine.nodes.rank_link import INBOX_NAME, SERVING_NAME, STEPS_NAME, rank_link, rank_port
from penstock.engine.protocol.messages import LossReport

REPORT_TIMEOUT = 1.0  # seconds; for the cause from the other node, when the core has died


class CoreDied(Exception):
    """The core of the group has died, and the other node has not said why."""


def run(cluster: Cluster, me: ProcessId) -> None:
    """Stands in the place of the ranks of node `me.index` until the core or the link ends. Raises RemoteLoss."""
    nodes = cluster.config.nodes
    assert nodes is not None, "the other ranks are on another node"
    with starting():
        remote_ranks = RemoteRanks(cluster, me, me.index, rank_port(nodes, me.group, me.index))
    remote_ranks.run()


class RemoteRanks(GroupBridge):
    _has_core_died = _is_late = False  # _is_late: the other node has not reported a cause in time

    def run(self) -> None:
        self._await_core()
        reason = self._run_link()
        if self._is_late and self._loss is None:
            raise CoreDied(f"{CAUSED_BY_PEER_DEATH}the core, and node {self._node} has not said why")
        raise self._loss_for(reason)

    def _await_core(self) -> None:
        """Waits until the core receives, so that no message of the remote node is missed."""
        while not live_receivers(self._cluster.inboxes[self._me.group], self._me.incarnation):
            time.sleep(AGAIN)

    def _spec(self) -> LinkSpec:
        cluster, me = self._cluster, self._me
        lanes = [Lane(cluster.worker_lane(rank), str(me)) for rank in cluster.config.ranks_of(self._node)]
        receiver = cluster.remote_steps_receiver(self._node)
        rendezvous = cluster.rendezvous
        assert rendezvous is not None, "the launcher opens it for the ranks of several nodes"
        return replace(
            rank_link(cluster.config, me.group, self._node, f"{me} on node 0"),
            channels=[
                OutboundChannel(STEPS_NAME, cluster.groups[me.group].steps, receiver, str(me), on_death="forward"),
                InboundChannel(INBOX_NAME, cluster.inboxes[me.group], lanes, on_death="forward"),
                InboundChannel(LOSSES_NAME, self._losses, [Lane(name=str(me))]),
            ],
            words=[
                OutboundWords(SERVING_NAME, self._board.row(me.group)[StatusBoard.SERVING : StatusBoard.SERVING + 1])
            ],
            values=None if cluster.store is None else StoreValues(cluster.store),
            info=str(rendezvous.port).encode(),
            on_death=self._process_death,
            on_resume=self._on_resume,
        )

    def _on_link(self) -> None:
        """The core says when the group serves."""

    def _write_requests(self, report: LossReport) -> None:
        """The core has the requests in flight, and has written them."""

    def _process_death(self, death: ChannelDeath) -> None:
        dead = ProcessId.of(death.name)
        if death.is_remote or dead is None or (dead.kind, dead.incarnation) != ("core", self._me.incarnation):
            return
        if not self._has_core_died:
            self._has_core_died = True
            timer = threading.Timer(REPORT_TIMEOUT, self._give_up)
            timer.daemon = True
            timer.start()

    # ── in a separate thread ──
    def _give_up(self) -> None:
        assert self._link is not None, "the link has begun"
        self._is_late = self._link.is_connected  # without a connection the node may be lost, which is the cause then
        self._link.stop("the core has died")
