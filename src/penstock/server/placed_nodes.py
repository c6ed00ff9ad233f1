"""Nodes that Ray places: runs the program `integrations.ray_nodes`, which starts and restarts nodes.

The program is a separate process, so the launcher's process has no thread, signal handler or memory of Ray. No request
passes through the program: when the program ends, the nodes end, and the home node serves on with local engines.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading

import msgspec
from msgspec.structs import replace

from penstock.engine.cluster.logs import event
from penstock.engine.cluster.process import PR_SET_PDEATHSIG
from penstock.engine.nodes.group_link import SECRET_NBYTES
from penstock.engine.protocol.config import EngineConfig
from penstock.environment import NODE_SECRET

STOP_TIMEOUT = 10.0  # seconds, with a margin, that a launcher takes after the last open request
RESTART_PAUSE = 5.0  # seconds
END_TIMEOUT = 15.0  # seconds; for the program to end the actors


class PlacedNodes:
    """All nodes but the home node. One thread watches the program."""

    def __init__(self, ray_address: str, config: EngineConfig) -> None:
        """Starts the program, and waits until it is connected to the cluster. Raises OSError."""
        os.environ.setdefault(NODE_SECRET.name, secrets.token_hex(SECRET_NBYTES))
        self._ray_address = ray_address
        self._is_stopping = threading.Event()
        self._program = self._start()
        address = self._address()
        assert config.nodes is not None, "there are several nodes"
        self.config = replace(config, nodes=replace(config.nodes, address=address))
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def place(self) -> None:
        """Has the nodes started."""
        self._send_plan()
        self._watcher.start()

    def close(self) -> None:
        """Ends the program, and the nodes with it."""
        self._is_stopping.set()
        assert self._program.stdin is not None, "it is a pipe"
        with contextlib.suppress(BrokenPipeError):
            self._program.stdin.close()
        try:
            self._program.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:  # Ray does not answer; the actors end with their driver
            self._program.kill()
            self._program.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        libc = ctypes.CDLL(None)
        return subprocess.Popen(
            [sys.executable, "-m", "penstock.integrations.ray_nodes", self._ray_address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
            start_new_session=True,  # signals of the terminal are the launcher's
        )

    def _address(self) -> str:
        assert self._program.stdout is not None, "it is a pipe"
        address = self._program.stdout.readline().decode().strip()
        if not address:
            status = self._program.wait()
            raise OSError(f"no connection to Ray at {self._ray_address!r}: its program exited with status {status}")
        return address

    def _send_plan(self) -> None:
        config, nodes = self.config, self.config.nodes
        assert self._program.stdin is not None and nodes is not None, "it is a pipe, and there are several nodes"
        workers = config.data_parallel_size * len(config.ranks)  # as many on each node
        commands = []
        for rank in range(1, nodes.count):
            remote = replace(config, nodes=replace(nodes, rank=rank), numa_node=None)
            commands.append(["-m", "penstock.server.headless_node", msgspec.json.encode(remote).decode()])
        plan = {
            "commands": commands,
            "environment": {NODE_SECRET.name: NODE_SECRET.read()},
            "bundle": {"CPU": float(workers), **({"GPU": float(workers)} if config.device.startswith("cuda") else {})},
            "grace": config.shutdown_timeout + STOP_TIMEOUT,
            "timeout": config.start_timeout,
        }
        self._program.stdin.write(msgspec.json.encode(plan) + b"\n")
        self._program.stdin.flush()

    def _watch(self) -> None:
        while not self._is_stopping.is_set():
            status = self._program.wait()
            if self._is_stopping.is_set():
                return
            event("nodes are not kept", logging.ERROR, ray_address=self._ray_address, status=status)
            self._is_stopping.wait(RESTART_PAUSE)
            try:
                self._program = self._start()
                self._address()
                self._send_plan()
            except OSError as error:
                event("nodes cannot be placed", logging.ERROR, reason=str(error))
