"""`penstock serve --ray-address`: Ray places the other node, and starts it again; it ends with the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.ray.conftest import needs_cluster
from tests.support.nodes import NAMESPACES

pytestmark = [*needs_cluster, pytest.mark.timeout(500)]
ROOT = Path(__file__).parents[2]
SCENE = f"ip link set lo up && exec {sys.executable} -m tests.ray.placed_nodes_scene"


def test_ray_places_a_node_starts_it_again_and_ends_it_with_the_server() -> None:
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [*NAMESPACES, "--net", "sh", "-c", SCENE],
            cwd=ROOT,
            env={**os.environ, "RAY_TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=450,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == {"answer": 5, "is_another": True, "status": 0, "left": 0}
