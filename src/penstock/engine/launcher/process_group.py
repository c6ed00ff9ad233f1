"""A unit of the launcher: processes that are started, killed and restarted together. A unit is a group of the engine,
the bridge to a group of a remote node, a server, or an uplink.

If a process of a group dies, the launcher kills and restarts the whole group. Only an output processor of a serving
group is restarted alone, as the core can end the output processor's share of the requests.

The workers of a group may be on several nodes. A link to each remote node is then a process of the group, on either
side. The links outlive a lost group for a moment: the cause may be on the remote node.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeAlias

from penstock import DeathCause
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.process import ChildProcess
from penstock.engine.cluster.process_end import ProcessEnd
from penstock.engine.cluster.rendezvous import LOOPBACK, Rendezvous
from penstock.engine.cluster.status_board import FAILED, KV_DISCARD_REASONS, MEMORY, StatusBoard
from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.engine.cluster.verdict_board import Cause, VerdictBoard
from penstock.engine.launcher.back_off import BackOff
from penstock.engine.launcher.fork_server import ForkServer
from penstock.engine.launcher.group_loss import GroupLoss
from penstock.engine.launcher.output_lives import OutputLives

MAX_FAILURES = 3  # failed starts in a row of a unit that has never served; one that has served is restarted without end
REMOTE_RANKS, REMOTE_CORE = LINKS = ("remote_ranks", "remote_core")  # at home, and on a node that has workers only
FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
KILLED = "killed by SIGKILL"  # the end of a process that the launcher kills with its unit

Run: TypeAlias = Callable[[Cluster, ProcessId], object]  # what it returns lives until the process ends


class Supervisor(Protocol):
    """What a unit needs of its launcher."""

    cluster: Cluster
    board: StatusBoard
    verdicts: VerdictBoard
    is_stopping: bool
    fork_server: ForkServer | None

    @property
    def has_failed(self) -> bool: ...
    def fail(self, reason: str) -> None: ...
    def stop_serving(self, group: int) -> None: ...
    def publish_pid(self, member: ProcessId, pid: int) -> None: ...
    def reap(self, member: ProcessId) -> None: ...
    def check_all_exited(self) -> None: ...
    def is_server_loading(self, index: int) -> bool: ...
    def count_failed_starts(self, index: int, number: int) -> None: ...


class ProcessGroup:
    """One unit; `launcher` owns it."""

    def __init__(self, launcher: Supervisor, group: int, parts: list[tuple[str, int, Run]]) -> None:
        self._launcher = launcher
        self._group = group
        self._parts = parts  # kind, index, and what it runs
        self._incarnation = 0
        self._started = 0.0
        self._has_served = False  # in any incarnation
        self._back_off = BackOff()
        self._is_broken = False  # a process has died, and the others are being killed
        self._is_planned = False  # the group has been asked to stop, and starts again
        self._is_failed_start = False  # it had not served when it broke
        self._is_start_refused = False  # the system had no memory, descriptors or processes for it
        self._lived = 0.0  # seconds, until it broke
        self._kv_discard = ""  # why the next life may not adopt the KV cache; empty: it may
        self._is_cause_due = False  # it had served when it broke: servers wait for the verdict
        self._first: tuple[str, ProcessEnd] | None = None  # the process that died, and how: the cause of the other ends
        self._loss = GroupLoss()
        self._lives = OutputLives(self._start_output)
        self._again: asyncio.TimerHandle | None = None
        self.children: dict[int, ChildProcess] = {}  # by pidfd

    @property
    def is_group(self) -> bool:
        return self._parts[0][0] in ("core", "bridge", REMOTE_CORE)

    @property
    def is_remote(self) -> bool:
        """Returns whether this is a group of another node: its only process here is its bridge."""
        return self._parts[0][0] == "bridge"

    @property
    def name(self) -> str:
        return f"group {self._group}" if self.is_group else f"{self._parts[0][0]} {self._parts[0][1]}"

    @property
    def incarnation(self) -> int:
        return self._incarnation

    @property
    def is_loading(self) -> bool:
        """Returns whether the unit does not serve yet. Then it has no requests to drain, and reads no `Stop`."""
        if self.is_group:
            serving = self._launcher.board.row(self._group)[StatusBoard.SERVING]
            return self._incarnation == 0 or serving != self._incarnation
        return self._launcher.is_server_loading(self._parts[0][1])

    # ── start ──
    def start(self) -> None:
        self._again = None
        self._is_broken = self._is_planned = self._is_cause_due = self._is_start_refused = False
        self._kv_discard = ""
        self._first = None
        self._incarnation += 1
        self._started = time.monotonic()
        self._loss = GroupLoss()
        self._lives = OutputLives(self._start_output)
        try:
            self._start_all()
        except OSError as error:  # no memory, descriptors or processes left
            event("unit could not be started", logging.ERROR, unit=self.name, error=str(error))
            self._first = self.name, ProcessEnd(DeathCause(f"could not be started: {error}"))
            self._is_start_refused = True
            self._break(is_failure=True)
            if not self.children:
                self._all_ended()

    def _start_all(self) -> None:
        """Starts all processes of the unit. Raises OSError."""
        cluster = self._launcher.cluster
        has_rank_0 = any(part[:2] == ("worker", 0) for part in self._parts)
        with contextlib.ExitStack() as stack:
            rendezvous = None
            if has_rank_0 and cluster.config.tensor_parallel_size > 1:
                nodes = cluster.config.nodes
                host = nodes.address if nodes is not None and nodes.tensor_parallel_over_nodes else LOOPBACK
                rendezvous = stack.enter_context(contextlib.closing(Rendezvous.open(host)))
            for kind, index, run in self._parts:
                meets = None
                if rendezvous is not None and kind in ("worker", REMOTE_RANKS):
                    meets = rendezvous.of_rank(index)
                member = ProcessId(kind, self._group, index, self._incarnation)
                self._start_process(member, run, replace(cluster, rendezvous=meets))

    def _start_process(self, member: ProcessId, run: Run, cluster: Cluster) -> None:
        """Raises OSError."""
        fork_server = self._launcher.fork_server if self.is_group else None
        fork = None if fork_server is None else fork_server.fork
        child = ChildProcess.start(member, run, cluster.for_member(member), fork)
        self.children[child.pidfd] = child
        if self.is_group:
            way = StatusBoard.STARTS.at["forked" if child.is_forked else "spawned"]
            self._launcher.board.row(self._group)[way] += 1
        self._launcher.publish_pid(child.member, child.pid)
        asyncio.get_running_loop().add_reader(child.pidfd, self._ended, child)
        event("process started", child=str(child.member), child_pid=child.pid)

    def _start_output(self, index: int, life: int) -> None:
        """Starts the next life of an output processor; where that fails, the whole group is restarted."""
        run = next(run for kind, place, run in self._parts if (kind, place) == ("output", index))
        member = ProcessId("output", self._group, index, self._incarnation, life)
        try:
            self._start_process(member, run, self._launcher.cluster)
        except OSError as error:
            event("process could not be started", logging.ERROR, child=str(member), error=str(error))
            self._first = str(member), ProcessEnd(DeathCause(f"could not be started: {error}"))
            self._is_start_refused = True
            self._break(is_failure=False)

    # ── the end ──
    def signal(self, number: int) -> None:
        for child in self.children.values():
            child.signal(number)

    def forget(self) -> None:
        """Cancels all restarts that are due."""
        self._lives.cancel()
        if self._again is not None:
            self._again.cancel()
            self._again = None

    def forget_oom_kills(self) -> None:
        if not self._is_broken:
            self._loss.forget_oom_kills()

    def plan_restart(self) -> None:
        """Expects the processes of a group that serves to end in peace: its servers submit its open requests again. It
        starts again when all processes have ended."""
        self._is_planned = self._is_broken = self._has_served = self._is_cause_due = True
        self._is_failed_start, self._lived = False, time.monotonic() - self._started
        self._lives.cancel()
        self._loss.plan()
        self._publish_cause()
        self.kill_absent_outputs()
        self._stop_serving()

    def _stop_serving(self) -> None:
        # SERVED first: a server that finds no group reads SERVED to know whether a group comes back.
        self._launcher.board.cluster[StatusBoard.SERVED] |= self._has_served
        self._launcher.stop_serving(self._group)

    def kill_absent_outputs(self) -> None:
        """Kills output processors that do not receive yet: the core sends them no `Stop`."""
        absent = self._launcher.board.row(self._group)[StatusBoard.ABSENT_OUTPUTS] if self.is_group else 0
        for child in self.children.values():
            if child.member.kind == "output" and absent >> child.member.index & 1:
                child.signal(signal.SIGKILL)

    def _ended(self, child: ChildProcess) -> None:
        asyncio.get_running_loop().remove_reader(child.pidfd)
        del self.children[child.pidfd]
        record = self._launcher.board.take_signal_record(self._launcher.cluster.place_of(child.member))
        end, is_ours, was_loading = child.reap(record), self._is_broken, self.is_loading
        self._launcher.publish_pid(child.member, 0)
        level = logging.INFO if self._launcher.is_stopping or is_ours else logging.ERROR
        event("process ended", level, child=str(child.member), child_pid=child.pid, how=end.how)
        self._launcher.reap(child.member)
        self._note_fault(end)
        if self._launcher.is_stopping or self._is_broken:
            self._loss.add(child.pid, end)
        elif not was_loading and self._lives.restart(child.member, end, self._loss.is_maybe_out_of_memory):
            return
        else:
            is_failure = was_loading and (child.member.kind != REMOTE_CORE or end.is_lasting)
            others = self.children.values()
            ending = [other.pid for other in others if other.is_ending or other.member.kind == REMOTE_RANKS]
            self._loss.begin(child.pid, end, ending, any(other.is_stopped for other in others))
            self._break(is_failure)
        if self._first is None or (
            self._first[1].is_caused_by_peer and not end.is_caused_by_peer and end.how != KILLED
        ):
            self._first = str(child.member), end
        if not self.children:
            self._loss.close()
        self._publish_cause()
        self._end_links(child.member.kind)
        if not self.children:
            self._all_ended()

    def _end_links(self, ended: str) -> None:
        """Kills what outlives the others: the links to other nodes once the cause is known, and the workers of a node
        that has no others when their link has ended."""
        is_known = self._loss.cause is not None or (self._launcher.is_stopping and ended == "core")
        for child in self.children.values():
            if ended == REMOTE_CORE or (is_known and child.member.kind == REMOTE_RANKS):
                child.signal(signal.SIGKILL)

    def _publish_cause(self) -> None:
        """Writes the verdict about this incarnation, as soon as the cause is known."""
        cause = self._loss.cause
        if cause is None or not self._is_cause_due:
            return
        self._is_cause_due = False
        if cause == Cause.ITSELF:  # before the verdict: a server that reads the verdict finds the group
            self._launcher.board.cluster[StatusBoard.TRIAL_GROUP] = self._group + 1
        self._launcher.verdicts.write_cause(self._group, self._incarnation, cause)
        doubt = "" if self._loss.is_oom_counted else ", or out of memory: the kernel's counter cannot be read"
        event("group lost", unit=self.name, incarnation=self._incarnation, cause=cause.name.lower() + doubt)

    def _break(self, is_failure: bool) -> None:
        """Kills all processes of the unit, but for the links of one that has served. `is_failure`: it has not served in
        this incarnation."""
        self._is_broken = True
        self._lives.cancel()
        self._has_served |= not is_failure
        if self.is_group:
            self._stop_serving()
        self._is_cause_due = self.is_group and not is_failure
        self._is_failed_start, self._lived = is_failure, time.monotonic() - self._started
        for child in self.children.values():
            if is_failure or child.member.kind not in LINKS:
                child.signal(signal.SIGKILL)

    def _note_fault(self, end: ProcessEnd) -> None:
        """Notes a fault signal, whichever process sent the signal: a wild write may have come first."""
        if end.death.signal in FAULTS:
            self._kv_discard = FAILED

    def _discard_kv(self) -> None:
        """Gives the memory of the KV cache back, unless the next life may adopt it: all processes were in order when
        they were killed from outside, or stopped."""
        files = self._launcher.cluster.kv_files_of(self._group)
        if files is None or self.is_remote or self._launcher.is_stopping:
            return
        reason = self._kv_discard
        if self._loss.is_maybe_out_of_memory and not self._is_planned:
            reason = MEMORY
        elif self._is_start_refused or self._loss.cause not in (Cause.OUTSIDE, Cause.PLANNED):
            reason = FAILED
        if reason:
            files.empty()
            event("kv cache is discarded", logging.WARNING, unit=self.name, reason=reason)
            row = self._launcher.board.row(self._group)
            row[StatusBoard.KV_DISCARD] = 1 + KV_DISCARD_REASONS.index(reason)

    def _all_ended(self) -> None:
        is_own = self._is_start_refused or self._loss.cause == Cause.ITSELF or not self._loss.is_oom_counted
        self._back_off.count(self._is_failed_start, self._lived, is_from_outside=self._is_planned or not is_own)
        failures = self._back_off.failed_starts
        if self.is_group:
            self._launcher.board.begin(self._group)
            self._launcher.board.row(self._group)[StatusBoard.FAILED_STARTS] = failures
            self._discard_kv()
        else:
            self._launcher.count_failed_starts(self._parts[0][1], failures)
        assert self._first is not None, "all have ended, and none was the first"
        name, end = self._first
        if self._launcher.is_stopping:
            self._launcher.check_all_exited()
        elif end.is_lasting and not self._has_served:
            self._launcher.fail(f"{name} cannot start: {end.how}")
        elif failures >= MAX_FAILURES and not self._has_served:
            self._launcher.fail(f"{name} ended {failures} times before it served, the last time: {end.how}")
        elif not self._launcher.has_failed:
            pause = 0.0 if self._is_planned else self._back_off.seconds
            event("unit starts again", unit=self.name, after=pause, failed_starts=failures)
            self._again = asyncio.get_running_loop().call_later(pause, self.start)
