"""vLLM with two API servers: when a process is killed, each client with an open stream gets an error that names it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support import peer, tiny_models
from tests.support.vllm_server import START, VllmServer, serving

PROMISED = 0.5  # seconds from the kill until a client has its error, and /health says so
SLACK = 1.0  # on a machine that has other work; the figures themselves are printed

pytestmark = pytest.mark.timeout(3 * START)


def victim_of(server: VllmServer, process: str) -> int:
    return server.core() if process == "EngineCore" else server.api_servers()[0]


@pytest.mark.parametrize("process", ["EngineCore", "ApiServer_0"])
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
    took = sorted(at - killed_at for at, _ in errors)
    print(f"{len(errors)} of {len(streams)} clients: {took}; /health after {unhealthy_after:.2f} s")
    assert took[len(took) // 2] <= PROMISED and max(*took, unhealthy_after) <= PROMISED + SLACK
    assert all(message.endswith(f"{process} (pid {victim}) died: killed by SIGKILL") for _, message in errors)
    assert all(stream.ended_at - killed_at <= PROMISED + SLACK for stream in streams)
    assert process != "EngineCore" or len(errors) == len(streams)
