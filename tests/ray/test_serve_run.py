"""`serve run` of this integration as a user types it: it answers, and leaves nothing when it is interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiers
from tests.conftest import eventually
from tests.ray.conftest import needs_cluster

pytestmark = [*needs_cluster, pytest.mark.timeout(300)]
SERVE = Path(sys.executable).with_name("serve")
START, END = 120.0, 60.0  # seconds
YAML = """
http_options: {{host: 127.0.0.1, port: {port}}}
applications:
  - name: app
    route_prefix: /
    import_path: penstock.integrations.ray_serve:build
    args: {{device_model: simulated, served_model_name: from-yaml}}
    deployments:
      - {{name: Penstock, num_replicas: 1, ray_actor_options: {{num_cpus: 0.5}}}}
"""


@pytest.fixture
def ray_tmp(namespace: None) -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # paths of sockets have at most 107 bytes
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("arguments", "port", "name"),
    [
        pytest.param(
            ["penstock.integrations.ray_serve:build", "device_model=simulated", "served_model_name=m"], 8000, "m",
            marks=tiers.needs_all, id="builder",
        ),
        pytest.param(["serve.yaml"], 8123, "from-yaml", id="yaml"),
    ],
)  # fmt: skip
def test_serve_run_serves_until_it_is_interrupted(
    arguments: list[str], port: int, name: str, ray_tmp: str, tmp_path: Path
) -> None:
    from bench.nodes.ray_cluster import command_line, namespace_of

    def of_engines() -> list[str]:
        pids = [int(path.name) for path in Path("/proc").glob("[0-9]*") if namespace_of(path.name) == here]
        return [line for line in map(command_line, pids) if "-m penstock" in line]

    here, log = namespace_of("thread-self"), tmp_path / "log"
    (tmp_path / "serve.yaml").write_text(YAML.format(port=port))
    environment = {**os.environ, "RAY_TMPDIR": ray_tmp, "RAY_USAGE_STATS_ENABLED": "0"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [SERVE, "run", *arguments],
            cwd=tmp_path,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    def models() -> list[str]:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as response:
                return [model["id"] for model in json.load(response)["data"]]
        except OSError:
            return []

    try:
        assert eventually(models, within=START) == [name]
        assert of_engines()
        process.send_signal(signal.SIGINT)
        process.wait(END)
        eventually(lambda: not of_engines(), within=END)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
