"""The caches of images that vLLM's processes share, with vLLM's own values, in the interpreter that has vLLM."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import peer

INSIDE = Path(__file__).parent / "inside"

pytestmark = pytest.mark.timeout(660)


@pytest.mark.parametrize("name", ["image_caches.py", "image_storage.py", "tensors.py"])
def test_inside_vllm(name: str, tmp_path: Path) -> None:
    python = peer.python_of_vllm()
    shutil.copy(INSIDE / name, tmp_path)  # away from our conftest.py, which needs more than vLLM brings
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
    environment = peer.environment(peer.write_site(tmp_path / "site"))
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
