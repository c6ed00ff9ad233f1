"""Workers of vLLM's executor are killed, without a model: inside/executor_deaths.py."""

import itertools
from pathlib import Path

import pytest

from tests import tiers
from tests.support.vllm_kills import run_campaign

PROMISED = 0.5  # seconds until the failure callback is called, and until a waiting call raises
SLACK = 1.0  # on a machine that has other work; the figure itself is printed
EACH = 5.0  # seconds for one death, with the processes that it needs
START = 400.0


@pytest.mark.timeout(tiers.VLLM_WORKER_DEATHS * EACH + 2 * START)
@pytest.mark.parametrize("workers", [2, *tiers.only_in_all(4)])
def test_executor_reports_each_death_with_its_cause(workers: int, seed: int, tmp_path: Path) -> None:
    kills = tiers.VLLM_WORKER_DEATHS
    options = ["--kills", str(kills), "--seed", str(seed), "--workers", str(workers)]
    report = run_campaign("executor", options, tmp_path, kills * EACH + START)
    assert report["kills"] == kills and not report["wrong"] and not report["left"]
    took = sorted(itertools.chain(*(report["took"][f"all, {effect}"] for effect in ("the error", "the callback"))))
    assert took[len(took) // 2] <= PROMISED and took[-1] <= PROMISED + SLACK
