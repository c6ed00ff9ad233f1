"""Combinations of vLLM's options, each with the plugin and without: inside/combinations.py. The answers are equal.

Steps travel as changes, in checking mode. docs/howto/vllm.md has the table of combinations.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import tiers
from tests.support import peer, tiny_models
from tests.support.vllm_server import START, serving

INSIDE = Path(__file__).parent / "inside"
PARTS = "queue,steps"
PROMPTS = ["hello", "The quick brown fox", "0, 1, 2, 3,"]  # of inside/combinations.py
VARIABLES = {"PENSTOCK_VLLM_STRICT": "1", "PENSTOCK_VLLM_CHECK_STEPS": "1"}

pytestmark = pytest.mark.timeout(2 * START)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    peer.python_of_vllm()
    return peer.write_site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peer.write_model(peer.python_of_vllm(), tiny_models.LLAMA, tmp_path_factory.mktemp("models"))


def answers_of(name: str, site: Path, model: Path, folder: Path) -> tuple[Any, Any, str]:
    """Returns the answers without the plugin and with it, and the log."""
    command = [peer.python_of_vllm(), str(INSIDE / "combinations.py"), str(folder), str(model), name, PARTS]
    environment = peer.environment(site, **VARIABLES)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START)
    log = done.stdout + done.stderr
    answers = dict(re.findall(r"^ANSWERS (\S+) (.*)$", done.stdout, re.MULTILINE))
    assert answers.keys() == {"0", PARTS}, log[-8000:]
    return json.loads(answers["0"]), json.loads(answers[PARTS]), log


def number_of_queues(log: str) -> int:
    """Returns the number of workers' queues in the log: none is without the plugin."""
    return log.count("penstock carries a queue of vLLM to 2 local readers")


@pytest.mark.parametrize("name", ["call", "grammar", *tiers.only_in_all("pipeline", "sleep")])
def test_answers_with_the_plugin_are_vllms_with(name: str, site: Path, model: Path, tmp_path: Path) -> None:
    expected, actual, log = answers_of(name, site, model, tmp_path)
    assert actual == expected
    assert number_of_queues(log) == 1


@tiers.needs_all
def test_answers_of_adapters_differ_and_are_vllms(site: Path, model: Path, tmp_path: Path) -> None:
    expected, actual, _ = answers_of("adapters", site, model, tmp_path)
    assert actual == expected
    *by_adapter, mixed = actual
    assert len({str(answers) for answers in by_adapter}) == 3, "an adapter changes no answer"
    # Not the first: vLLM 0.32.0 on a CPU computes a request without an adapter with the last adapter of its batch.
    assert mixed[1:] == [answers[0] for answers in by_adapter[1:]]


@tiers.needs_all
def test_answers_of_two_engines_are_equal_and_vllms(site: Path, model: Path, tmp_path: Path) -> None:
    expected, actual, log = answers_of("data", site, model, tmp_path)
    assert actual == expected
    assert actual[::2] == actual[1::2]
    assert number_of_queues(log) == 2


@tiers.needs_all
def test_answers_from_kv_in_files_are_vllms(site: Path, model: Path, tmp_path: Path) -> None:
    expected, actual, log = answers_of("connector", site, model, tmp_path)
    assert actual == expected
    assert actual[1] == actual[2]
    assert log.count("External Cache Hit!") == 6, "answers were computed again"


@tiers.needs_all
def test_sleep_mode_is_refused_by_vllm_on_a_cpu(site: Path, model: Path, tmp_path: Path) -> None:
    expected, actual, _ = answers_of("sleep mode", site, model, tmp_path)
    assert all("Sleep mode is not supported on current platform" in text for text in (expected, actual))


@tiers.needs_all
def test_two_api_servers_answer_as_llm_without_the_plugin(site: Path, model: Path, tmp_path: Path) -> None:
    expected, actual, _ = answers_of("text", site, model, tmp_path)
    assert actual == expected
    log = tmp_path / "log"
    with serving(site, model, log, "--api-server-count", "2", PENSTOCK_VLLM=PARTS, **VARIABLES) as server:
        answers = [[server.ask(prompt, 32) for prompt in PROMPTS] for _ in range(4)]
        assert len(server.api_servers()) == 2
    assert answers == [expected] * 4
