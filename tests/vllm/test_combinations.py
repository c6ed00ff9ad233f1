"""Combinations of vLLM's options, each with the plugin and without: pipeline stages, grammars, calls of a user's own.

Two API servers are in test_serving_deaths.py. The build for the CPU refuses sleep mode.
"""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import peer, tiny_models
from tests.support.vllm_server import START

SCRIPT = Path(__file__).parent / "inside" / "combinations.py"

pytestmark = pytest.mark.timeout(3 * START)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    peer.python_of_vllm()
    return peer.write_site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peer.write_model(peer.python_of_vllm(), tiny_models.LLAMA, tmp_path_factory.mktemp("models"))


def run(site: Path, model: Path, name: str, parts: str) -> subprocess.CompletedProcess[str]:
    variables = {"PENSTOCK_VLLM": parts, "PENSTOCK_VLLM_STRICT": "1", "PENSTOCK_VLLM_CHECK_STEPS": "1"}
    command = [peer.python_of_vllm(), str(SCRIPT), str(model), name]
    environment = peer.environment(site, **variables)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START)


def answers(done: subprocess.CompletedProcess[str]) -> Any:
    match = re.search(r"^ANSWERS (.*)$", done.stdout, re.MULTILINE)
    assert match is not None, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(match[1])


@pytest.mark.parametrize("name", ["pipeline", "grammar", "rpc"])
def test_answers_are_those_of_vllm_as_it_is_with(name: str, site: Path, model: Path) -> None:
    ours = run(site, model, name, "queue,steps")
    assert "penstock carries a queue of vLLM to 2 local readers" in ours.stdout + ours.stderr
    assert answers(ours) == answers(run(site, model, name, "0"))


def test_sleep_mode_is_refused_by_the_cpu_build(site: Path, model: Path) -> None:
    done = run(site, model, "sleep", "queue")
    assert "Sleep mode is not supported on current platform" in done.stdout + done.stderr
