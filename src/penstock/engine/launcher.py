"""The process tree: opens what its processes share, starts and watches them, restarts dead ones, ends all in order.

A group (a core, its workers and outputs) lives and dies as one, a server alone. Deaths are seen by pidfd.
Leaves to `process` what one process is, and to the processes what they do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable

from penstock import ChannelError, MessageSender, PeerDied
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.process import ChildProcess, ProcessEnd
from penstock.engine.cluster.status_board import ProcessEntry, StatusBoard
from penstock.engine.cluster.topology import Cluster, ProcessId, all_processes
from penstock.engine.core import engine_core
from penstock.engine.model_dir import GENERATION, with_model_defaults
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import Stop
from penstock.engine.worker import worker

MAX_FAILURES = 3  # failed starts in a row of a unit that has never served; one that has served is restarted without end
BACK_OFF = (0.0, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # seconds before the next start, after so many failed ones …
MAX_SHORT_LIVES = 4  # … and after so many more short lives of units that served
HEALTHY_UPTIME = 30.0  # seconds from a start: a shorter life is a short one
STOP_TIMEOUT = 5.0  # seconds; a process that has not ended by then is killed
CAUSED_BY_PEER_DEATH, KILLED = "PeerDied: ", "killed by SIGKILL"  # ends caused by another one's end, which says more
NEUTRAL_ONES = "--generation-config vllm"  # instead of the model's sampling defaults
LOOK_AGAIN = 0.01  # seconds; at the board, while the tree starts or drains

Run = Callable[[Cluster, ProcessId], None]


class TreeFailed(Exception):
    """The tree cannot go on; the text says which process ended, and how."""


class ProcessGroup:
    """Processes that live and die together."""

    def __init__(self, launcher: Launcher, group: int, parts: list[tuple[str, int, Run]]) -> None:
        self._launcher = launcher
        self._group = group
        self._parts = parts  # kind, index, and what it runs
        self._incarnation = 0
        self._started = 0.0
        self._has_served = False  # in any incarnation
        self._failures = 0  # starts in a row that did not serve
        self._short_lives = 0  # in a row
        self._is_broken = False  # a process has died, and the others are being killed
        self._first: tuple[str, ProcessEnd] | None = None  # the process that died, and how: the cause of the other ends
        self._again: asyncio.TimerHandle | None = None
        self.children: dict[int, ChildProcess] = {}  # by pidfd

    @property
    def is_group(self) -> bool:
        return self._parts[0][0] == "core"

    @property
    def name(self) -> str:
        return f"group {self._group}" if self.is_group else f"server {self._parts[0][1]}"

    @property
    def is_loading(self) -> bool:
        """Returns whether the unit does not serve: it has nothing to drain, and loading processes read no messages."""
        if self.is_group:
            return self._launcher.board.row(self._group)[StatusBoard.SERVING] != self._incarnation
        return self._launcher.is_server_loading(self._parts[0][1])

    def start(self) -> None:
        self._again = None
        self._is_broken = False
        self._first = None
        self._incarnation += 1
        self._started = time.monotonic()
        try:
            self._start_all()
        except OSError as error:  # no memory, descriptors or processes left
            event("unit could not be started", logging.ERROR, unit=self.name, error=str(error))
            self._first = self.name, ProcessEnd(f"could not be started: {error}")
            self._break(is_failure=True)
            if not self.children:
                self._all_ended()

    def _start_all(self) -> None:
        """Raises OSError."""
        if self.is_group and self._launcher.tree.config.tensor_parallel_size > 1:
            self._launcher.tree.init_methods[self._group] = _meeting()
        for kind, index, run in self._parts:
            member = ProcessId(kind, self._group, index, self._incarnation)
            child = ChildProcess.start(member, run, self._launcher.tree)
            self.children[child.pidfd] = child
            self._launcher.publish_pid(child.member, child.pid)
            asyncio.get_running_loop().add_reader(child.pidfd, self._ended, child)
            event("process started", child=str(child.member), child_pid=child.pid)

    def signal(self, number: int) -> None:
        for child in self.children.values():
            child.signal(number)

    def forget(self) -> None:
        """Cancels a restart that is due."""
        if self._again is not None:
            self._again.cancel()
            self._again = None

    def _ended(self, child: ChildProcess) -> None:
        asyncio.get_running_loop().remove_reader(child.pidfd)
        del self.children[child.pidfd]
        end, is_ours, was_loading = child.reap(), self._is_broken, self.is_loading
        self._launcher.publish_pid(child.member, 0)
        level = logging.INFO if self._launcher.is_stopping or is_ours else logging.ERROR
        event("process ended", level, child=str(child.member), child_pid=child.pid, how=end.how)
        self._launcher.reap(child.member)
        if not self._is_broken and not self._launcher.is_stopping:
            self._break(is_failure=was_loading)
        if self._first is None or (
            CAUSED_BY_PEER_DEATH in self._first[1].how and CAUSED_BY_PEER_DEATH not in end.how and end.how != KILLED
        ):
            self._first = str(child.member), end
        if not self.children:
            self._all_ended()

    def _break(self, is_failure: bool) -> None:
        """Kills all processes of the unit. `is_failure`: it has not served in this incarnation."""
        self._is_broken = True
        self._has_served |= not is_failure
        if self.is_group:
            self._launcher.board.row(self._group)[StatusBoard.SERVING] = 0
        self._count_end(is_failure, time.monotonic() - self._started)
        self.signal(signal.SIGKILL)

    def _count_end(self, is_failure: bool, lived: float) -> None:
        self._failures = self._failures + 1 if is_failure else 0
        self._short_lives = self._short_lives + 1 if lived < HEALTHY_UPTIME else 0

    @property
    def _pause(self) -> float:
        """Returns the seconds before the next start."""
        short_lives = min(max(self._short_lives - 1, 0), MAX_SHORT_LIVES)
        return BACK_OFF[max(min(self._failures, len(BACK_OFF) - 1), short_lives)]

    def _all_ended(self) -> None:
        if self.is_group:
            self._launcher.board.begin(self._group)
            self._launcher.board.row(self._group)[StatusBoard.FAILED_STARTS] = self._failures
        else:
            self._launcher.count_failed_starts(self._parts[0][1], self._failures)
        assert self._first is not None, "all have ended, and none was the first"
        who, end = self._first
        if self._launcher.is_stopping:
            self._launcher.check_all_exited()
        elif end.is_lasting and not self._has_served:
            self._launcher.fail(f"{who} cannot start: {end.how}")
        elif self._failures >= MAX_FAILURES and not self._has_served:
            self._launcher.fail(f"{who} ended {self._failures} times before it served, the last time: {end.how}")
        elif not self._launcher.has_failed:
            event("unit starts again", unit=self.name, after=self._pause, failed_starts=self._failures)
            self._again = asyncio.get_running_loop().call_later(self._pause, self.start)


class Launcher:
    """Runs in the event loop of the process that owns the tree, in its main thread.

    `serve` is what each server process runs; without it there are none, and clients in this process may take their
    places (`Client(launcher.tree, 0)`).
    """

    def __init__(self, config: EngineConfig, serve: Run | None = None) -> None:
        config = with_model_defaults(config)
        self.tree = Cluster.lay(config)
        self.board = StatusBoard(self.tree.board, writable=True)
        self._places = [(one.kind, one.group, one.index) for one in all_processes(config)]
        self.is_stopping = False
        groups = [ProcessGroup(self, group, self._parts_of_group()) for group in range(config.data_parallel_size)]
        self._servers = [
            ProcessGroup(self, 0, [("server", one, serve)]) for one in range(config.api_server_count) if serve
        ]
        self.units = (*groups, *self._servers)
        lane = self.tree.launcher_lane
        self._inboxes = [group.inbox.sender(lane, name="launcher") for group in self.tree.groups]
        self._failure: TreeFailed | None = None
        self._is_over = asyncio.Event()  # the tree has failed, or a signal ends it
        self._left = asyncio.Event()  # no child process is left
        self._signals = 0  # SIGTERM and SIGINT received

    def _parts_of_group(self) -> list[tuple[str, int, Run]]:
        config = self.tree.config
        workers: list[tuple[str, int, Run]] = [
            ("worker", rank, worker.run) for rank in range(config.tensor_parallel_size)
        ]
        outputs: list[tuple[str, int, Run]] = [("output", one, run_output) for one in range(config.output_processors)]
        return [("core", 0, run_core), *workers, *outputs]

    def publish_pid(self, member: ProcessId, pid: int) -> None:
        """Writes on the board which process has this place; `pid` 0: none now."""
        place = self._places.index((member.kind, member.group, member.index))
        self.board.live(place, ProcessEntry(member.incarnation, pid))

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._look_who_is_stopped)
        config = self.tree.config
        if config.sampling_defaults.given:
            source, given = f"{config.model}/{GENERATION}", config.sampling_defaults.given
            event("default sampling parameters", source=source, **given, neutral_ones=NEUTRAL_ONES)
        for unit in self.units:
            unit.start()

    async def serving(self, timeout: float | None = None) -> None:
        """Waits until all groups and servers serve. Raises TreeFailed, and TimeoutError."""
        timeout = self.tree.config.start_timeout if timeout is None else timeout
        deadline = time.monotonic() + timeout
        while late := [unit.name for unit in self.units if unit.is_loading]:
            if self._failure is not None:
                raise self._failure
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{', '.join(late)}: not serving within {timeout:g} s")
            await asyncio.sleep(LOOK_AGAIN)

    async def run(self) -> None:
        """Runs a tree with servers until SIGTERM or SIGINT, which drain it; a second one stops it at once.
        Raises TreeFailed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._hear_signal)
        try:
            self.start()
            await self._is_over.wait()
            await self.stop(self.tree.config.shutdown_timeout if self._failure is None else 0.0)
            if self._failure is not None:
                raise self._failure
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _hear_signal(self) -> None:
        self._signals += 1
        self._is_over.set()

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def fail(self, reason: str) -> None:
        if self._failure is None:
            event("tree failed", logging.ERROR, reason=reason)
            self._failure = TreeFailed(reason)
            self._is_over.set()

    # ── the end ──
    async def stop(self, shutdown_timeout: float = 0.0) -> list[str]:
        """Accepts no more requests, waits so long for the open ones, and ends all processes; loading units at once.
        Returns the other processes that had to be killed."""
        event("tree drains", timeout=shutdown_timeout)
        self.is_stopping = True
        self.board.drain()
        for unit in self.units:
            unit.forget()
            if unit.is_loading:
                unit.signal(signal.SIGKILL)
        for server in self._servers:
            server.signal(signal.SIGTERM)
        deadline = time.monotonic() + shutdown_timeout
        while self._has_open() and time.monotonic() < deadline and self._signals < 2:
            await asyncio.sleep(LOOK_AGAIN)
        for inbox in self._inboxes:
            _tell_to_stop(inbox)
        self.check_all_exited()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._left.wait(), STOP_TIMEOUT if self._signals < 2 else 0.0)
        late = [str(child.member) for unit in self.units for child in unit.children.values()]
        for unit in self.units:
            unit.signal(signal.SIGKILL)
        await self._left.wait()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        for inbox in self._inboxes:
            inbox.close()
        self.board.close()
        self.tree.close()
        event("tree stopped", killed=",".join(late) or "nobody")
        return late

    def _has_open(self) -> bool:
        return any(server.children for server in self._servers) or any(row[StatusBoard.OPEN] for row in self.board.rows)

    def reap(self, member: ProcessId) -> None:
        """Hook of subclasses: a process has ended."""

    def count_failed_starts(self, index: int, number: int) -> None:
        """Hook of subclasses: server `index` has ended `number` times in a row before it served."""

    def is_server_loading(self, index: int) -> bool:
        """Hook of subclasses: returns whether server `index` does not serve yet."""
        return False

    def check_all_exited(self) -> None:
        if not any(unit.children for unit in self.units):
            self._left.set()

    # ── stopped processes ──
    def _look_who_is_stopped(self) -> None:
        """Handles SIGCHLD: a stopped process is not dead, but its peers cannot wait for it for ever."""
        for unit in self.units:
            for child in unit.children.values():
                child.check_stopped(self.tree.config.step_timeout)


def _meeting() -> str:
    """Returns the init method of a group's ranks: a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"


def _tell_to_stop(inbox: MessageSender) -> None:
    for _ in range(2):  # the first may only raise the death of a core before this one
        with contextlib.suppress(PeerDied, ChannelError):
            return inbox.send_nowait(Stop("the tree ends"))


def run_core(tree: Cluster, me: ProcessId) -> None:
    if tree.config.output_processors > 0:
        return engine_core.run(tree, me)
    from penstock.engine.output.output_state import OutputState

    engine_core.run(tree, me, OutputState.of)  # the core imports nothing of output


def run_output(tree: Cluster, me: ProcessId) -> None:
    from penstock.engine.output import output_processor

    output_processor.run(tree, me)
