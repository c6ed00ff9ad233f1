"""The bridge of a group on a remote node: takes the place of the group's core on the home node.

An incarnation of a bridge has one link, and the group serves while linked. When the link or the remote group ends, the
bridge ends with the reason, and the launcher restarts the bridge, which waits for the next link. The ends stay open
until the process is gone, so servers learn of the death, and submit the requests again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import replace

import penstock
from penstock import EndOfChannel, PeerDied, Timeout
from penstock.bridge import (
    ChannelDeath,
    InboundChannel,
    InboundWords,
    Lane,
    Link,
    LinkDied,
    LinkSpec,
    Listener,
    OutboundChannel,
    StoreValues,
)
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.process import RemoteLoss, starting
from penstock.engine.cluster.status_board import ProcessEntry, StatusBoard
from penstock.engine.cluster.topology import Cluster, ProcessId, all_processes
from penstock.engine.cluster.verdict_board import Cause, VerdictBoard, request_words
from penstock.engine.nodes.group_link import (
    LOSSES_NAME,
    ROW_NAME,
    ROW_PLACES,
    group_link,
    model_word,
    node_secret,
    node_tls,
    port_of,
)
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import LOSSES, LossReport

ACCEPT_TIMEOUT = 60.0  # seconds; then the log says again which node is missing


def run(cluster: Cluster, me: ProcessId) -> None:
    """Serves a group of a remote node until the group or the link ends. Raises RemoteLoss."""
    config = cluster.config
    assert config.nodes is not None, "a group of another node is a group of several nodes"
    with starting():
        port = port_of(config.nodes, config.data_parallel_size, me.group)
        bridge = GroupBridge(cluster, me, config.node_of(me.group), port)
    bridge.run()


class GroupBridge:
    def __init__(self, cluster: Cluster, me: ProcessId, node: int, port: int) -> None:
        config = cluster.config
        assert config.nodes is not None, "the other end is on one of several nodes"
        self._cluster = cluster
        self._me = me
        self._node = node
        self._board = StatusBoard(cluster.board, writable=True)
        self._servers = ServerLives(config, self._board)
        self._losses: penstock.Ring[LOSSES] = penstock.Ring(LOSSES, name=f"losses {me.group}")
        self._model = 0  # `StatusBoard.MODEL` of both sides
        self._loss: RemoteLoss | None = None  # the first reason to end the link
        self._link: Link | None = None
        address = config.nodes.address, port
        self._listener = Listener(address, secret=node_secret(), tls=node_tls(config.nodes))

    def run(self) -> None:
        raise self._loss_for(self._run_link())

    def _run_link(self) -> str:
        """Returns why the link has ended."""
        self._link = link = self._accept()
        event("node joined", node=self._node, group=self._me.group, remote=link.remote.name, remote_pid=link.remote.pid)
        threading.Thread(target=self._receive_loss, daemon=True).start()
        self._on_link()
        try:
            return link.run()
        except LinkDied as death:
            return str(death)

    def _loss_for(self, reason: str) -> RemoteLoss:
        """Returns the loss of the group that follows from the end of the link."""
        loss = self._loss or RemoteLoss(Cause.OUTSIDE, f"the link to node {self._node} has ended: {reason}")
        event(
            "node lost",
            logging.WARNING,
            node=self._node,
            group=self._me.group,
            cause=loss.cause.name.lower(),
            reason=loss,
        )
        return loss

    def _on_link(self) -> None:
        row = self._board.row(self._me.group)
        row[StatusBoard.MODEL] = self._model  # of both sides, as they have compared
        row[StatusBoard.SERVING] = self._me.incarnation

    def _on_resume(self, pause: float, reason: str) -> None:
        self._board.row(self._me.group)[StatusBoard.LINK_RESUMPTIONS] += 1
        pause_ms, group = round(pause * 1e3, 1), self._me.group
        event("link resumed", logging.WARNING, node=self._node, group=group, pause_ms=pause_ms, reason=reason)

    def _spec(self) -> LinkSpec:
        cluster, me = self._cluster, self._me
        self._model = model_word(cluster.config)
        # The label of each lane is the name of the bridge: the death of the bridge is the group's.
        lanes = [
            Lane(cluster.delta_lane(me.group, output), str(me))
            for output in (None, *range(cluster.config.output_processors))
        ]
        answers = [
            InboundChannel(f"deltas {server}", inbox, lanes, on_death="forward")
            for server, inbox in enumerate(cluster.servers)
        ]
        return replace(
            group_link(cluster.config, me.group, f"{me} on node 0", self._model),
            channels=[
                OutboundChannel("inbox", cluster.inboxes[me.group], peer_name=str(me), on_death="forward"),
                InboundChannel(LOSSES_NAME, self._losses, [Lane(name=str(me))]),
                *answers,
            ],
            words=[InboundWords(ROW_NAME, self._board.row(me.group), ROW_PLACES)],
            values=None if cluster.store is None else StoreValues(cluster.store),
            on_death=self._process_death,
            on_resume=self._on_resume,
        )

    def _accept(self) -> Link:
        """Waits for the uplink. Refuses strangers, and nodes that do not fit, with the reason."""
        me, spec = self._me, self._spec()
        refused = 0
        while True:
            try:
                return self._listener.accept(spec, timeout=ACCEPT_TIMEOUT)
            except Timeout:
                event("node has not joined", node=self._node, group=me.group, address=self._listener.address)
                with contextlib.suppress(ValueError, OSError):  # of files that are being replaced
                    spec = self._spec()  # with the files of now
            if refused < (refused := sum(self._listener.refusals.values())):
                event("links refused", logging.WARNING, number=refused, last=self._listener.last_refusal)

    # ── ends, in other threads and in the link's hook ──
    def _receive_loss(self) -> None:
        """Waits for the remote node's report of the end of the group, writes the requests in flight on the verdict
        board, and ends the link."""
        try:
            with self._losses.open_receiver(name=str(self._me)) as losses:
                report: LossReport = losses.receive()
        except (PeerDied, EndOfChannel):  # the link has ended before
            return
        self._write_requests(report)
        self._end(Cause(report.cause), f"group {self._me.group} of node {self._node} has ended: {report.reason}")

    def _write_requests(self, report: LossReport) -> None:
        words = request_words(report.servers, report.requests)
        board, me = VerdictBoard(self._cluster.verdicts, writable=True), self._me
        board.write_requests(me.group, me.incarnation, me.incarnation, [words], report.is_trial)

    def _process_death(self, death: ChannelDeath) -> None:
        """Ends the link when a server dies: the end of the uplink makes the core forget the requests. Requests of
        living servers migrate, and the migration does not count towards the limit."""
        if not death.is_remote and death.channel == "inbox" and self._servers.is_new_death(death.index, death.name):
            self._end(Cause.PLANNED, f"server {death.index} has died: {death.how}")

    def _end(self, cause: Cause, reason: str) -> None:
        self._loss = self._loss or RemoteLoss(cause, reason)
        assert self._link is not None, "the link has begun"
        self._link.stop(reason)


class ServerLives:
    """The lives of the servers when the bridge started: the death of an earlier life is reported late, and does not
    concern the link."""

    def __init__(self, config: EngineConfig, board: StatusBoard) -> None:
        self._board = board
        members = all_processes(config)
        self._places = [place for place, member in enumerate(members) if member.kind == "server"]
        self._before = self._entries()

    def _entries(self) -> list[ProcessEntry]:
        members = self._board.members
        return [members[place] for place in self._places]

    def is_new_death(self, server: int, name: str) -> bool:
        """Returns whether a server named `name` has lived since the bridge started. The name of a dead peer may be
        gone: then the board has the successor."""
        if server >= len(self._before):
            return False
        before, dead = self._before[server], ProcessId.of(name)
        if dead is None:
            return self._entries()[server] != before
        return dead.incarnation > before.incarnation or (dead.incarnation == before.incarnation and before.pid != 0)
