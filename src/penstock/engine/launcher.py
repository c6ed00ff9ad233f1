"""The launcher: opens the channels of all processes, and starts, watches, restarts and ends the processes.

If a process of a group (a core, its workers and outputs) dies, the launcher kills and restarts the whole group; a
server restarts alone. Deaths are seen by pidfd. `process` starts and reaps one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable

from penstock import PeerDied, Sender
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.process import ChildProcess, ProcessEnd
from penstock.engine.cluster.status_board import ProcessEntry, StatusBoard
from penstock.engine.cluster.topology import Cluster, ProcessId, all_processes
from penstock.engine.core import engine_core
from penstock.engine.model_dir import GENERATION, with_model_defaults
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import Stop
from penstock.engine.worker import worker
from penstock.lowlevel import ChannelError

MAX_FAILURES = 3  # failed starts in a row of a unit that has never served; one that has served is restarted without end
BACK_OFF = (0.0, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # seconds before the next start, by failed starts in a row …
MAX_SHORT_LIVES = 4  # … or by short lives in a row of a unit that served, up to this entry
HEALTHY_UPTIME = 30.0  # seconds from a start: a unit that dies earlier had a short life
STOP_TIMEOUT = 5.0  # seconds; a process that has not ended by then is killed
CAUSED_BY_PEER_DEATH, KILLED = "PeerDied: ", "killed by SIGKILL"  # ends that another process's end has caused
NEUTRAL_ONES = "--generation-config vllm"  # instead of the model's sampling defaults
LOOK_AGAIN = 0.01  # seconds between two reads of the board, while the tree starts or drains

Run = Callable[[Cluster, ProcessId], None]


class TreeFailed(Exception):
    """The tree cannot go on; the text says which process ended, and how."""


class ProcessGroup:
    """A unit of the launcher: processes that it starts, kills and restarts together; a group, or one server."""

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
        """Returns whether the unit does not serve yet. Then it has no requests to drain, and reads no `Stop`."""
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
        """Starts all processes of the unit. Raises OSError."""
        if self.is_group and self._launcher.tree.config.tensor_parallel_size > 1:
            self._launcher.tree.init_methods[self._group] = _init_method()
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
        name, end = self._first
        if self._launcher.is_stopping:
            self._launcher.check_all_exited()
        elif end.is_lasting and not self._has_served:
            self._launcher.fail(f"{name} cannot start: {end.how}")
        elif self._failures >= MAX_FAILURES and not self._has_served:
            self._launcher.fail(f"{name} ended {self._failures} times before it served, the last time: {end.how}")
        elif not self._launcher.has_failed:
            event("unit starts again", unit=self.name, after=self._pause, failed_starts=self._failures)
            self._again = asyncio.get_running_loop().call_later(self._pause, self.start)


class Launcher:
    """Starts and watches the processes of a tree, from the event loop of this process's main thread.

    `serve` is the main function of each server process. Without it there are no server processes, and clients in this
    process may stand in for them (`Client(launcher.tree, 0)`).
    """

    def __init__(self, config: EngineConfig, serve: Run | None = None) -> None:
        config = with_model_defaults(config)
        self.tree = Cluster.open(config)
        self.board = StatusBoard(self.tree.board, writable=True)
        self._places = [(member.kind, member.group, member.index) for member in all_processes(config)]
        self.is_stopping = False
        groups = [ProcessGroup(self, group, self._parts_of_group()) for group in range(config.data_parallel_size)]
        self._servers = [
            ProcessGroup(self, 0, [("server", member, serve)]) for member in range(config.api_server_count) if serve
        ]
        self.units = (*groups, *self._servers)
        lane = self.tree.launcher_lane
        self._inboxes = [group.inbox.open_sender(lane, name="launcher") for group in self.tree.groups]
        self._failure: TreeFailed | None = None
        self._is_over = asyncio.Event()  # the tree has failed, or a signal ends it
        self._left = asyncio.Event()  # no child process is left
        self._signals = 0  # SIGTERM and SIGINT received

    def _parts_of_group(self) -> list[tuple[str, int, Run]]:
        config = self.tree.config
        workers: list[tuple[str, int, Run]] = [
            ("worker", rank, worker.run) for rank in range(config.tensor_parallel_size)
        ]
        outputs: list[tuple[str, int, Run]] = [
            ("output", index, run_output) for index in range(config.output_processors)
        ]
        return [("core", 0, run_core), *workers, *outputs]

    def publish_pid(self, member: ProcessId, pid: int) -> None:
        """Writes on the board which process has this place; `pid` 0: none now."""
        place = self._places.index((member.kind, member.group, member.index))
        self.board.live(place, ProcessEntry(member.incarnation, pid))

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._check_stopped)
        config = self.tree.config
        if config.sampling_defaults.given:
            source, defaults = f"{config.model}/{GENERATION}", config.sampling_defaults.given
            event("default sampling parameters", source=source, **defaults, neutral_ones=NEUTRAL_ONES)
        if config.store_nbytes or config.tensor_transport != "auto":
            by = "store" if config.store_nbytes else "inline"
            event("tensors travel", by=by, store_nbytes=config.store_nbytes, huge_pages=config.huge_pages)
        if self.tree.encodings is not None:
            event("images are encoded once for all engines", store_nbytes=config.encoder_cache_nbytes)
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
            loop.add_signal_handler(number, self._handle_signal)
        try:
            self.start()
            await self._is_over.wait()
            await self.stop(self.tree.config.shutdown_timeout if self._failure is None else 0.0)
            if self._failure is not None:
                raise self._failure
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _handle_signal(self) -> None:
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
        """Lets servers accept no more requests, waits up to `shutdown_timeout` seconds for the open ones, and ends all
        processes. Units that do not serve yet are killed at once. Returns the names of processes that had to be killed
        after STOP_TIMEOUT."""
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
            _send_stop(inbox)
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
        event("tree stopped", killed=",".join(late) or "none")
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
    def _check_stopped(self) -> None:
        """Handles SIGCHLD: a process that stays stopped for `step_timeout` is killed, as its peers wait for it."""
        for unit in self.units:
            for child in unit.children.values():
                child.check_stopped(self.tree.config.step_timeout)


def _init_method() -> str:
    """Returns the init method of a group's ranks: a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def _send_stop(inbox: Sender) -> None:
    for _ in range(2):  # the first attempt may only raise PeerDied of the core's former process
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
