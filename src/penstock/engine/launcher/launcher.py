"""The launcher: opens the channels of all processes, and starts, watches, restarts and ends the processes.

`process_group` decides what is restarted when a process dies. Deaths are seen by pidfd. `process` starts and reaps one
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import time

from penstock import ChannelError, PeerDied, Sender, command_signals, standard_streams
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.process import CANNOT_START
from penstock.engine.cluster.spawning import is_importing_main, require_main_file
from penstock.engine.cluster.status_board import ProcessEntry, StatusBoard
from penstock.engine.cluster.topology import Cluster, ProcessId, processes_of_group
from penstock.engine.cluster.verdict_board import VerdictBoard
from penstock.engine.core import engine_core
from penstock.engine.launcher import early_fork_server
from penstock.engine.launcher.fork_server import ForkServer
from penstock.engine.launcher.process_group import ProcessGroup, Run
from penstock.engine.model_dir import GENERATION, with_model_defaults
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import Stop
from penstock.engine.worker import worker

STOP_TIMEOUT = 5.0  # seconds; a process that has not ended by then is killed
NEUTRAL_ONES = "--generation-config vllm"  # instead of the model's sampling defaults
OOM_KILL_S = 10.0  # a kill for want of memory is forgotten after 1 to 2 periods: the process has ended
BOARD_POLL_S = 0.01  # seconds between two reads of the board, while the cluster starts or drains


class ClusterFailed(Exception):
    """The cluster cannot go on; the text says which process ended, and how."""


class Launcher:
    """Starts and watches the processes of a cluster, from the event loop of this process's main thread.

    `serve` is the main function of each server process. Without it there are no server processes, and clients in this
    process may stand in for them (`Client(launcher.cluster, 0)`).
    """

    def __init__(self, config: EngineConfig, serve: Run | None = None) -> None:
        if is_importing_main():  # the launcher that has spawned this process reports the status
            raise SystemExit(CANNOT_START)
        require_main_file()
        config = with_model_defaults(config)
        standard_streams.open_closed_descriptors()  # before the cluster's segments take their numbers
        self.cluster = Cluster.open(config)
        self.board = StatusBoard(self.cluster.board, writable=True)
        self.verdicts = VerdictBoard(self.cluster.verdicts, writable=True)
        self.is_stopping = False
        has_forks = config.fork_server == "auto" and config.device == "cpu"  # CUDA after a fork has not been tried
        imports = functools.partial(import_programs, config)
        self.fork_server = ForkServer(imports, config.start_timeout) if has_forks else None
        if not has_forks:
            early_fork_server.end_early()
        local, remote = range(config.data_parallel_size), range(config.data_parallel_size, config.all_groups)
        self._groups = [ProcessGroup(self, group, self._parts_of_group()) for group in local]
        self._bridges = [ProcessGroup(self, group, [("bridge", 0, run_bridge)]) for group in remote]
        if not config.has_cores:
            self._servers = []
        elif config.is_headless:  # an uplink stands in the place of all servers, for its group
            self._servers = [ProcessGroup(self, 0, [("uplink", group, run_uplink)]) for group in local]
        else:
            servers = range(config.api_server_count)
            self._servers = [ProcessGroup(self, 0, [("server", member, serve)]) for member in servers if serve]
        self.units = (*self._groups, *self._bridges, *self._servers)
        lane = self.cluster.launcher_lane
        groups = self.cluster.groups if config.has_cores else ()
        self._inboxes = [group.inbox.open_sender(lane, name="launcher") for group in groups]
        self._failure: ClusterFailed | None = None
        self._migration: asyncio.Task[None] | None = None  # a planned one
        self._is_migration_due = False  # another one begins when it has ended
        self._oom_timer: asyncio.TimerHandle | None = None
        self._is_over = asyncio.Event()  # the cluster has failed, or a signal ends it
        self._left = asyncio.Event()  # no child process is left
        self._end_requested_at: float | None = None  # time of the first SIGTERM or SIGINT
        self._is_end_urgent = False  # it was repeated

    def _parts_of_group(self) -> list[tuple[str, int, Run]]:
        return [(kind, index, PROGRAMS[kind]) for kind, index in processes_of_group(self.cluster.config)]

    def publish_pid(self, member: ProcessId, pid: int) -> None:
        """Writes on the board which process has this place; `pid` 0: none now."""
        self.board.live(self.cluster.place_of(member), ProcessEntry(member.incarnation, pid, member.life))

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._check_stopped)
        config = self.cluster.config
        if config.sampling_defaults.explicit:
            source, defaults = f"{config.model}/{GENERATION}", config.sampling_defaults.explicit
            event("default sampling parameters", source=source, **defaults, neutral_ones=NEUTRAL_ONES)
        if config.store_nbytes or config.tensor_transport != "auto":
            by = "store" if config.store_nbytes else "inline"
            event("tensors travel", by=by, store_nbytes=config.store_nbytes, huge_pages=config.huge_pages)
        if self.cluster.encodings is not None:
            event("images are encoded once for all engines", store_nbytes=config.encoder_cache_nbytes)
        if self.fork_server is not None:
            self.fork_server.start()
        for unit in self.units:
            if self.fork_server is not None and unit.is_group:
                self.fork_server.call_when_settled(unit.start)  # else the group would import the same beside
            else:
                unit.start()
        self._forget_oom_kills()

    def _forget_oom_kills(self) -> None:
        for unit in self.units:
            unit.forget_oom_kills()
        self._oom_timer = asyncio.get_running_loop().call_later(OOM_KILL_S, self._forget_oom_kills)

    async def serving(self, timeout: float | None = None) -> None:
        """Waits until all groups and servers serve. Raises ClusterFailed, and TimeoutError."""
        timeout = self.cluster.config.start_timeout if timeout is None else timeout
        deadline = time.monotonic() + timeout
        while late := [unit.name for unit in self.units if unit.is_loading]:
            if self._failure is not None:
                raise self._failure
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{', '.join(late)}: not serving within {timeout:g} s")
            await asyncio.sleep(BOARD_POLL_S)

    async def run(self) -> None:
        """Runs a cluster with servers until SIGTERM or SIGINT, which drain it; a repetition after REPEAT_S stops it at
        once. SIGHUP begins a migration. Raises ClusterFailed."""
        loop = asyncio.get_running_loop()

        def deliver(number: int, received_at: float) -> None:
            loop.call_soon_threadsafe(self._handle_signal, number, received_at)

        with command_signals.delivered_to(deliver) as signals:
            if signals.has_early_hangup:
                event("migration is not begun", reason="SIGHUP came before the engine was started")
            self.start()
            await self._is_over.wait()
            await self.stop(self.cluster.config.shutdown_timeout if self._failure is None else 0.0)
            if self._failure is not None:
                raise self._failure

    def _handle_signal(self, number: int, received_at: float) -> None:
        if number == signal.SIGHUP:
            self.migrate()
        elif self._end_requested_at is None:
            self._end_requested_at = received_at
            self._is_over.set()
        elif received_at - self._end_requested_at >= command_signals.REPEAT_S and not self._is_end_urgent:
            event("cluster ends at once", signal=signal.Signals(number).name)
            self._is_end_urgent = True

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def fail(self, reason: str) -> None:
        if self._failure is None:
            event("cluster failed", logging.ERROR, reason=reason)
            self._failure = ClusterFailed(reason)
            self._is_over.set()

    # ── migration ──
    def migrate(self) -> None:
        """Restarts the groups one after the other; their requests go on in another group, or after the restart. While a
        migration runs, one more becomes due: each group restarts after this call."""
        if self.is_stopping or self._is_over.is_set():
            event("migration is not begun", logging.WARNING, reason="the cluster ends")
            return
        if not self.cluster.config.has_cores:
            event("migration is not begun", logging.WARNING, reason="the cores are on the home node: migrate there")
            return
        if self._migration is None or self._migration.done():
            self._migration = asyncio.get_running_loop().create_task(self._migrate_while_due())
        elif not self._is_migration_due:
            event("migration is queued", reason="another one runs")
        self._is_migration_due = True

    async def _migrate_while_due(self) -> None:
        # SIGHUP has a lower number than SIGTERM: Python handles it first when both are pending.
        while self._is_migration_due and not self._is_over.is_set():
            self._is_migration_due = False
            await self._migrate()

    async def _migrate(self) -> None:
        self.board.cluster[StatusBoard.MIGRATIONS_BEGUN] += 1
        try:
            if self.fork_server is not None:
                await self.fork_server.renew()
            if self.cluster.node_weights is not None:
                self.cluster.node_weights.renew()
            for group, inbox in zip(self._groups, self._inboxes, strict=True):
                await self._until_groups_serve()
                await self._restart(group, inbox)
            await self._until_groups_serve()
            event("migration has ended")
        except TimeoutError as error:
            self.board.cluster[StatusBoard.MIGRATIONS_FAILED] += 1
            event("migration has failed", logging.ERROR, reason=str(error))
        finally:
            self.board.cluster[StatusBoard.MIGRATIONS_ENDED] += 1

    async def _restart(self, group: ProcessGroup, inbox: Sender) -> None:
        """Stops a group in peace. It starts again by itself when its processes have ended; those that have not after
        STOP_TIMEOUT are killed."""
        event("group is restarted", unit=group.name)
        before = group.incarnation
        group.plan_restart()
        _send_stop(inbox, "the group is restarted")
        deadline = time.monotonic() + STOP_TIMEOUT
        while group.incarnation == before:
            if time.monotonic() >= deadline:
                group.signal(signal.SIGKILL)
            await asyncio.sleep(BOARD_POLL_S)

    async def _until_groups_serve(self) -> None:
        """Raises TimeoutError."""
        deadline = time.monotonic() + self.cluster.config.start_timeout
        while late := [group.name for group in self._groups if group.is_loading]:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{', '.join(late)}: not serving within {self.cluster.config.start_timeout:g} s")
            await asyncio.sleep(BOARD_POLL_S)

    # ── the end ──
    async def stop(self, shutdown_timeout: float = 0.0) -> list[str]:
        """Lets servers accept no more requests, waits up to `shutdown_timeout` seconds for the open ones, and ends all
        processes. Units that do not serve yet are killed at once. Returns the names of processes that had to be killed
        after STOP_TIMEOUT."""
        event("cluster drains", timeout=shutdown_timeout)
        self.is_stopping = True
        for task in (self._migration, self._oom_timer):
            if task is not None:
                task.cancel()
        if self.fork_server is not None:
            self.fork_server.close()
        self.board.drain()
        for unit in self.units:
            unit.forget()
            unit.kill_absent_outputs()
            if unit.is_loading:
                unit.signal(signal.SIGKILL)
        for server in self._servers:
            server.signal(signal.SIGTERM)
        deadline = time.monotonic() + shutdown_timeout
        while self._has_open() and time.monotonic() < deadline and not self._is_end_urgent:
            await asyncio.sleep(BOARD_POLL_S)
        for inbox in self._inboxes:
            _send_stop(inbox, "the cluster ends")
        for bridge in self._bridges:  # its node serves on
            bridge.signal(signal.SIGKILL)
        self.check_all_exited()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._left.wait(), 0.0 if self._is_end_urgent else STOP_TIMEOUT)
        late = [str(child.member) for unit in self.units for child in unit.children.values()]
        for unit in self.units:
            unit.signal(signal.SIGKILL)
        await self._left.wait()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        for inbox in self._inboxes:
            inbox.close()
        self.board.close()
        self.verdicts.close()
        self.cluster.close()
        event("cluster stopped", killed=",".join(late) or "none")
        return late

    def _has_open(self) -> bool:
        return any(server.children for server in self._servers) or any(row[StatusBoard.OPEN] for row in self.board.rows)

    def stop_serving(self, group: int) -> None:
        """Marks a lost group as not serving. Subclasses do more."""
        self.board.row(group)[StatusBoard.SERVING] = 0

    def reap(self, member: ProcessId) -> None:
        """A process has ended. Subclasses do more."""
        if member.kind == "uplink":
            self.board.row(member.index)[StatusBoard.LINKED] = 0

    def count_failed_starts(self, index: int, number: int) -> None:
        """Hook of subclasses: server `index` has ended `number` times in a row before it served."""

    def is_server_loading(self, index: int) -> bool:
        """Returns whether server `index` does not serve yet, as a subclass knows; or uplink `index` has no link yet."""
        return self.cluster.config.is_headless and not self.board.row(index)[StatusBoard.LINKED]

    def check_all_exited(self) -> None:
        if not any(unit.children for unit in self.units):
            self._left.set()

    # ── stopped processes ──
    def _check_stopped(self) -> None:
        """Handles SIGCHLD: a process that stays stopped for `step_timeout` is killed, as its peers wait for it."""
        for unit in self.units:
            for child in unit.children.values():
                child.check_stopped(self.cluster.config.step_timeout)
        if self.fork_server is not None:
            self.fork_server.check_stopped()


def _send_stop(inbox: Sender, reason: str) -> None:
    for _ in range(2):  # the first attempt may only raise PeerDied of the core's former process
        with contextlib.suppress(PeerDied, ChannelError):
            return inbox.send_nowait(Stop(reason))


def import_programs(config: EngineConfig) -> None:
    """Imports all modules of the processes of a group: a late import of a fork would read the files of a later time.
    The fork server calls the function."""
    from penstock.engine.output import output_processor  # noqa: F401

    if config.pooling:
        from penstock.engine.output import vector_output  # noqa: F401
    if config.nodes is not None:
        from penstock.engine.nodes import group_bridge, remote_core, remote_ranks  # noqa: F401
    worker.import_device(config)


def run_core(cluster: Cluster, me: ProcessId) -> object:
    if cluster.config.output_processors > 0:
        return engine_core.run(cluster, me)
    if cluster.config.pooling:
        from penstock.engine.output.vector_output import VectorOutput

        return engine_core.run(cluster, me, VectorOutput)  # the core imports nothing of output
    from penstock.engine.output.output_state import OutputState

    return engine_core.run(cluster, me, OutputState.of)


def run_bridge(cluster: Cluster, me: ProcessId) -> None:
    from penstock.engine.nodes import group_bridge

    group_bridge.run(cluster, me)


def run_uplink(cluster: Cluster, me: ProcessId) -> None:
    from penstock.engine.nodes import uplink

    uplink.run(cluster, me)


def run_remote_ranks(cluster: Cluster, me: ProcessId) -> None:
    from penstock.engine.nodes import remote_ranks

    remote_ranks.run(cluster, me)


def run_remote_core(cluster: Cluster, me: ProcessId) -> None:
    from penstock.engine.nodes import remote_core

    remote_core.run(cluster, me)


def run_output(cluster: Cluster, me: ProcessId) -> object:
    from penstock.engine.output import output_processor

    return output_processor.run(cluster, me)


PROGRAMS: dict[str, Run] = {  # of the processes of a group, by kind
    "core": run_core,
    "worker": worker.run,
    "output": run_output,
    "remote_ranks": run_remote_ranks,
    "remote_core": run_remote_core,
}
