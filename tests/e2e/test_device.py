"""scripts/device, where there is no device: what it does where there is one, only such a machine can show."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a CUDA device")
def test_device_script_says_so_and_succeeds_when_there_is_no_device(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/device", "--out", tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "there is no CUDA device" in done.stdout
