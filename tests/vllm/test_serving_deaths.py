"""vLLM with two API servers: when a process is killed, each client with an open stream gets an error that names it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support import peer, tiny_models
from tests.support.vllm_server import END, START, VllmServer, serving

PROMISED = 0.5  # seconds from the kill until a client has its error, and /health says so
SLACK = 1.0  # on a machine that has other work; the figures themselves are printed

pytestmark = pytest.mark.timeout(3 * START)


def victim_of(server: VllmServer, process: str) -> int:
    if process == "Launcher":
        return server.process.pid
    return server.core() if process == "EngineCore" else server.api_servers()[0]


def sentence_of(process: str, pid: int) -> str:
    if process == "Launcher":
        return f"MainProcess (pid {pid}), which started this process, has ended"
    return f"{process} (pid {pid}) died: killed by SIGKILL"


def await_end(server: VllmServer) -> None:
    """Returns when no process is left."""
    deadline = time.monotonic() + END
    while pids := server.pids():
        assert time.monotonic() < deadline, f"processes {pids} are left"
        time.sleep(0.05)


@pytest.mark.parametrize("process", ["EngineCore", "ApiServer_0", "Launcher"])
def test_clients_of_two_api_servers_get_the_death_of(process: str, tmp_path: Path) -> None:
    python = peer.python_of_vllm()
    site = peer.write_site(tmp_path / "site")
    model = peer.write_model(python, tiny_models.LLAMA, tmp_path / "models")
    variables = {"PENSTOCK_VLLM": "queue", "PENSTOCK_VLLM_STRICT": "1"}
    with serving(site, model, tmp_path / "log", "--api-server-count", "2", **variables) as server:
        streams, victim = server.streams(8), victim_of(server, process)
        killed_at = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        unhealthy_after = server.unhealthy_at() - killed_at
        for stream in streams:
            stream.join(START)
        # The clients of a dead API server have a closed connection.
        errors = [stream.error() for stream in streams if stream.has_error()]
        server.seconds_until_end()
        await_end(server)
    took = sorted(at - killed_at for at, _ in errors)
    print(f"{len(errors)} of {len(streams)} clients: {took}; /health after {unhealthy_after:.2f} s")
    assert took[len(took) // 2] <= PROMISED and max(*took, unhealthy_after) <= PROMISED + SLACK
    assert all(message.endswith(sentence_of(process, victim)) for _, message in errors)
    assert all(stream.ended_at - killed_at <= PROMISED + SLACK for stream in streams)
    assert process == "ApiServer_0" or len(errors) == len(streams)


def test_coordinator_ends_with_a_killed_launcher(tmp_path: Path) -> None:
    python = peer.python_of_vllm()
    site = peer.write_site(tmp_path / "site")
    model = peer.write_model(python, tiny_models.LLAMA, tmp_path / "models")
    sizes = ("--tensor-parallel-size", "1", "--data-parallel-size", "2", "--api-server-count", "2")
    with serving(site, model, tmp_path / "log", *sizes, PENSTOCK_VLLM="queue", PENSTOCK_VLLM_STRICT="1") as server:
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        await_end(server)
