"""Workers of vLLM's executor are killed, without a model: inside/executor_deaths.py."""

import itertools
import json
import re
import subprocess
from pathlib import Path

import pytest

from tests import tiers
from tests.support import peer, tiny_models

SCRIPT = Path(__file__).parent / "inside" / "executor_deaths.py"
PROMISED = 0.5  # seconds until the failure callback is called, and until a waiting call raises
SLACK = 1.0  # on a machine that has other work; the figure itself is printed
EACH = 5.0  # seconds for one death, with the processes that it needs
START = 400.0


@pytest.mark.timeout(tiers.VLLM_WORKER_DEATHS * EACH + 2 * START)
@pytest.mark.parametrize("workers", [2, *tiers.only_in_all(4)])
def test_executor_reports_each_death_with_its_cause(workers: int, seed: int, tmp_path: Path) -> None:
    python, count = peer.python_of_vllm(), tiers.VLLM_WORKER_DEATHS
    model = peer.write_model(python, tiny_models.LLAMA, tmp_path / "models")
    variables = {"PENSTOCK_VLLM": "queue", "PENSTOCK_VLLM_STRICT": "1"}
    environment = peer.environment(peer.write_site(tmp_path / "site"), **variables)
    command = [python, str(SCRIPT), str(count), str(seed), str(model), str(workers)]
    limit = count * EACH + START
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    match = re.search(r"^DEATHS (.*)$", done.stdout, re.MULTILINE)
    assert match is not None, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(match[1])
    by_scene = {scene: [*itertools.chain(*durations)] for scene, durations in report["took"].items()}
    took = [*itertools.chain(*by_scene.values())]
    assert None not in took, report["took"]
    took.sort()
    for name, durations in {**by_scene, "all": took, "end of the process": report["ended"]}.items():
        middle, most = sorted(durations)[len(durations) // 2], max(durations)
        print(f"{workers} workers, {name}: {len(durations)} times, p50 {middle * 1e3:.0f} ms, max {most * 1e3:.0f}")
    assert not report["wrong"]
    assert report["left"] == [0, 0, 0]
    assert took[len(took) // 2] <= PROMISED and took[-1] <= PROMISED + SLACK
