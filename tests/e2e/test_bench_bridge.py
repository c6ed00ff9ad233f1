"""The benchmarks of nodes as a user starts them, small: of the bridge, every way of which carries its frames, and of a
server of two nodes."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests import tiers

ROOT = Path(__file__).parent.parent.parent


@tiers.needs_all
def test_a_quick_run_of_the_bridge_measures_every_way_and_a_value(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PENSTOCK_PEER_PYTHON"}
    run = subprocess.run(
        [sys.executable, "-m", "bench.nodes.bridge", "--quick", "--json", "--out", str(tmp_path)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert run.returncode in (0, 1), run.stderr  # 1: a target was missed, which this says nothing about
    records = [json.loads(line) for line in run.stdout.splitlines()]
    assert not [record for record in records if record["case"] == "failed"]
    measured = {(record["impl"], record["nbytes"]) for record in records if record["case"] == "bridge"}
    assert measured == {
        (way, nbytes) for way in ("penstock", "penstock-bridge", "zeromq-tcp") for nbytes in (120, 2600)
    }
    assert all(record["ms"] > 0 for record in records if record["case"] == "value")
    assert {record["case"] for record in records} >= {"value", "idle", "target"}
    assert "Targets" in run.stderr


@tiers.needs_all
def test_a_quick_run_measures_the_first_token_of_an_engine_of_each_node(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "bench.nodes", "--quick", "--json", "--only", "remote-group", "--out", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert run.returncode in (0, 1), run.stderr  # 1: a target was missed
    records = [json.loads(line) for line in run.stdout.splitlines()]
    assert not [record for record in records if record["case"] == "failed"]
    assert [record["impl"] for record in records if record["case"] == "remote-group"][-1] == "added"
