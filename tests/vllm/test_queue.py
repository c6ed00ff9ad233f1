"""The queue of vLLM on a channel, in the interpreter that has vLLM: inside/queues.py says what is tested."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import peer

INSIDE = Path(__file__).parent / "inside"
LIMIT = 600.0  # seconds, on a machine that has other work; vLLM is imported

pytestmark = pytest.mark.timeout(LIMIT + 60)


def test_queues_of_vllm_on_channels(tmp_path: Path) -> None:
    python = peer.python_of_vllm()
    shutil.copy(INSIDE / "queues.py", tmp_path)  # away from our conftest.py, which needs more than vLLM brings
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=30", "queues.py"]
    command += ["-p", "penstock.integrations.vllm.rebind"]
    environment = peer.environment(peer.write_site(tmp_path / "site"), PENSTOCK_VLLM="queue")
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
