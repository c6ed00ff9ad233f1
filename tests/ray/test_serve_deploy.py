"""`serve deploy` on a cluster, as docs/howto/nodes.md says it, after a local `serve run` has created Ray's token."""

from __future__ import annotations

import contextlib
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
from tests.support.documents import ROOT, fences

pytestmark = [*needs_cluster, pytest.mark.timeout(400)]
START, END = 120.0, 60.0  # seconds
SMALL = {  # of the page's file: a machine of this test has two processors and no such model
    "{model: /models/llama, tensor_parallel_size: 2, max_model_len: 4096}": "{device_model: simulated}",
    "num_replicas: 4": "num_replicas: 1",
    "{num_cpus: 8}": "{num_cpus: 0.5}",
}


@pytest.fixture
def home(namespace: None) -> Iterator[Path]:
    """A home directory, where Ray keeps its token. The processes of a cluster that was started in it end after it."""
    from bench.nodes.ray_cluster import command_line, namespace_of

    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # paths of sockets have at most 107 bytes
    here = namespace_of("thread-self")

    def left() -> list[int]:
        pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        return [pid for pid in pids if pid != os.getpid() and namespace_of(pid) == here and command_line(pid)]

    before = set(left())
    yield folder
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in set(left()) - before:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        with contextlib.suppress(AssertionError):
            eventually(lambda: not set(left()) - before, within=END / 2)
    shutil.rmtree(folder)
    assert not set(left()) - before


def shell_block_and_file() -> tuple[str, str]:
    """Returns the commands of the page that deploy, and the file that they deploy, made small."""
    blocks = fences(ROOT / "docs" / "howto" / "nodes.md")
    (commands,) = [block.text for block in blocks if block.language == "bash" and "serve deploy" in block.text]
    (file,) = [block.text for block in blocks if block.language == "yaml"]
    for large, small in SMALL.items():
        assert file.count(large) == 1
        file = file.replace(large, small)
    return commands, file


def environment_of(home: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**environment, "HOME": str(home), "PATH": path, "RAY_TMPDIR": str(home), "RAY_USAGE_STATS_ENABLED": "0"}


def models() -> list[str]:
    request = urllib.request.Request("http://127.0.0.1:8000/v1/models", headers={"authorization": "Bearer sesame"})
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return [model["id"] for model in json.load(response)["data"]]
    except OSError:
        return []


def run_locally(home: Path) -> None:
    """`serve run` without a cluster, until it is interrupted: Ray 2.60 creates its token then."""
    command = ["serve", "run", "penstock.integrations.ray_serve:build", "device_model=simulated"]
    with (home / "run.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=home, env=environment_of(home), stdout=log, stderr=log, start_new_session=True
        )
    try:
        assert eventually(models, within=START), (home / "run.log").read_text()[-4000:]
        process.send_signal(signal.SIGINT)
        process.wait(END)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize(
    "is_after_run", [pytest.param(False, id="first"), pytest.param(True, id="after-serve-run", marks=tiers.needs_all)]
)
def test_cluster_of_the_page_serves(home: Path, is_after_run: bool) -> None:
    if is_after_run:
        run_locally(home)
        assert (home / ".ray" / "auth_token").exists()
        eventually(lambda: not models(), within=END)
    commands, file = shell_block_and_file()
    (home / "serve.yaml").write_text(file)
    log = home / "deploy.log"
    with log.open("wb") as output:
        done = subprocess.run(
            ["bash", "-e", "-c", commands], cwd=home, env=environment_of(home), stdout=output, stderr=output,
            timeout=START, check=False,
        )  # fmt: skip
    assert done.returncode == 0, log.read_text()[-4000:]
    assert eventually(models, within=START) == ["simulated"], log.read_text()[-4000:]
