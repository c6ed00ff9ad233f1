"""Processes of `vllm serve` are killed under clients, without a model: inside/server_deaths.py."""

from pathlib import Path

import pytest

from tests import tiers
from tests.support.vllm_kills import run_campaign

PROMISED = 0.5  # seconds until a client has its error, and /health says so
SLACK = 1.5  # on a machine that has other work; the figures are printed
EACH = 30.0
START = 400.0


@tiers.needs_all
@pytest.mark.timeout(tiers.VLLM_SERVER_DEATHS * EACH + 2 * START)
def test_clients_of_a_server_get_each_death_with_its_cause(seed: int, tmp_path: Path) -> None:
    kills = tiers.VLLM_SERVER_DEATHS
    limit = kills * EACH + START
    report = run_campaign("server", ["--kills", str(kills), "--seed", str(seed)], tmp_path, limit)
    assert report["kills"] == kills and not report["wrong"] and not report["left"]
    for effect in ("/health", "the last client's answer"):
        took = sorted(report["took"][f"all, {effect}"])
        assert took[len(took) // 2] <= PROMISED and took[-1] <= PROMISED + SLACK
