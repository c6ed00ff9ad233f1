"""Processes that use the queue as vLLM does are killed in the middle of calls: inside/deaths.py."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests import tiers
from tests.support import peer

SCRIPT = Path(__file__).parent / "inside" / "deaths.py"
PROMISED = 0.15  # seconds until a process hears of a death
SLACK = 0.35  # on a machine that has other work; the figure itself is printed
EACH = 1.0  # seconds for one death, with the processes that it needs


@pytest.mark.timeout(tiers.VLLM_DEATHS * EACH + 120)
def test_each_survivor_of_a_kill_hears_of_it_and_nothing_is_left(seed: int, tmp_path: Path) -> None:
    command = [peer.python_of_vllm(), str(SCRIPT), str(tiers.VLLM_DEATHS), str(seed)]
    variables = {"PENSTOCK_VLLM": "queue", "PENSTOCK_VLLM_STRICT": "1"}
    environment = peer.environment(peer.write_site(tmp_path / "site"), **variables)
    limit = tiers.VLLM_DEATHS * EACH + 100
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    match = re.search(r"^DEATHS (.*)$", done.stdout, re.MULTILINE)
    assert match is not None, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(match[1])
    took = report["took"]
    late = sum(duration > PROMISED for duration in took)
    print(f"{tiers.VLLM_DEATHS} deaths: p50 {took[len(took) // 2] * 1e3:.0f} ms, max {took[-1] * 1e3:.0f}, {late} late")
    assert report["hung"] == 0
    assert report["left"] == [0, 0, 0]
    assert len(took) == 2 * tiers.VLLM_DEATHS
    assert took[-1] <= PROMISED + SLACK
