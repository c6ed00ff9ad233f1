"""The remote end of a rank link: takes the place of the core on a node with workers only.

Passes steps on to the local workers, and messages of the workers to the core. The workers start to load when the link
is up, as the link brings the port at which all ranks meet, and end with the remote core. When a worker ends, the
launcher kills the rest, and the remote core reports the cause to the home node.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

from penstock.bridge import InboundChannel, InboundWords, Lane, Link, LinkDied, LinkSpec, OutboundChannel, StoreValues
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.process import RemoteLoss, starting
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.engine.cluster.verdict_board import Cause
from penstock.engine.nodes.group_link import LOSSES_NAME
from penstock.engine.nodes.rank_link import INBOX_NAME, SERVING_NAME, STEPS_NAME, rank_link, rank_port
from penstock.engine.nodes.uplink import BOARD_POLL_S, Uplink


def run(cluster: Cluster, me: ProcessId) -> None:
    """Stands in the core's place until the workers or the link end. Raises RemoteLoss."""
    nodes = cluster.config.nodes
    assert nodes is not None, "the core is on another node"
    with starting():
        remote_core = RemoteCore(cluster, me, me.group, rank_port(nodes, me.group, nodes.rank))
    remote_core.run()


class RemoteCore(Uplink):
    def run(self) -> None:
        self._home_serving = memoryview(bytearray(8)).cast("Q")
        link = self._connect(self._me.incarnation)
        if link is None:  # the node drains
            return
        event("linked to the home node", group=self._group, remote=link.remote.name, remote_pid=link.remote.pid)
        self._row[StatusBoard.RENDEZVOUS] = int(link.remote.info)
        threading.Thread(target=self._watch, args=(link, self._me.incarnation), daemon=True).start()
        try:
            reason = link.run()
        except LinkDied as death:
            reason = str(death)
        stats = link.stats()
        event(
            "link ended",
            logging.WARNING,
            group=self._group,
            frames_received=stats.frames_received,
            frames_sent=stats.frames_sent,
            reason=reason,
        )
        raise RemoteLoss(Cause.OUTSIDE, f"the link to the home node has ended: {reason}")

    def _is_wanted(self, incarnation: int) -> bool:
        return not self._board.is_draining

    def _spec(self) -> LinkSpec:
        cluster, me, nodes = self._cluster, self._me, self._cluster.config.nodes
        assert nodes is not None, "the core is on another node"
        group = cluster.groups[me.group]
        return replace(
            rank_link(cluster.config, me.group, nodes.rank, f"{me} on node {nodes.rank}"),
            channels=[
                InboundChannel(STEPS_NAME, group.steps, [Lane(name=str(me))], on_death="forward"),
                OutboundChannel(INBOX_NAME, group.inbox, peer_name=str(me), on_death="forward"),
                OutboundChannel(LOSSES_NAME, self._losses, peer_name=str(me)),
            ],
            words=[InboundWords(SERVING_NAME, self._home_serving)],
            values=None if cluster.store is None else StoreValues(cluster.store, cluster.pulls[me.group]),
            on_death=lambda death: None,  # the launcher restarts the group, here and at home
            on_resume=self._on_resume,
        )

    # ── in a separate thread ──
    def _watch(self, link: Link, incarnation: int) -> None:
        """Waits until the group serves, and then until the local workers end or the node drains. Reports the end to the
        home node."""
        while not self._home_serving[0] and not self._board.is_draining:
            time.sleep(BOARD_POLL_S)
        self._row[StatusBoard.SERVING] = incarnation
        super()._watch(link, incarnation)
