"""scripts/device, where there is no device: each row by itself is in tests/unit/test_device_script.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiers
from tests.support.documents import ROOT


def run(*arguments: object, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/device", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a CUDA device")
def test_device_script_says_so_and_succeeds_when_there_is_no_device(tmp_path: Path) -> None:
    done = run("--out", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "there is no CUDA device" in done.stdout


@tiers.needs_all  # compiles the core
@pytest.mark.timeout(1500)
def test_each_row_passes_in_a_rehearsal(tmp_path: Path) -> None:
    done = run("--rehearse", "--out", tmp_path, "--minutes", 24, timeout=1480)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + (tmp_path / "device.log").read_text()
    rows = json.loads((tmp_path / "device.json").read_text())["rows"]
    assert {row["name"] for row in rows if row["result"] != "passed"} == {"memcheck"}
    assert [row["result"] for row in rows if row["name"] == "memcheck"] == ["not measured"]
    for row in rows:
        assert f"── {row['name']} (at most" in done.stdout
