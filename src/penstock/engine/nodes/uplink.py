"""The uplink of a group to the home node: takes the place of all servers on the group's node.

Connects to the home node when the group serves, and has one link. When the link ends, the process and the ends end: to
the core, all servers have died, so the core forgets the requests, and keeps model and caches. The launcher restarts the
uplink, which connects again. When the group ends, or the node drains, the uplink reports the launcher's verdict to the
home node: servers submit the requests to other groups.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

import numpy as np

import penstock
from penstock import Timeout
from penstock.bridge import (
    BridgeRefused,
    InboundChannel,
    Lane,
    Link,
    LinkDied,
    LinkSpec,
    OutboundChannel,
    OutboundWords,
    StoreValues,
    connect,
)
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.process import CannotStart, starting
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.engine.cluster.verdict_board import Cause, Verdict, VerdictBoard
from penstock.engine.nodes.group_link import (
    LOSSES_NAME,
    ROW_NAME,
    group_link,
    home_number,
    node_secret,
    node_tls,
    port_of,
)
from penstock.engine.protocol.messages import LOSSES, LossReport

BOARD_POLL_S = 0.02  # seconds between two reads of the board
CONNECT_TIMEOUT = 1.0  # seconds; then the board is read again
VERDICT_TIMEOUT = 5.0  # seconds; until the launcher has found why the group was lost
REPORT_TIMEOUT = 1.0  # seconds; until the home node ends the link, because of a report
NO_VERDICT = Verdict(Cause.UNKNOWN, frozenset(), False)


def run(cluster: Cluster, me: ProcessId) -> None:
    """Links a group to the home node, until the link or the group ends."""
    config = cluster.config
    assert config.nodes is not None, "an uplink is on one of several nodes"
    with starting():
        port = port_of(config.nodes, config.data_parallel_size, home_number(config, me.index))
        uplink = Uplink(cluster, me, me.index, port)
    uplink.run()


class Uplink:
    def __init__(self, cluster: Cluster, me: ProcessId, group: int, port: int) -> None:
        self._cluster = cluster
        self._me = me
        self._group = group
        self._port = port
        self._board = StatusBoard(cluster.board, writable=True)
        self._row = self._board.row(self._group)
        self._verdicts = VerdictBoard(cluster.verdicts)
        self._losses: penstock.Ring[LOSSES] = penstock.Ring(LOSSES, name=f"losses {self._group}")
        assert cluster.config.nodes is not None, "an uplink is on one of several nodes"
        self._nodes = cluster.config.nodes
        self._secret, self._tls = node_secret(), node_tls(self._nodes)

    def run(self) -> None:
        """Returns when the link has ended, and leaves all ends open."""
        incarnation = self._await_group()
        link = self._connect(incarnation)
        if link is None:
            return
        event("linked to the home node", group=self._group, remote=link.remote.name, remote_pid=link.remote.pid)
        self._row[StatusBoard.LINKED] = 1
        threading.Thread(target=self._watch, args=(link, incarnation), daemon=True).start()
        try:
            event("link ended", group=self._group, reason=link.run())
        except LinkDied as death:
            event("link lost", logging.WARNING, group=self._group, cause=death.kind, reason=death)

    def _await_group(self) -> int:
        """Waits until the group serves. Returns its incarnation; 0: the node drains."""
        while not (incarnation := self._row[StatusBoard.SERVING]) and not self._board.is_draining:
            time.sleep(BOARD_POLL_S)
        return incarnation

    def _is_wanted(self, incarnation: int) -> bool:
        """Returns whether there is something to link to the home node."""
        return self._serves(incarnation)

    def _serves(self, incarnation: int) -> bool:
        return self._row[StatusBoard.SERVING] == incarnation != 0 and not self._board.is_draining

    def _spec(self) -> LinkSpec:
        cluster, me, config = self._cluster, self._me, self._cluster.config
        lanes = [Lane(server, str(me)) for server in range(config.api_server_count)]
        answers = [
            OutboundChannel(f"deltas {server}", inbox, peer_name=str(me), on_death="forward")
            for server, inbox in enumerate(cluster.servers_of(self._group))
        ]
        return replace(
            group_link(
                config,
                home_number(config, self._group),
                f"{me} on node {self._nodes.rank}",
                self._row[StatusBoard.MODEL],
            ),
            channels=[
                InboundChannel("inbox", cluster.inboxes[self._group], lanes, on_death="forward"),
                OutboundChannel(LOSSES_NAME, self._losses, peer_name=str(me)),
                *answers,
            ],
            words=[OutboundWords(ROW_NAME, self._row)],
            values=None if cluster.store is None else StoreValues(cluster.store, cluster.pulls[self._group]),
            on_death=lambda death: None,  # the board says what becomes of the group
            on_resume=self._on_resume,
        )

    def _on_resume(self, pause: float, reason: str) -> None:
        pause_ms = round(pause * 1e3, 1)
        event("link resumed", logging.WARNING, group=self._group, pause_ms=pause_ms, reason=reason)

    def _connect(self, incarnation: int) -> Link | None:
        """Connects to the home node, with retries. Returns None when the group no longer serves. Raises CannotStart if
        the home node refuses."""
        spec = self._spec()
        address = self._nodes.address, self._port
        while self._is_wanted(incarnation):
            try:
                return connect(address, spec, secret=self._secret, tls=self._tls, timeout=CONNECT_TIMEOUT)
            except Timeout:
                continue
            except BridgeRefused as refused:
                raise CannotStart(f"the home node at {address[0]}:{address[1]} refuses this node: {refused}") from None
        return None

    # ── in a separate thread ──
    def _watch(self, link: Link, incarnation: int) -> None:
        """Waits for the end of the group or a drain, and reports to the home node, which ends the link."""
        with self._losses.open_sender(name=str(self._me)) as sender:
            while self._serves(incarnation):
                time.sleep(BOARD_POLL_S)
            report = self._report(incarnation)
            event("group reported lost", group=self._group, cause=Cause(report.cause).name.lower())
            sender.send(report, REPORT_TIMEOUT)
            time.sleep(REPORT_TIMEOUT)
            link.stop(report.reason)

    def _report(self, incarnation: int) -> LossReport:
        none = np.empty(0, np.int32)
        if self._board.is_draining:
            return LossReport(Cause.PLANNED, "its node drains", none, none)
        verdict = self._await_verdict(incarnation)
        requests = np.array(sorted(verdict.in_flight), np.int32).reshape(-1, 2)
        reason = "it was restarted as planned" if verdict.cause == Cause.PLANNED else "one of its processes has died"
        return LossReport(verdict.cause, reason, requests[:, 0].copy(), requests[:, 1].copy(), verdict.is_trial)

    def _await_verdict(self, incarnation: int) -> Verdict:
        deadline = time.monotonic() + VERDICT_TIMEOUT
        while time.monotonic() < deadline:
            verdict = self._verdicts.verdict(self._group, incarnation)
            if verdict is not None:
                return verdict
            time.sleep(BOARD_POLL_S)
        return NO_VERDICT
