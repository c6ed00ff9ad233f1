"""`scripts/bench nodes`, small: both ways in front of replicas are measured beside the engine itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiers
from tests.ray.conftest import needs_cluster

ROOT = Path(__file__).parents[2]
pytestmark = [*needs_cluster, tiers.needs_all, pytest.mark.timeout(600)]


def test_a_quick_run_measures_every_case_of_replicas(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "bench.nodes", "--quick", "--json", "--only", "first-token,deaths", "--out", tmp_path],
        cwd=ROOT, capture_output=True, text=True, timeout=580,
    )  # fmt: skip
    assert run.returncode in (0, 1), run.stderr  # 1: a target was missed, which this says nothing about
    records = [json.loads(line) for line in run.stdout.splitlines()]
    assert not [record for record in records if record["case"] in ("failed", "skipped")], run.stderr[-4000:]
    ways = {record["impl"] for record in records if record["case"] == "first-token"}
    assert ways == {f"{mode}, {way}" for mode in ("HAProxy", "Serve's proxy") for way in ("direct", "through Serve")}
    assert {record["impl"] for record in records if record["case"] == "deaths"} == {"HAProxy", "Serve's proxy"}
    targets = {record["target"]: record for record in records if record["case"] == "target"}
    assert len(targets) == 5 and targets["a replica is killed, HAProxy: the next request is served"]["figure"] > 0
