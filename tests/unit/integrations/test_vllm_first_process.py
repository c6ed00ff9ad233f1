"""How processes of a vLLM server end after a kill of the first process."""

import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from penstock import Ring
from penstock.errors import PeerDied
from penstock.integrations.vllm import first_process
from tests.conftest import spawn


def run_for_ever(parts: Ring[bytes]) -> None:
    first_process.end_with_parent()
    with parts.open_sender() as sender:
        sender.send(b"runs")
        threading.Event().wait(60)


def start_and_run_for_ever(parts: Ring[bytes]) -> None:
    """The first process of a server, with an engine core."""
    core = multiprocessing.get_context("spawn").Process(target=run_for_ever, args=(parts,))
    core.start()
    core.join()


def test_process_ends_by_sigterm_when_the_parent_was_killed() -> None:
    parts = Ring[bytes]()
    with parts.open_receiver() as receiver:
        with spawn(start_and_run_for_ever, parts) as server:
            assert receiver.receive(30) == b"runs"
            server.kill()
        with pytest.raises(PeerDied, match="SIGTERM"):
            receiver.receive(30)


def test_engine_core_sends_its_death_before_it_aborts_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(name="MainProcess", pid=process.pid))
    outputs: queue.SimpleQueue[Any] = queue.SimpleQueue()
    config = SimpleNamespace(shutdown_timeout=30)
    core = SimpleNamespace(output_queue=outputs, ENGINE_CORE_DEAD=b"dead", vllm_config=config)
    monkeypatch.setattr(os, "kill", lambda _, number: outputs.put_nowait(number))
    first_process.await_parent(lambda: first_process.leave_requests(core))
    assert [outputs.get_nowait(), outputs.get_nowait()] == [b"dead", signal.SIGTERM]
    assert config.shutdown_timeout == 0


def test_port_from_a_fork_is_dropped_and_other_sockets_stay() -> None:
    with socket.socket() as port, socket.create_server(("127.0.0.1", 0)) as listening:
        port.bind(("127.0.0.1", 0))
        address, descriptor = port.getsockname(), port.fileno()
        with socket.create_connection(listening.getsockname()) as client:
            first_process.drop_port()
            assert client.getpeername() == listening.getsockname()
        with socket.socket() as successor:
            successor.bind(address)
        assert os.path.samefile(f"/proc/self/fd/{descriptor}", os.devnull)


def test_refused_port_takes_no_connection_and_may_be_refused_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as port:
        for _ in range(2):
            first_process.refuse([port])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(port.getsockname())
