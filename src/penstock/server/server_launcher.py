"""`penstock serve`: starts the engine's processes and the API servers behind one socket, until a signal drains them.

`engine.launcher.launcher` starts and restarts processes, and `server_start` the main function of a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Sequence

from penstock.engine.cluster import logs
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.topology import ProcessId
from penstock.engine.launcher.launcher import ClusterFailed, Launcher
from penstock.engine.launcher.preflight import require_packages, require_startable, require_tokenizer
from penstock.engine.model_dir import with_model_defaults
from penstock.engine.nodes.group_link import node_secret, node_tls
from penstock.engine.protocol.config import EngineConfig
from penstock.server.listening import ServerArgs, listen, tls_context
from penstock.server.options import RESERVED, ServerOptions
from penstock.server.placed_nodes import PlacedNodes
from penstock.server.server_start import open_response_store, serve
from penstock.server.status.counters import ProcessCounters, ServerCounters
from penstock.server.status.history import EventRecorder, ServerHistory
from penstock.server.status.history_recorder import HistoryRecorder
from penstock.server.status.server_info import ServerInfo, served_name

PACKAGES = ("httptools", "prometheus_client", "starlette")  # of a server, which the launcher does not import


def run(config: EngineConfig, options: ServerOptions, ray_address: str | None = None, notes: Sequence[str] = ()) -> int:
    """Serves until a signal; on a node without servers, for the servers of the home node. Returns 0 after a shutdown,
    and 1 if the processes could not go on. `ray_address`: of the Ray cluster with the machines of the remote nodes;
    None: a command starts each remote node. `notes` are logged.

    Options and files are checked before any process starts, the port last: raises ValueError, ImportError, OSError.
    """
    require_packages(PACKAGES, "a server")
    config = with_model_defaults(config)
    require_startable(config)
    if config.simulated is None:
        require_tokenizer(config)
    tls_context(options)
    served = {*options.served_model_name, served_name(config, options), config.model}
    if twice := [adapter.name for adapter in config.lora.adapters if adapter.name in served]:
        raise ValueError(f"expected lora_modules with other names than the model's, got {twice[0]!r}")
    if reserved := sorted(RESERVED & options.default_chat_template_kwargs.keys()):
        raise ValueError(f"{reserved[0]} is set by the server: expected other names in --default-chat-template-kwargs")
    if config.nodes is not None:
        node_tls(config.nodes)
        if ray_address is None:
            node_secret()
    logs.configure("launcher", config.log_format, config.log_level)
    for note in notes:
        event("option has no effect", option=note)
    if config.is_headless:
        return run_headless(config)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(listen(options)))
        if options.uds:
            stack.callback(_unlink, options.uds)
        if ray_address is not None:
            placed = stack.enter_context(contextlib.closing(PlacedNodes(ray_address, config)))
            config = placed.config
            placed.place()
        return asyncio.run(_run(config, options, listener))


async def _run(config: EngineConfig, options: ServerOptions, listener: socket.socket) -> int:
    if not options.api_keys and not _is_loopback(listener):
        event("no API key is needed", logging.WARNING, host=options.host, remedy="--api-key")
    launcher = ServerLauncher(config, options, listener)
    name = served_name(config, options)
    logging_task = asyncio.ensure_future(_log_when_serving(launcher, name, _address(listener, options)))
    try:
        await launcher.run()
    except ClusterFailed:  # the process and its end stand in the log
        return 1
    finally:
        logging_task.cancel()
        await asyncio.gather(logging_task, return_exceptions=True)
    return 0


def run_headless(config: EngineConfig) -> int:
    """Runs a node without API servers until a signal. Returns 0 after a shutdown, and 1 if it could not go on."""
    logs.configure(f"launcher of node {config.nodes.rank if config.nodes else 0}", config.log_format, config.log_level)
    return asyncio.run(_run_headless(config))


async def _run_headless(config: EngineConfig) -> int:
    launcher = Launcher(config)
    logging_task = asyncio.ensure_future(_log_when_linked(launcher))
    try:
        await launcher.run()
    except ClusterFailed:
        return 1
    finally:
        logging_task.cancel()
        await asyncio.gather(logging_task, return_exceptions=True)
    return 0


class ServerLauncher(Launcher):
    """The launcher of an engine and its API servers, which share one listening socket."""

    def __init__(self, config: EngineConfig, options: ServerOptions, listener: socket.socket) -> None:
        config = with_model_defaults(config)  # which decide the processes of `server_info`
        self.tally = ServerCounters.create(config.api_server_count, config.all_groups)
        self.server_info = ServerInfo.publish(config, options, _address(listener, options))
        self.rows = ServerCounters(self.tally, config.api_server_count, writable=True).rows
        self._listener = listener
        servers = config.api_server_count
        self._history_page = ServerHistory.create(servers)
        self._history = ServerHistory(self._history_page, servers, writable=True)
        self._recording: asyncio.Task[None] | None = None
        self._log = contextlib.ExitStack()
        response_store = open_response_store(options, servers)
        shared = ServerArgs(options, listener, self.tally, self.server_info, self._history_page, response_store)
        super().__init__(config, functools.partial(serve, shared))
        self._recorder = HistoryRecorder(self._history, self.board, ServerCounters(self.tally, servers))

    def start(self) -> None:
        """Starts all processes, and records the history of the server."""
        self._log.enter_context(EventRecorder(self._history.events[0], "launcher"))
        super().start()
        self._recording = asyncio.ensure_future(self._recorder.run())

    def stop_serving(self, group: int) -> None:
        """Records the loss. The incarnation may have served for less time than passes between two polls."""
        self._recorder.watch_engines(time.time())
        super().stop_serving(group)
        self._recorder.watch_engines(time.time())

    def reap(self, member: ProcessId) -> None:
        """Marks a server that has ended as not serving."""
        super().reap(member)
        if member.kind == "server":
            row = self.rows[member.index]
            if requests := row[ProcessCounters.OPEN]:
                event("requests ended with their server", logging.WARNING, server=member.index, requests=requests)
            row[ProcessCounters.SERVING] = 0
            row.clear_gauges()

    def count_failed_starts(self, index: int, number: int) -> None:
        self.rows[index][ProcessCounters.FAILED_STARTS] = number

    def is_server_loading(self, index: int) -> bool:
        return self.rows[index][ProcessCounters.SERVING] == 0

    async def stop(self, shutdown_timeout: float = 0.0) -> list[str]:
        """Closes the launcher's listening socket, and stops. Connections are refused when all servers have, too."""
        self._listener.close()
        if self._recording is not None:
            self._recording.cancel()
            await asyncio.gather(self._recording, return_exceptions=True)
        try:
            return await super().stop(shutdown_timeout)
        finally:
            self._log.close()


async def _log_when_serving(launcher: Launcher, name: str, url: str) -> None:
    try:
        await launcher.serving()
        event("serving", model=name, url=url, seen_at=f"{url}/dashboard")
    except TimeoutError as error:
        launcher.fail(str(error))


async def _log_when_linked(launcher: Launcher) -> None:
    nodes = launcher.cluster.config.nodes
    assert nodes is not None, "a node without servers is one of several"
    try:
        await launcher.serving()
        event("node serves", node=nodes.rank, home=nodes.address)
    except TimeoutError as error:
        launcher.fail(str(error))


def _address(listener: socket.socket, options: ServerOptions) -> str:
    if options.uds:
        return f"unix:{os.path.abspath(options.uds)}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if options.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _is_loopback(listener: socket.socket) -> bool:
    return listener.family == socket.AF_UNIX or ipaddress.ip_address(listener.getsockname()[0]).is_loopback
